import copy
import json
from functools import reduce

import jsonschema
import pytest
from chain import tie_together, update

from kldaudit import METHOD_VERSION, __version__
from kldaudit.audit import arm_spec, parse_audit
from kldaudit.disclosure.fields import FIELDS, NO_GPU
from kldaudit.disclosure.sheet import Disclosure, claim_line, disclose, fill, lookup, markdown
from kldaudit.errors import RecordError
from kldaudit.records import write_json

NINE = {
    "Reference checkpoint",
    "Full runtime environment",
    "Evaluation text",
    "Calibration data",
    "Context lengths",
    "Sampled positions",
    "KL direction",
    "Vocabulary truncation",
    "Aggregation",
}
SPECS = {spec.key: spec for spec in FIELDS}
OF_GPU = {spec.key for spec in FIELDS if spec.absent == NO_GPU}
OF_IMAGE = {"base_image", "container"}
OF_A_RUN = {spec.key for spec in FIELDS if spec.needs_run}


def checkpoint(name):
    return {
        "checkpoint": name,
        "source": f"hf:lab/{name}",
        "revision": "c0ffee",
        "made_by": "as published",
        "calibration": "512 sequences of C4",
        "files": [
            {"path": "config.json", "sha256": "11", "size": 1},
            {"path": "a.safetensors", "sha256": "22", "size": 2},
        ],
    }


def asked(setting, asked="auto", got="auto", honoured=True):
    return {"setting": setting, "asked": asked, "got": got, "honoured": honoured, "unsupported": False}


def manifest():
    return {
        "asked": [
            asked("attention_backend", got="FLASH_ATTN"),
            asked("kv_cache_dtype", got="bfloat16"),
            asked("weight_quantization", "W4A16-INT", "WNA16/Marlin"),
            asked("activation_quantization", "16-bit", "16-bit"),
        ],
        "python": "CPython 3.11.7",
        "python_packages": [{"name": "vllm", "version": "1", "record_sha256": "33"}] * 2,
        "debian_packages": [{"name": "adduser", "version": "3"}] * 3,
        "operating_system": "Debian GNU/Linux 12",
        "kernel": "Linux 6.1",
        "cpu": {
            "model": "EPYC",
            "family_model_stepping": "25/1/1",
            "microcode": "0xa",
            "usable_cores": 4,
            "isa_flags": "avx avx2",
        },
        "gpu": [
            {"name": "H200", "sm": "9.0", "memory_bytes": 1, "vbios": "96", "ecc": {"current": "on"}, "mig": "off"},
        ],
        "stack": {
            "driver": "580",
            "CUDA driver API": "13.0",
            "CUDA runtime": "13.0",
            "cuDNN": "9.1",
            "cuBLAS": "13.1",
            "NCCL": "2.28",
            "NVRTC": "13.0",
            "Triton": "3.6",
            "FlashInfer": "not loaded",
            "oneDNN": "3.12",
            "OpenMP": "libgomp.so.1.0.0",
        },
        "stray_files": [{"path": "/opt/x.so", "sha256": "66"}],
        "libraries": [
            {"path": "/lib/libc.so.6", "owner": "debian:libc6=2.36", "as_packaged": True},
            {"path": "/lib/libm.so.6", "owner": "debian:libc6=2.36", "as_packaged": False},
            {"path": "/opt/x.so", "owner": "none", "as_packaged": None},
        ],
        "caches": {
            "before": {"triton": {"state": "cold", "entries": 0}, "flashinfer": {"state": "warm", "entries": 3}},
            "after": {"triton": {"state": "warm", "entries": 9}, "flashinfer": {"state": "warm", "entries": 3}},
        },
        "container": {"network": "none", "root": "read-only"},
        "primitives": ["oneDNN v3.12.0", "cpu,matmul,brg_matmul"],
        "torch": {"version": "2.13", "commit": "44", "cpu_capability": "AVX2"},
        "engine": {"name": "vllm", "version": "0.32", "commit": "55", "arguments": {"seed": 0}},
        "selected": {
            "linear": [
                {"kind": "QKV", "method": "CT", "scheme": "WNA16", "kernels": ["Marlin"]},
                {"kind": "QKV", "method": "CT", "scheme": "WNA16", "kernels": ["Marlin"]},
                {"kind": "Head", "method": "Unquantized", "scheme": None, "kernels": []},
            ],
            "attention": [{"kv_scales": {"q": 1.0, "k": 0.5, "v": 1.0}}] * 2,
            "model_class": "vllm.Llama",
            "model_runner": "vllm.runner",
            "enforce_eager": True,
            "cudagraph_mode": "NONE",
            "compilation_mode": "0",
            "chunked_prefill": True,
            "chunk": 2048,
            "prefix_caching": False,
            "speculative_decoding": False,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "max_num_seqs": 1,
            "torch_threads": 2,
        },
        "kernels": [
            {"name": "nvjet_sm90", "count": 3, "share": 0.6, "family": "GEMM of cuBLASLt, nvjet, sm90"},
            {"name": "vllm::softmax", "count": 1, "share": 0.4, "family": None},
            {"name": "aten::copy_", "count": 1, "share": 0.001, "family": None},
        ],
        "environment": {"OMP_NUM_THREADS": "2"},
    }


