import pytest

from kldaudit.audit import Settings
from kldaudit.capture.asked import checkpoint_scheme, compare_selected


def attention(backend="CPU_ATTN", kv="auto", supported=True):
    return {
        "backend": backend,
        "kv_cache_dtype": kv,
        "kv_cache_torch_dtype": "torch.bfloat16",
        "kv_cache_dtype_supported": supported,
    }


def linear(kind="QKVParallelLinear", method="UnquantizedLinearMethod", scheme=None, kernels=(), activations=None):
    return {"kind": kind, "method": method, "scheme": scheme, "kernels": list(kernels), "activations": activations}


W4A16 = linear(
    method="CompressedTensorsLinearMethod",
    scheme="CompressedTensorsWNA16",
    kernels=["CPUWNA16LinearKernel"],
    activations="16-bit",
)


@pytest.fixture
def selected():
    """What an engine reports that runs the default settings on two threads, as asked."""
    return {
        "attention": [attention(), attention()],
        "linear": [linear(kind="VocabParallelEmbedding", method="UnquantizedEmbeddingMethod"), linear(), linear()],
        "model_class": "vllm.model_executor.models.llama.LlamaForCausalLM",
        "device": "cpu",
        "torch_threads": 2,
        "dtype": "bfloat16",
        "head_dtype": "bfloat16",
        "enforce_eager": True,
        "cudagraph_mode": "NONE",
        "chunked_prefill": True,
        "chunk": 2048,
        "max_model_len": 8192,
        "tensor_parallel_size": 1,
        "prefix_caching": False,
        "speculative_decoding": False,
    }


def line(setting, settings, scheme, selected):
    return {one.setting: one for one in compare_selected(settings, scheme, selected)}[setting]


def test_an_engine_that_runs_what_is_asked_honours_every_setting(selected):
    lines = compare_selected(Settings(), None, selected)
    assert [one.setting for one in lines if not one.honoured] == []
    assert not any(one.unsupported for one in lines)


def test_every_setting_is_compared_once(selected):
    names = [one.setting for one in compare_selected(Settings(), "W4A16-INT", selected)]
    assert sorted(names) == sorted(set(names))
    assert {"attention_backend", "kv_cache_dtype", "weight_quantization", "activation_quantization", "threads"} <= set(
        names
    )


@pytest.mark.parametrize(
    ("key", "value", "setting", "asked", "got"),
    [
        ("dtype", "float16", "dtype", "bfloat16", "float16"),
        ("head_dtype", "float32", "head_dtype", "bfloat16", "float32"),
        ("enforce_eager", False, "enforce_eager", "True", "False"),
        ("cudagraph_mode", "CUDAGraphMode.FULL", "cuda_graphs", "none", "full"),
        ("chunked_prefill", False, "chunked_prefill", "True", "False"),
        ("chunk", 512, "chunk", "2048", "512"),
        ("max_model_len", 4096, "max_model_len", "8192", "4096"),
        ("tensor_parallel_size", 2, "tensor_parallel_size", "1", "2"),
        ("prefix_caching", True, "prefix_caching", "False", "True"),
        ("speculative_decoding", True, "speculative_decoding", "False", "True"),
        ("torch_threads", 1, "threads", "2", "1"),
    ],
)
def test_a_setting_that_ran_differently_is_not_honoured(selected, key, value, setting, asked, got):
    one = line(setting, Settings(), None, {**selected, key: value})
    assert (one.asked, one.got, one.honoured) == (asked, got, False)


@pytest.mark.parametrize("mode", ["NONE", "CUDAGraphMode.NONE", "0"])
def test_no_graphs_are_no_graphs_however_they_are_spelt(selected, mode):
    assert line("cuda_graphs", Settings(), None, {**selected, "cudagraph_mode": mode}).got == "none"


def test_any_graphs_are_accepted_where_eager_is_not_asked(selected):
    one = line(
        "cuda_graphs", Settings(enforce_eager=False), None, {**selected, "cudagraph_mode": "CUDAGraphMode.PIECEWISE"}
    )
    assert (one.asked, one.got, one.honoured) == ("any", "piecewise", True)


def test_threads_of_a_gpu_engine_are_not_compared(selected):
    lines = compare_selected(Settings(), None, {**selected, "device": "cuda:0", "torch_threads": 64})
    assert "threads" not in [one.setting for one in lines]


