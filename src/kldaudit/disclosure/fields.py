"""The fields of the sheet: for each, which recorded values it stands on and how they are put into words.

A source is a path into the records of one comparison, such as ``variant/manifest/engine/version``. A field whose
sources are not all there is NOT DISCLOSED: there are no defaults.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Known = Literal["measured", "declared", "derived"]


@dataclass(frozen=True)
class FieldSpec:
    """One field."""

    key: str
    title: str
    group: str
    known: Known
    sources: tuple[str, ...]
    words: Callable[..., str] = field(repr=False)
    needs_run: bool = False
    absent: tuple[str, str, str] | None = None
    """Not applicable where the value at a source begins with a text, for a reason: source, text, reason."""


NO_GPU = ("variant/manifest/gpu", "none:", "no GPU: the engine ran on the CPU")
NO_IMAGE = ("image/runtime", "venv", "no image: the engine ran in a virtual environment on the host's system")
NOT_ADOPTED = ("image/reference", "none:", "not adopted: made from its lock")


def _plain(value: Any) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _joined(*values: Any) -> str:
    return ", ".join(_plain(value) for value in values)


def _checkpoint(source: str, revision: str, made_by: str, files: list[dict[str, Any]]) -> str:
    weights = [f"{one['path']} sha256:{one['sha256']}" for one in files if one["path"].endswith(".safetensors")]
    return f"{source}; {revision}; {made_by}; {len(files)} files, weights {', '.join(weights)}"


def _environment(
    runtime: str, digest: str, base: str, engine: dict[str, Any], python: str, packages: list[Any], debian: Any,
    libraries: Any, system: str, kernel: str, cpu: dict[str, Any], gpu: Any,
) -> str:  # fmt: skip
    loaded = f"{len(libraries)} shared objects loaded" if isinstance(libraries, list) else f"loaded {libraries}"
    place = "a venv on the host's system" if runtime == "venv" else f"a {runtime} image on {base}"
    return (
        f"{engine['name']} {engine['version']} in {place}, digest sha256:{digest}; {python}, "
        f"{_counts(packages, debian)}, {loaded}; {system}, {kernel}; CPU {cpu['model']}; GPU {_gpus(gpu)}. "
        "The manifests list every one"
    )


def _image_digest(runtime: str, digest: str) -> str:
    covers = {
        "venv": "over its packages' RECORD hashes",
        "docker": "image ID, over its configuration and the digests of its layers",
        "apptainer": "of the .sif file",
    }
    return f"{runtime}, sha256:{digest} {covers[runtime]}"


def _reference(reference: str, checked: str) -> str:
    return f"adopted as {reference}; {checked}"


def _gpus(gpu: Any) -> str:
    return ", ".join(f"{one['name']} (SM {one['sm']})" for one in gpu) if isinstance(gpu, list) else str(gpu)


def _texts(prompts: dict[str, dict[str, Any]]) -> str:
    return "; ".join(f"{name}: {one['about']} (text sha256:{one['text_sha256']})" for name, one in prompts.items())


def _lengths(prompts: dict[str, dict[str, Any]], max_model_len: int) -> str:
    lengths = ", ".join(f"{name} {one['n_tokens']} tokens" for name, one in prompts.items())
    return f"{lengths}; the engine's context {max_model_len} tokens"


def _positions(every: int, positions: int) -> str:
    return (
        f"{positions}: the next-token distribution after every {every}th token (token indices {every - 1}, "
        f"{2 * every - 1}, … of each prompt)"
    )


def _aggregation(positions: int, windows: str, prompts: dict[str, Any]) -> str:
    return (
        f"unweighted mean over all {positions} positions of {len(prompts)} prompts; also quantiles, per prompt, per "
        f"kind of span and per window ({windows})"
    )


def _rendering(prompts: dict[str, dict[str, Any]]) -> str:
    return "; ".join(f"{name}: {one['rendering']}" for name, one in prompts.items())


def _asked_of(setting: str) -> Callable[[list[dict[str, Any]]], str]:
    def words(asked: list[dict[str, Any]]) -> str:
        line = {one["setting"]: one for one in asked}[setting]
        return f"asked {line['asked']}, ran {line['got']}" + ("" if line["honoured"] else ": NOT WHAT WAS ASKED FOR")

    return words


def _differences(asked: list[dict[str, Any]]) -> str:
    lines = [f"{one['setting']}: asked {one['asked']}, ran {one['got']}" for one in asked if not one["honoured"]]
    return "; ".join(lines) or f"all {len(asked)} settings that were compared run as asked"


def _linear(linear: list[dict[str, Any]]) -> str:
    kinds: dict[str, dict[str, int]] = {}
    for layer in linear:
        name = "/".join([layer["scheme"] or layer["method"], *layer["kernels"]])
        kinds.setdefault(layer["kind"], {}).setdefault(name, 0)
        kinds[layer["kind"]][name] += 1
    return "; ".join(
        f"{kind}: " + ", ".join(f"{name} × {count}" for name, count in found.items()) for kind, found in kinds.items()
    )


def _counts(packages: list[Any], debian: Any) -> str:
    if not isinstance(debian, list):
        return f"{len(packages)} Python packages, Debian packages {debian}"
    return f"{len(packages) + len(debian)} packages ({len(debian)} Debian, {len(packages)} Python)"


def _stray(stray: Any) -> str:
    if isinstance(stray, str):
        return stray
    return f"{len(stray)} found: " + ", ".join(f"{one['path']} sha256:{one['sha256']}" for one in stray)


def _libraries(libraries: Any) -> str:
    if isinstance(libraries, str):
        return libraries
    changed = [one["path"] for one in libraries if one["as_packaged"] is False]
    unowned = [one["path"] for one in libraries if one["owner"] == "none"]
    words = [f"{len(libraries)} shared objects"]
    words.append(
        f"NOT AS PACKAGED: {', '.join(changed)}" if changed else "none differs from what its package installed"
    )
    if unowned:
        words.append(f"of no package: {', '.join(unowned)}")
    return "; ".join(words)


def _stack(*names: str) -> Callable[[dict[str, str]], str]:
    return lambda stack: "; ".join(f"{name} {stack[name]}" for name in names)


def _caches(caches: dict[str, Any]) -> str:
    before, after = caches["before"], caches["after"]
    return "; ".join(
        f"{name}: {before[name]['state']} before, "
        + ("unchanged" if before[name] == after[name] else f"{after[name]['entries']} entries after")
        for name in before
    )


def _scales(attention: list[dict[str, Any]]) -> str:
    found = [f"k {layer['kv_scales']['k']}, v {layer['kv_scales']['v']}" for layer in attention]
    counts = {words: found.count(words) for words in dict.fromkeys(found)}
    return "; ".join(f"{words} in {count} of {len(found)} layers" for words, count in counts.items())


def _boards(gpu: Any) -> str:
    if isinstance(gpu, str):
        return gpu
    return "; ".join(f"VBIOS {one['vbios']}, ECC {_parts(one['ecc'])}, MIG {_parts(one['mig'])}" for one in gpu)


def _parts(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_parts(one)}" for name, one in value.items())
    return _plain(value)


def _primitives(primitives: Any) -> str:
    return primitives if isinstance(primitives, str) else "; ".join(primitives)


def _container(facts: Any) -> str:
    return facts if isinstance(facts, str) else ", ".join(f"{name} {_parts(one)}" for name, one in facts.items())


def _batch(max_num_seqs: int, chunk: int) -> str:
    return f"one request at a time (max_num_seqs {max_num_seqs}), prefill in chunks of {chunk} tokens"


def _parallel(tensor: int, pipeline: int, data: int) -> str:
    return f"TP {tensor}, PP {pipeline}, DP {data}"


def _variables(environment: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in environment.items())


def _tokenizer(prompts: dict[str, dict[str, Any]]) -> str:
    one = next(iter(prompts.values()))
    return f"tokenizer.json sha256:{one['tokenizer_sha256']}; chat template sha256:{one['chat_template_sha256']}"


def _bos(prompts: dict[str, dict[str, Any]]) -> str:
    return "; ".join(
        f"{name}: {one['bos']}, {'begins' if one['begins_with_bos'] else 'does not begin'} with BOS"
        for name, one in prompts.items()
    )


def _rounding(dtypes: dict[str, str]) -> str:
    bits = {"bfloat16": 8, "float16": 11, "float32": 24}
    return "; ".join(
        f"{name}: {dtype}, relative half-ulp 2^-{bits[dtype]}, stored without re-encoding"
        for name, dtype in dtypes.items()
    )


def _noise(floor: dict[str, Any]) -> str:
    return (
        f"reference, another launch: mean KL {float(floor['mean']):.3g} nats, "
        f"{floor['flips']} flips of {floor['positions']}; never subtracted"
    )


def _verification(outcome: str, launches: int, passes: int) -> str:
    words = {
        "identical": "identical bits",
        "differs": "bits DIFFER",
        "single": "nothing to compare",
        "refused": "refused",
    }
    return f"{words[outcome]} in {launches} launches × {passes} passes"


def _interval(interval: dict[str, Any]) -> str:
    words = (
        f"{interval['method']}, {interval['blocks']} blocks, {interval['resamples']} resamples, seed {interval['seed']}"
    )
    return f"{words}; {interval['caution']}" if interval["caution"] else words


def _documents(prompts: dict[str, Any]) -> str:
    return f"{len(prompts)} ({', '.join(prompts)})"


def _kernels(kernels: Any) -> str:
    """Kernels of a known family, then others; PyTorch's elementwise operators are only counted."""
    if isinstance(kernels, str):
        return kernels
    chosen = [one for one in kernels if one["family"] or not one["name"].startswith(OF_PYTORCH)]
    chosen.sort(key=lambda one: (one["family"] is None, one["name"]))
    listed = [f"{one['name']} × {one['count']}" + (f" ({one['family']})" if one["family"] else "") for one in chosen]
    return f"{'; '.join(listed)}; {len(kernels) - len(chosen)} others in the manifest"