def overall():
    return {
        "positions": 200,
        "infinite": 0,
        "mean": 0.012345,
        "flips": 9,
        "flips_at_ties": 1,
        "ties_reference": 2,
        "ties_variant": 3,
    }


def divergence():
    return {
        "reference": "bf16",
        "variant": "int4",
        "outcome": "measured",
        "reason": None,
        "method_version": METHOD_VERSION,
        "direction": "KL(reference‖variant)",
        "vocab_size": 49152,
        "logits_dtype": {"reference": "bfloat16", "variant": "float32"},
        "every": 32,
        "excluded_positions": 0,
        "nonfinite_positions": 0,
        "overall": overall(),
        "prompts": {"words": overall()},
        "window_rule": "words: 1024 tokens, 32 probes",
        "noise_floor": overall() | {"mean": 0.0, "flips": 0},
        "interval": {
            "low": 0.01,
            "high": 0.015,
            "method": "bootstrap",
            "blocks": 8,
            "resamples": 2000,
            "seed": 0,
            "caution": "only 8 blocks",
        },
        "chance": {"agreement": 0.955, "expected": 0.01, "is_chance": False},
    }


def verification(arm):
    return {"arm": arm, "outcome": "identical", "reason": None, "launches": 2, "passes": 2, "comparisons": []}


def arm(name):
    return {"arm": name, "settings": {"max_model_len": 8192}, "capture": {"every": 32}}


@pytest.fixture
def records():
    """Complete records of one comparison on a GPU in a container."""
    return {
        "image": {
            "runtime": "docker",
            "why": "the audit says docker",
            "built_with": "Docker Engine 28",
            "digest": "66",
            "base": "debian:12@sha256:77",
            "reference": "hub/vllm:nightly@sha256:99",
            "reference_checked": "the tag points to the digest",
        },
        "prompts": {
            "words": {
                "about": "a few words",
                "text_sha256": "88",
                "n_tokens": 6400,
                "tokenizer_sha256": "99",
                "chat_template_sha256": "aa",
                "rendering": "plain text",
                "bos": "none added",
                "begins_with_bos": False,
            }
        },
        "kldaudit": {"version": __version__, "method_version": METHOD_VERSION},
        "reference": {
            "arm": arm("bf16"),
            "checkpoint": checkpoint("base"),
            "manifest": manifest(),
            "verification": verification("bf16"),
        },
        "variant": {
            "arm": arm("int4"),
            "checkpoint": checkpoint("w4a16"),
            "manifest": manifest(),
            "verification": verification("int4"),
            "divergence": divergence(),
        },
    }


@pytest.fixture
def on_cpu(records):
    """The same in a virtual environment on a machine without a GPU."""
    records["image"] |= {"runtime": "venv", "base": "none: the host's system", "reference": "none: made from its lock"}
    records["variant"]["manifest"]["container"] = "none: a venv"
    records["variant"]["manifest"]["gpu"] = "none: torch sees no CUDA device"
    return records


def parent(records, path):
    *folders, last = path.split("/")
    return reduce(lambda found, name: found[name], folders, records), last


def put(records, path, value):
    section, last = parent(records, path)
    section[last] = value