def test_another_attention_backend_than_asked_is_not_honoured(selected):
    one = line("attention_backend", Settings(attention_backend="FLASH_ATTN"), None, selected)
    assert (one.asked, one.got, one.honoured) == ("FLASH_ATTN", "CPU_ATTN", False)


def test_the_attention_backend_that_was_asked_is_honoured(selected):
    assert line("attention_backend", Settings(attention_backend="CPU_ATTN"), None, selected).honoured


def test_any_attention_backend_is_accepted_for_auto(selected):
    one = line("attention_backend", Settings(), None, selected)
    assert (one.asked, one.got, one.honoured) == ("auto", "CPU_ATTN", True)


def test_mixed_backends_are_counted_and_not_what_was_asked(selected):
    mixed = {**selected, "attention": [attention("A"), attention("B"), attention("A")]}
    one = line("attention_backend", Settings(attention_backend="A"), None, mixed)
    assert (one.got, one.honoured) == ("A (2 layers), B (1 layers)", False)


def test_a_kv_cache_type_that_the_backend_does_not_implement_is_unsupported(selected):
    layers = {**selected, "attention": [attention(kv="int8_per_token_head", supported=False)]}
    one = line("kv_cache_dtype", Settings(kv_cache_dtype="int8_per_token_head"), None, layers)
    assert (one.got, one.honoured, one.unsupported) == ("int8_per_token_head", False, True)


def test_one_unsupported_layer_is_enough(selected):
    layers = {**selected, "attention": [attention(kv="fp8"), attention(kv="fp8", supported=False)]}
    one = line("kv_cache_dtype", Settings(kv_cache_dtype="fp8"), None, layers)
    assert (one.honoured, one.unsupported) == (False, True)


def test_a_kv_cache_type_that_is_ignored_is_not_honoured(selected):
    one = line("kv_cache_dtype", Settings(kv_cache_dtype="fp8_e4m3"), None, selected)
    assert (one.asked, one.got, one.honoured, one.unsupported) == ("fp8_e4m3", "bfloat16", False, False)


def test_an_automatic_kv_cache_says_the_type_it_became(selected):
    one = line("kv_cache_dtype", Settings(), None, selected)
    assert (one.asked, one.got, one.honoured) == ("auto", "bfloat16", True)


def test_a_quantized_checkpoint_that_runs_quantized_is_honoured(selected):
    one = line("weight_quantization", Settings(), "W4A16-INT", {**selected, "linear": [W4A16, W4A16]})
    assert (one.asked, one.got, one.honoured) == ("W4A16-INT", "CompressedTensorsWNA16/CPUWNA16LinearKernel", True)


def test_one_layer_left_unquantized_is_not_what_was_asked(selected):
    one = line("weight_quantization", Settings(), "W4A16-INT", {**selected, "linear": [W4A16, linear()]})
    assert (one.got, one.honoured) == ("CompressedTensorsWNA16/CPUWNA16LinearKernel (1 layers), none (1 layers)", False)


@pytest.mark.parametrize("kind", ["VocabParallelEmbedding", "ParallelLMHead"])
def test_embedding_and_head_need_not_be_quantized(selected, kind):
    layers = {**selected, "linear": [linear(kind=kind), W4A16]}
    assert line("weight_quantization", Settings(), "W4A16-INT", layers).honoured


def test_weights_quantized_unasked_are_not_honoured(selected):
    one = line("weight_quantization", Settings(), None, {**selected, "linear": [W4A16]})
    assert (one.asked, one.honoured) == ("none", False)


def test_online_quantization_comes_before_the_checkpoints_own(selected):
    layers = {**selected, "linear": [linear(method="Fp8OnlineLinearMethod")]}
    one = line("weight_quantization", Settings(quantization="fp8"), None, layers)
    assert (one.asked, one.got, one.honoured) == ("fp8", "Fp8OnlineLinearMethod", True)


def test_online_quantization_that_is_ignored_is_not_honoured(selected):
    one = line("weight_quantization", Settings(quantization="fp8"), None, selected)
    assert (one.asked, one.got, one.honoured) == ("fp8", "none", False)