def _flips(overall: dict[str, Any]) -> str:
    return (
        f"greedy token, ties to the lowest token id; {overall['ties_reference']} positions of the reference and "
        f"{overall['ties_variant']} of the variant are tied, {overall['flips_at_ties']} flips are only that choice"
    )


def _nothing(*_: Any) -> str:
    return (
        "how well the variant does a task, how far free generation would branch, what it gives on other texts, other "
        "hardware or another build; a small KL is closeness to this reference, not quality"
    )


def _core(
    key: str, title: str, known: Known, sources: tuple[str, ...], words: Callable[..., str], run: bool
) -> FieldSpec:
    return FieldSpec(key, title, "The nine", known, sources, words, run)


def _selected(
    key: str, title: str, group: str, names: tuple[str, ...], words: Callable[..., str] = _joined
) -> FieldSpec:
    sources = tuple(f"variant/manifest/selected/{name}" for name in names)
    return FieldSpec(key, title, group, "measured", sources, words, True)


def _of_manifest(
    key: str, title: str, group: str, names: tuple[str, ...], words: Callable[..., str] = _joined, run: bool = False
) -> FieldSpec:
    sources = tuple(f"variant/manifest/{name}" for name in names)
    return FieldSpec(key, title, group, "measured", sources, words, run)