def each_source():
    return [pytest.param(spec.key, source, id=f"{spec.key}-{source}") for spec in FIELDS for source in spec.sources]


# Fields


def test_the_nine_fields_come_first_and_are_all_there():
    assert {spec.title for spec in FIELDS[:9]} == NINE
    assert {spec.group for spec in FIELDS[:9]} == {"The nine"}


def test_every_field_has_its_own_key_and_title_and_a_source():
    assert len({spec.key for spec in FIELDS}) == len({spec.title for spec in FIELDS}) == len(FIELDS)
    assert all(spec.sources for spec in FIELDS)


@pytest.mark.parametrize("key", SPECS)
def test_a_field_with_all_its_sources_is_disclosed(records, key):
    found = fill(SPECS[key], records)
    assert found.status == "disclosed"
    assert found.value
    assert found.known == SPECS[key].known
    assert found.sources == list(SPECS[key].sources)


@pytest.mark.parametrize(("key", "source"), each_source())
def test_a_field_without_one_of_its_sources_is_not_disclosed(records, key, source):
    section, last = parent(records, source)
    del section[last]
    found = fill(SPECS[key], records)
    assert (found.status, found.known) == ("NOT DISCLOSED", None)
    assert source in found.value


@pytest.mark.parametrize("empty", [None, "", [], {}], ids=repr)
@pytest.mark.parametrize(("key", "source"), each_source())
def test_an_empty_source_is_a_missing_one(records, key, source, empty):
    put(records, source, empty)
    assert fill(SPECS[key], records).status == "NOT DISCLOSED"


@pytest.mark.parametrize(("key", "source"), each_source())
def test_a_missing_record_above_a_source_is_a_missing_source(records, key, source):
    del records[source.split("/")[0]]
    assert fill(SPECS[key], records).status == "NOT DISCLOSED"


@pytest.mark.parametrize("value", [0, False])
def test_zero_and_no_are_values(value):
    assert lookup({"a": {"b": value}}, "a/b") is value


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("evaluation_text", "prompts/words/about"),
        ("context_lengths", "prompts/words/n_tokens"),
        ("tokenizer", "prompts/words/chat_template_sha256"),
        ("rendering", "prompts/words/rendering"),
        ("bos", "prompts/words/begins_with_bos"),
        ("runtime_environment", "variant/manifest/engine/version"),
        ("runtime_environment", "variant/manifest/cpu/model"),
        ("flip_rule", "variant/divergence/overall/ties_reference"),
        ("noise_floor", "variant/divergence/noise_floor/mean"),
        ("interval", "variant/divergence/interval/seed"),
    ],
)
def test_a_field_whose_record_is_incomplete_is_not_disclosed(records, key, path):
    section, last = parent(records, path)
    del section[last]
    found = fill(SPECS[key], records)
    assert found.status == "NOT DISCLOSED"
    assert last in found.value


@pytest.mark.parametrize(
    ("key", "setting"),
    [
        ("weight_quantization", "weight_quantization"),
        ("activation_quantization", "activation_quantization"),
        ("kv_cache", "kv_cache_dtype"),
        ("attention_backend", "attention_backend"),
    ],
)
def test_a_setting_that_was_not_compared_is_not_disclosed(records, key, setting):
    lines = records["variant"]["manifest"]["asked"]
    records["variant"]["manifest"]["asked"] = [line for line in lines if line["setting"] != setting]
    assert fill(SPECS[key], records).status == "NOT DISCLOSED"


def texts():
    """Sources whose recorded value is a text, and two lists that may be one."""
    names_of_lists = ("gpu", "debian_packages", "stray_files", "libraries", "kernels", "primitives", "container")
    lists = [f"variant/manifest/{name}" for name in names_of_lists]
    names = ("source", "revision", "made_by", "calibration", "python", "operating_system", "kernel", "commit",
             "version", "model_class", "model_runner", "cudagraph_mode", "compilation_mode", "model", "microcode",
             "family_model_stepping", "isa_flags", "cpu_capability", "digest", "base", "why", "built_with",
             "reference_checked", "window_rule", "name")  # fmt: skip
    return [
        pytest.param(spec.key, source, id=f"{spec.key}-{source}")
        for spec in FIELDS
        for source in spec.sources
        if (source in lists or source.rpartition("/")[2] in names) and spec.key != "does_not_say"
    ]