def test_a_head_dtype_of_its_own_is_compared_with_what_ran(selected):
    settings = Settings(head_dtype="float32")
    assert not line("head_dtype", settings, None, selected).honoured
    assert line("head_dtype", settings, None, {**selected, "head_dtype": "float32"}).honoured


def test_activations_that_turn_into_int8_unasked_are_not_honoured(selected):
    layers = {**selected, "linear": [linear(activations="int8"), linear()]}
    one = line("activation_quantization", Settings(), None, layers)
    assert (one.asked, one.got, one.honoured) == ("16-bit", "int8 in 1 of 2 layers", False)


def test_activations_of_an_unquantized_checkpoint_have_16_bits(selected):
    one = line("activation_quantization", Settings(), None, selected)
    assert (one.asked, one.got, one.honoured) == ("16-bit", "16-bit", True)


def test_activations_of_online_quantization_are_named_by_its_method(selected):
    layers = {**selected, "linear": [linear(method="Fp8OnlineLinearMethod")]}
    one = line("activation_quantization", Settings(quantization="fp8"), None, layers)
    assert (one.asked, one.got, one.honoured) == ("fp8", "Fp8OnlineLinearMethod", True)


def test_activations_of_online_quantization_that_is_ignored_are_not_honoured(selected):
    assert not line("activation_quantization", Settings(quantization="fp8"), None, selected).honoured


def test_activations_that_turn_into_int8_are_not_what_w4a16_asks(selected):
    layers = {**selected, "linear": [W4A16, {**W4A16, "activations": "int8"}]}
    one = line("activation_quantization", Settings(), "W4A16-INT", layers)
    assert (one.asked, one.got, one.honoured) == ("16-bit", "int8 in 1 of 2 layers", False)


def test_activations_left_alone_are_what_w4a16_asks(selected):
    one = line("activation_quantization", Settings(), "W4A16-INT", {**selected, "linear": [W4A16]})
    assert (one.got, one.honoured) == ("16-bit", True)


def test_int8_activations_are_what_w8a8_asks(selected):
    layers = {**selected, "linear": [linear(method="CompressedTensorsLinearMethod", activations="int8")]}
    one = line("activation_quantization", Settings(), "W8A8-INT", layers)
    assert (one.asked, one.got, one.honoured) == ("W8A8-INT", "int8 in 1 of 1 layers", True)


@pytest.mark.parametrize(
    ("asked", "model_class", "got", "honoured"),
    [
        ("auto", "vllm.model_executor.models.llama.LlamaForCausalLM", "vllm", True),
        ("vllm", "vllm.model_executor.models.llama.LlamaForCausalLM", "vllm", True),
        ("transformers", "vllm.model_executor.models.llama.LlamaForCausalLM", "vllm", False),
        ("transformers", "vllm.model_executor.models.transformers.TransformersForCausalLM", "transformers", True),
        ("vllm", "vllm.model_executor.models.transformers.TransformersForCausalLM", "transformers", False),
    ],
)
def test_the_model_implementation_is_told_from_its_class(selected, asked, model_class, got, honoured):
    one = line("model_impl", Settings(model_impl=asked), None, {**selected, "model_class": model_class})
    assert (one.got, one.honoured) == (got, honoured)


def group(bits, kind="int", activations=None):
    return {"weights": {"num_bits": bits, "type": kind}, "input_activations": activations}


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"config_groups": {"a": group(4)}}}, "W4A16-INT"),
        ({"quantization_config": {"config_groups": {"a": group(8, activations={"num_bits": 8})}}}, "W8A8-INT"),
        ({"quantization_config": {"config_groups": {"a": group(8, "float", {"num_bits": 8})}}}, "W8A8-FP"),
        ({"quantization_config": {"config_groups": {"a": group(4), "b": group(4)}}}, "W4A16-INT"),
        ({"quantization_config": {"config_groups": {"a": group(8), "b": group(4)}}}, "W4A16-INT+W8A16-INT"),
    ],
)
def test_a_checkpoints_scheme_is_named_from_its_config(config, scheme):
    assert checkpoint_scheme(config) == scheme


def test_a_scheme_that_no_layer_runs_is_not_honoured(selected):
    assert not line("weight_quantization", Settings(), "W4A16-INT", {**selected, "linear": []}).honoured