CUDA_STACK = (
    "driver", "CUDA driver API", "CUDA runtime", "cuDNN", "cuBLAS", "NCCL", "NVRTC", "Triton", "FlashInfer",
)  # fmt: skip
OF_PYTORCH = ("aten::", "void at::", "Mem")
FILES = ("source", "revision", "made_by", "files")
DIVERGENCE = "variant/divergence"
WEIGHTS, ENGINE, MACHINE, TEXT, FIGURES = (
    "Weights and kernels",
    "Engine",
    "Machine and software",
    "Text",
    "Figures",
)

FIELDS: tuple[FieldSpec, ...] = (
    _core("reference_checkpoint", "Reference checkpoint", "measured",
          tuple(f"reference/checkpoint/{name}" for name in FILES), _checkpoint, False),
    _core("runtime_environment", "Full runtime environment", "measured",
          ("image/runtime", "image/digest", "image/base", *(f"variant/manifest/{name}" for name in (
              "engine", "python", "python_packages", "debian_packages", "libraries", "operating_system", "kernel",
              "cpu", "gpu"))),
          _environment, False),
    _core("evaluation_text", "Evaluation text", "measured", ("prompts",), _texts, False),
    _core("calibration_data", "Calibration data", "declared", ("variant/checkpoint/calibration",), _plain, False),
    _core("context_lengths", "Context lengths", "measured",
          ("prompts", "variant/arm/settings/max_model_len"), _lengths, False),
    _core("sampled_positions", "Sampled positions", "measured",
          (f"{DIVERGENCE}/every", f"{DIVERGENCE}/overall/positions"), _positions, True),
    _core("kl_direction", "KL direction", "derived", (f"{DIVERGENCE}/direction",), _plain, True),
    _core("vocabulary_truncation", "Vocabulary truncation", "measured", (f"{DIVERGENCE}/vocab_size",),
          lambda size: f"none: all {size} entries, no floor, no top-k, no epsilon", True),
    _core("aggregation", "Aggregation", "derived",
          (f"{DIVERGENCE}/overall/positions", f"{DIVERGENCE}/window_rule", f"{DIVERGENCE}/prompts"),
          _aggregation, True),
    FieldSpec("variant_checkpoint", "Variant checkpoint", WEIGHTS, "measured",
              tuple(f"variant/checkpoint/{name}" for name in FILES), _checkpoint),
    _of_manifest("weight_quantization", "Weight quantization", WEIGHTS, ("asked",),
                 _asked_of("weight_quantization"), run=True),
    _of_manifest("activation_quantization", "Activation quantization", WEIGHTS, ("asked",),
                 _asked_of("activation_quantization"), run=True),
    _of_manifest("kv_cache", "KV-cache type", WEIGHTS, ("asked",), _asked_of("kv_cache_dtype"), run=True),
    _selected("kv_scales", "KV-cache scales", WEIGHTS, ("attention",), _scales),
    _of_manifest("attention_backend", "Attention backend", WEIGHTS, ("asked",),
                 _asked_of("attention_backend"), run=True),
    _selected("linear_kernels", "Linear kernels per layer kind", WEIGHTS, ("linear",), _linear),
    _of_manifest("kernels", "Kernels that ran", WEIGHTS, ("kernels",), _kernels, run=True),
    _of_manifest("primitives", "Primitives of oneDNN", WEIGHTS, ("primitives",), _primitives, run=True),
    _of_manifest("asked_and_got", "Asked for, and got", WEIGHTS, ("asked",), _differences, run=True),
    FieldSpec("runtime", "Runtime", ENGINE, "measured", ("image/runtime", "image/why", "image/built_with"),
              lambda runtime, why, built_with: f"{runtime}: {why}; made by {built_with}"),
    FieldSpec("image_digest", "Image digest", ENGINE, "measured", ("image/runtime", "image/digest"), _image_digest),
    FieldSpec("base_image", "Base image", ENGINE, "measured", ("image/base",), _plain, absent=NO_IMAGE),
    FieldSpec("adopted", "Adopted image", ENGINE, "measured", ("image/reference", "image/reference_checked"),
              _reference, absent=NOT_ADOPTED),
    FieldSpec("container", "Container", ENGINE, "measured", ("variant/manifest/container",), _container,
              absent=NO_IMAGE),
    _of_manifest("engine_version", "Engine version", ENGINE, ("engine/name", "engine/version"),
                 lambda name, version: f"{name} {version}"),
    _of_manifest("engine_commit", "Engine commit", ENGINE, ("engine/commit",)),
    _selected("model_implementation", "Model implementation", ENGINE, ("model_class", "model_runner")),
    _selected("eager", "Eager", ENGINE, ("enforce_eager",)),
    _selected("cuda_graphs", "Graphs and compilation", ENGINE, ("cudagraph_mode", "compilation_mode"),
              lambda graphs, mode: f"graphs {graphs}, compilation {mode}"),
    _selected("chunked_prefill", "Chunked prefill", ENGINE, ("chunked_prefill", "chunk"),
              lambda on, chunk: f"{_plain(on)}, {chunk} tokens"),
    _selected("prefix_caching", "Prefix caching", ENGINE, ("prefix_caching",)),
    _selected("speculative_decoding", "Speculative decoding or MTP", ENGINE, ("speculative_decoding",)),
    _selected("parallelism", "Parallelism", ENGINE,
              ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), _parallel),
    _selected("batch_shape", "Batch shape", ENGINE, ("max_num_seqs", "chunk"), _batch),
    _of_manifest("package_counts", "Packages", MACHINE, ("python_packages", "debian_packages"), _counts),
    _of_manifest("stray_files", "Shared objects of no package", MACHINE, ("stray_files",), _stray),
    _of_manifest("libraries", "Loaded libraries", MACHINE, ("libraries",), _libraries),
    _of_manifest("cpu_libraries", "oneDNN and OpenMP", MACHINE, ("stack",), _stack("oneDNN", "OpenMP")),
    _of_manifest("torch", "PyTorch", MACHINE, ("torch/version", "torch/commit"),
                 lambda version, commit: f"{version}, commit {commit}"),
    FieldSpec("cuda", "CUDA, driver, cuDNN, cuBLAS, NCCL, Triton, FlashInfer", MACHINE, "measured",
              ("variant/manifest/stack",), _stack(*CUDA_STACK), absent=NO_GPU),
    FieldSpec("gpu", "GPU", MACHINE, "measured", ("variant/manifest/gpu",), _gpus, absent=NO_GPU),
    FieldSpec("gpu_board", "GPU: VBIOS, ECC, MIG", MACHINE, "measured", ("variant/manifest/gpu",), _boards,
              absent=NO_GPU),
    _of_manifest("autotune_cache", "Autotune cache state", MACHINE, ("caches",), _caches),
    _of_manifest("cpu", "CPU", MACHINE, ("cpu/model", "cpu/family_model_stepping", "cpu/microcode", "cpu/usable_cores"),
                 lambda model, stepping, code, cores: f"{model} ({stepping}), microcode {code}, {cores} usable cores"),
    _of_manifest("cpu_isa", "CPU instruction sets", MACHINE, ("torch/cpu_capability", "cpu/isa_flags"),
                 lambda capability, flags: f"torch runs {capability}; flags {flags}"),
    _selected("threads", "Threads", MACHINE, ("torch_threads",)),
    _of_manifest("environment_variables", "Environment variables", MACHINE, ("environment",), _variables),
    FieldSpec("tokenizer", "Tokenizer and chat template", TEXT, "measured", ("prompts",), _tokenizer),
    FieldSpec("rendering", "Rendering of tools", TEXT, "measured", ("prompts",), _rendering),
    FieldSpec("bos", "BOS handling", TEXT, "measured", ("prompts",), _bos),
    FieldSpec("history", "History", TEXT, "derived", ("variant/arm/capture/every",),
              lambda _: "forced: every position sees the prompt's own tokens, whatever the arm would have picked"),
    FieldSpec("logits_dtype", "Logits dtype and its rounding", FIGURES, "measured", (f"{DIVERGENCE}/logits_dtype",),
              _rounding, True),
    FieldSpec("arithmetic", "Arithmetic of the divergence", FIGURES, "derived", (f"{DIVERGENCE}/method_version",),
              lambda version: f"FP64 from the stored bits, log-sum-exp with max shift (method {version})", True),
    FieldSpec("nonfinite_positions", "Non-finite positions", FIGURES, "measured",
              (f"{DIVERGENCE}/nonfinite_positions", f"{DIVERGENCE}/overall/infinite"),
              lambda bad, infinite: f"{bad} with NaN or +inf logits, {infinite} with KL = +inf", True),
    FieldSpec("excluded_positions", "Excluded positions", FIGURES, "measured", (f"{DIVERGENCE}/excluded_positions",),
              _plain, True),
    FieldSpec("flip_rule", "Flips and ties", FIGURES, "measured", (f"{DIVERGENCE}/overall",), _flips, True),
    FieldSpec("noise_floor", "Noise floor", FIGURES, "measured", (f"{DIVERGENCE}/noise_floor",), _noise, True),
    FieldSpec("verification", "Verification", FIGURES, "measured",
              ("variant/verification/outcome", "variant/verification/launches", "variant/verification/passes"),
              _verification, True),
    FieldSpec("reference_verification", "Verification of the reference", FIGURES, "measured",
              ("reference/verification/outcome", "reference/verification/launches", "reference/verification/passes"),
              _verification),
    FieldSpec("documents", "Documents", FIGURES, "measured", ("prompts",), _documents),
    FieldSpec("interval", "Interval", FIGURES, "derived", (f"{DIVERGENCE}/interval",), _interval, True),
    FieldSpec("software", "kldaudit", FIGURES, "measured", ("kldaudit/version", "kldaudit/method_version"),
              lambda version, method: f"{version}, method {method}"),
    FieldSpec("does_not_say", "What the number does not say", FIGURES, "derived", ("kldaudit/version",), _nothing),
)  # fmt: skip