@pytest.mark.parametrize(("key", "source"), texts())
def test_a_value_that_could_not_be_read_makes_the_field_unknown(records, key, source):
    put(records, source, "unknown: no permission")
    assert fill(SPECS[key], records).status == "unknown"


def test_an_unknown_field_says_why(records):
    put(records, "variant/manifest/engine/commit", "unknown: vllm._version has no commit")
    assert "vllm._version has no commit" in fill(SPECS["engine_commit"], records).value


@pytest.mark.parametrize(
    ("key", "path"),
    [("tokenizer", "prompts/words/chat_template_sha256"), ("runtime_environment", "variant/manifest/cpu/model")],
)
def test_an_unknown_value_inside_a_source_makes_the_field_unknown(records, key, path):
    put(records, path, "unknown: no permission")
    assert fill(SPECS[key], records).status == "unknown"


@pytest.mark.parametrize("key", sorted(OF_GPU))
def test_fields_of_a_gpu_are_not_applicable_without_one(on_cpu, key):
    found = fill(SPECS[key], on_cpu)
    assert (found.status, found.value, found.known) == ("not_applicable", "no GPU: the engine ran on the CPU", None)


@pytest.mark.parametrize("key", sorted(OF_IMAGE))
def test_fields_of_an_image_are_not_applicable_in_a_virtual_environment(on_cpu, key):
    found = fill(SPECS[key], on_cpu)
    assert found.status == "not_applicable"
    assert "virtual environment" in found.value


def test_an_image_made_from_its_lock_is_not_an_adopted_one(on_cpu):
    assert fill(SPECS["adopted"], on_cpu).value == "not adopted: made from its lock"


@pytest.mark.parametrize("key", sorted(set(SPECS) - OF_GPU - OF_IMAGE - {"adopted"}))
def test_every_other_field_is_disclosed_without_a_gpu(on_cpu, key):
    assert fill(SPECS[key], on_cpu).status == "disclosed"


@pytest.mark.parametrize("key", sorted(OF_GPU))
def test_fields_of_a_gpu_that_is_there_but_not_recorded_are_not_disclosed(records, key):
    for name in ("stack", "gpu"):
        del records["variant"]["manifest"][name]
    assert fill(SPECS[key], records).status == "NOT DISCLOSED"


@pytest.fixture
def refused(records):
    """Records of an arm that the engine refused to load."""
    records["variant"]["verification"] |= {"outcome": "refused", "reason": "no such kernel", "passes": 0}
    records["variant"]["divergence"] = {"reference": "bf16", "variant": "int4", "outcome": "refused",
                                        "reason": "no such kernel", "overall": None}  # fmt: skip
    records["variant"]["manifest"] |= {"asked": [], "selected": {}, "kernels": "unknown: the engine did not run"}
    return records


@pytest.mark.parametrize("key", sorted(OF_A_RUN))
def test_fields_of_a_run_are_not_applicable_to_a_refused_arm(refused, key):
    found = fill(SPECS[key], refused)
    assert found.status == "not_applicable"
    assert "the engine refused the arm" in found.value


@pytest.mark.parametrize("key", sorted(set(SPECS) - OF_A_RUN))
def test_all_other_fields_of_a_refused_arm_are_disclosed(refused, key):
    assert fill(SPECS[key], refused).status == "disclosed"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reference_checkpoint", "hf:lab/base; c0ffee; as published; 2 files, weights a.safetensors sha256:22"),
        ("variant_checkpoint", "hf:lab/w4a16; c0ffee; as published; 2 files, weights a.safetensors sha256:22"),
        ("evaluation_text", "words: a few words (text sha256:88)"),
        ("calibration_data", "512 sequences of C4"),
        ("context_lengths", "words 6400 tokens; the engine's context 8192 tokens"),
        ("kl_direction", "KL(reference‖variant)"),
        ("vocabulary_truncation", "none: all 49152 entries, no floor, no top-k, no epsilon"),
        ("weight_quantization", "asked W4A16-INT, ran WNA16/Marlin"),
        ("linear_kernels", "QKV: WNA16/Marlin × 2; Head: Unquantized × 1"),
        ("gpu", "H200 (SM 9.0)"),
        ("eager", "yes"),
        ("prefix_caching", "no"),
        ("parallelism", "TP 1, PP 1, DP 1"),
        ("package_counts", "5 packages (3 Debian, 2 Python)"),
        ("stray_files", "1 found: /opt/x.so sha256:66"),
        ("libraries", "3 shared objects; NOT AS PACKAGED: /lib/libm.so.6; of no package: /opt/x.so"),
        ("cpu_libraries", "oneDNN 3.12; OpenMP libgomp.so.1.0.0"),
        ("autotune_cache", "triton: cold before, 9 entries after; flashinfer: warm before, unchanged"),
        ("gpu_board", "VBIOS 96, ECC current on, MIG off"),
        ("kv_scales", "k 0.5, v 1.0 in 2 of 2 layers"),
        ("kernels", "nvjet_sm90 × 3 (GEMM of cuBLASLt, nvjet, sm90); vllm::softmax × 1; 1 others in the manifest"),
        ("container", "network none, root read-only"),
        ("environment_variables", "OMP_NUM_THREADS=2"),
        ("bos", "words: none added, does not begin with BOS"),
        ("excluded_positions", "0"),
        ("nonfinite_positions", "0 with NaN or +inf logits, 0 with KL = +inf"),
        ("verification", "identical bits in 2 launches × 2 passes"),
        ("documents", "1 (words)"),
    ],
)
def test_a_fields_words_by_hand(records, key, value):
    assert fill(SPECS[key], records).value == value


def test_sampled_positions_name_the_first_token_indices(records):
    value = fill(SPECS["sampled_positions"], records).value
    assert value.startswith("200: ")
    assert "token indices 31, 63, …" in value


def test_rounding_is_half_a_unit_in_the_last_place_of_each_dtype(records):
    value = fill(SPECS["logits_dtype"], records).value
    assert "reference: bfloat16, relative half-ulp 2^-8," in value
    assert "variant: float32, relative half-ulp 2^-24," in value


def test_a_setting_that_ran_differently_shouts(records):
    records["variant"]["manifest"]["asked"][1] = asked("kv_cache_dtype", "fp8", "bfloat16", honoured=False)
    assert fill(SPECS["kv_cache"], records).value == "asked fp8, ran bfloat16: NOT WHAT WAS ASKED FOR"
    assert fill(SPECS["asked_and_got"], records).value == "kv_cache_dtype: asked fp8, ran bfloat16"


def test_an_infinite_noise_floor_is_disclosed(records):
    records["variant"]["divergence"]["noise_floor"]["mean"] = "Infinity"
    assert "inf" in fill(SPECS["noise_floor"], records).value


# The line on top


def test_the_line_of_a_measured_variant(records):
    claim = claim_line("int4", records)
    assert claim.sentence == (
        "int4: mean KL(bf16‖int4) = 0.0123 nats (95 % 0.01 to 0.015), "
        "9 of 200 greedy tokens flipped (4.5 %), bits verified"
    )
    assert (claim.outcome, claim.mean_kl, claim.low, claim.high) == ("measured", 0.012345, 0.01, 0.015)
    assert (claim.positions, claim.flips, claim.verified, claim.as_asked) == (200, 9, True, True)


def test_the_line_of_a_variant_without_an_interval(records):
    records["variant"]["divergence"]["interval"] |= {"low": None, "high": None}
    claim = claim_line("int4", records)
    assert "nats (no interval)" in claim.sentence
    assert (claim.low, claim.high) == (None, None)


def test_the_line_of_an_infinite_mean(records):
    records["variant"]["divergence"]["overall"] |= {"mean": "Infinity", "infinite": 3}
    records["variant"]["divergence"]["interval"] |= {"low": None, "high": None}
    claim = claim_line("int4", records)
    assert "= inf nats (no interval)" in claim.sentence
    assert claim.mean_kl is None


@pytest.mark.parametrize("side", ["reference", "variant"])
@pytest.mark.parametrize("outcome", ["differs", "single"])
def test_the_line_of_bits_that_were_not_verified(records, side, outcome):
    records[side]["verification"]["outcome"] = outcome
    claim = claim_line("int4", records)
    assert claim.verified is False
    outcomes = {"reference": "identical", "variant": "identical", side: outcome}
    assert claim.sentence.endswith(
        f"bits NOT verified (reference {outcomes['reference']}, variant {outcomes['variant']})"
    )


def test_the_line_of_an_engine_that_ran_something_else(records):
    records["variant"]["manifest"]["asked"][0]["honoured"] = False
    claim = claim_line("int4", records)
    assert claim.as_asked is False
    assert claim.sentence.endswith("; the engine did not run what was asked for")


def test_the_line_of_a_refused_variant(refused):
    claim = claim_line("int4", refused)
    assert (claim.outcome, claim.sentence) == ("refused", "int4: refused: no such kernel")
    assert (claim.mean_kl, claim.low, claim.high, claim.positions, claim.flips) == (None, None, None, None, None)
    assert claim.verified is False


def test_a_refused_arm_did_not_run_as_asked(refused):
    assert claim_line("int4", refused).as_asked is False


def test_the_line_of_an_output_that_is_chance_gives_no_figure(records):
    records["variant"]["divergence"]["chance"] = {"agreement": 0.012, "expected": 0.01, "is_chance": True}
    claim = claim_line("int4", records)
    assert claim.outcome == "not the model"
    assert claim.sentence.startswith("int4: NOT THE MODEL'S OUTPUT")
    assert "(1.2 %)" in claim.sentence
    assert "nats" not in claim.sentence


# The sheet


@pytest.fixture
def results(tmp_path, records, refused):
    """The results folder of an audit with a measured and a refused variant, on a CPU."""
    audit = parse_audit(
        {
            "name": "small",
            "prompts": {"words": {"file": "words.txt", "about": "a few words"}},
            "checkpoints": {"base": {"source": "./base"}, "w4a16": {"source": "./w4a16"}},
            "arms": {
                "bf16": {"checkpoint": "base", "reference": True},
                "int4": {"checkpoint": "w4a16"},
                "int3": {"checkpoint": "w4a16"},
            },
        },
        where="test",
    )
    audit.write(tmp_path / "spec.json")
    write_json(tmp_path / "image.json", records["image"] | {"runtime": "venv"})
    write_json(tmp_path / "prompts" / "words.json", records["prompts"]["words"])
    for name in ("base", "w4a16"):
        write_json(tmp_path / "checkpoints" / f"{name}.json", checkpoint(name))
    for name in audit.arms:
        arm_spec(audit, name).write(tmp_path / "arms" / f"{name}.json")
        write_json(tmp_path / "verification" / f"{name}.json", verification(name))
        write_json(tmp_path / "captures" / name / "launch1.manifest.json", manifest())
    write_json(tmp_path / "divergence" / "int4.json", divergence())
    write_json(tmp_path / "verification" / "int3.json", refused["variant"]["verification"] | {"arm": "int3"})
    write_json(tmp_path / "captures" / "int3" / "launch1.manifest.json", refused["variant"]["manifest"])
    write_json(tmp_path / "divergence" / "int3.json", refused["variant"]["divergence"])
    tie_together(tmp_path, "bf16")
    return tmp_path


def test_the_sheet_has_every_field_for_every_variant(results):
    sheet = disclose(results)
    shared = {one.key for one in sheet.shared}
    assert sorted(one.variant for one in sheet.sheets) == ["int3", "int4"]
    for one in sheet.sheets:
        assert shared | {field.key for field in one.fields} == set(SPECS)


def test_a_refused_variant_has_its_own_lines_for_what_did_not_run(results):
    sheets = {one.variant: {field.key: field.status for field in one.fields} for one in disclose(results).sheets}
    assert sheets["int4"] == {}
    assert sheets["int3"] == dict.fromkeys(OF_A_RUN, "not_applicable")


def test_fields_that_differ_between_variants_that_ran_are_not_shared(results):
    write_json(results / "verification" / "int3.json", verification("int3") | {"outcome": "differs"})
    write_json(results / "captures" / "int3" / "launch1.manifest.json", manifest())
    write_json(results / "divergence" / "int3.json", divergence())
    tie_together(results, "bf16")
    sheet = disclose(results)
    assert {one.key for one in sheet.shared} == set(SPECS) - {"verification"}
    values = {one.variant: [field.value for field in one.fields] for one in sheet.sheets}
    assert values == {
        "int3": ["bits DIFFER in 2 launches × 2 passes"],
        "int4": ["identical bits in 2 launches × 2 passes"],
    }


def test_the_sheet_validates_against_its_schema(results):
    disclose(results).write(results / "disclosure.json")
    content = json.loads((results / "disclosure.json").read_text(encoding="utf-8"))
    jsonschema.validate(content, Disclosure.model_json_schema())
    assert Disclosure.read(results / "disclosure.json") == disclose(results)


def test_a_sheet_with_an_infinite_mean_validates_against_its_schema(results):
    infinite = divergence()
    infinite["overall"] |= {"mean": "Infinity", "infinite": 3}
    infinite["interval"] |= {"low": None, "high": None}
    write_json(results / "divergence" / "int4.json", infinite)
    tie_together(results, "bf16")
    disclose(results).write(results / "disclosure.json")
    content = json.loads((results / "disclosure.json").read_text(encoding="utf-8"))
    jsonschema.validate(content, Disclosure.model_json_schema())


def test_the_sheet_names_the_records_it_was_made_from(results):
    sheet = disclose(results)
    assert {"spec.json", "image.json", "divergence/int4.json", "captures/int3/launch1.manifest.json"} <= set(
        sheet.parents
    )
    assert "disclosure.json" not in sheet.parents


def test_the_same_records_give_the_same_sheet(results):
    disclose(results).write(results / "disclosure.json")
    before = (results / "disclosure.json").read_bytes()
    disclose(results).write(results / "disclosure.json")
    assert (results / "disclosure.json").read_bytes() == before


def test_a_missing_record_of_the_audit_is_refused(results):
    (results / "divergence" / "int4.json").unlink()
    with pytest.raises(RecordError, match=r"int4\.json"):
        disclose(results)


def test_markdown_shows_every_claim_and_every_field(results):
    sheet = disclose(results)
    text = markdown(sheet)
    assert text.startswith("# Disclosure sheet: small\n")
    assert all(f"- {claim.sentence}\n" in text for claim in sheet.claims)
    assert [spec.title for spec in FIELDS if f"| {spec.title} |" not in text] == []


def test_markdown_shows_what_is_not_disclosed(results):
    checkpoint_record = copy.deepcopy(checkpoint("w4a16"))
    del checkpoint_record["calibration"]
    write_json(results / "checkpoints" / "w4a16.json", checkpoint_record)
    assert "| Calibration data | **NOT DISCLOSED**: no record of variant/checkpoint/calibration | – |" in markdown(
        disclose(results)
    )


def test_a_bar_in_a_value_does_not_break_the_table(results):
    record = checkpoint("w4a16") | {"calibration": "C4 | wiki\nand more"}
    write_json(results / "checkpoints" / "w4a16.json", record)
    assert "| Calibration data | C4 \\| wiki and more | declared |" in markdown(disclose(results))


@pytest.mark.parametrize(
    ("record", "change"),
    [
        ("divergence/int4.json", {"variant": "int3"}),
        ("divergence/int4.json", {"reference": "int3"}),
        ("divergence/int4.json", {"method_version": "0"}),
        ("divergence/int4.json", {"parents": {"reference": "capture of bf16", "variant": "an older capture"}}),
        ("verification/int4.json", {"arm": "int3"}),
        ("verification/bf16.json", {"parents": {"launch1": "another capture"}}),
        ("captures/int4/launch1.manifest.json", {"arm": "int3"}),
        ("captures/int4/launch1.manifest.json", {"parents": {"spec": "an older spec"}}),
        ("arms/int4.json", {"arm": "int3"}),
    ],
)
def test_records_that_do_not_belong_together_make_no_sheet(results, record, change):
    update(results / record, **change)
    with pytest.raises(RecordError, match="do not belong together"):
        disclose(results)


@pytest.mark.parametrize("content", [None, [], {}])
def test_a_malformed_record_makes_no_sheet(results, content):
    write_json(results / "divergence" / "int4.json", content)
    with pytest.raises(RecordError):
        disclose(results)
