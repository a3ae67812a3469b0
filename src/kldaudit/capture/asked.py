"""Asked for, and got: what the arm's settings say against what the engine really selected.

Engines accept settings that they then ignore. Every comparison becomes one line of the manifest; an arm whose KV-cache
type the selected backend does not implement is refused, because what it returns is no longer the model's output.
"""

from typing import Any

from kldaudit.audit import Settings
from kldaudit.manifest.record import Asked

UNQUANTIZED = "Unquantized"


def compare_selected(settings: Settings, scheme: str | None, selected: dict[str, Any]) -> list[Asked]:
    """Compare an arm's settings with what the worker reports after loading.

    Args:
        settings: the arm's settings.
        scheme: quantization scheme that the checkpoint's own config asks for (``checkpoint_scheme``), or None.
        selected: what ``CaptureExtension.kldaudit_selected`` returned.
    """
    lines = [
        _attention_backend(settings, selected),
        _kv_cache(settings, selected),
        _weights(settings, scheme, selected),
        _activations(settings, scheme, selected),
        _model_implementation(settings, selected),
    ]
    plain = [
        ("dtype", settings.dtype, selected["dtype"]),
        ("head_dtype", settings.head_dtype or settings.dtype, selected["head_dtype"]),
        ("enforce_eager", settings.enforce_eager, selected["enforce_eager"]),
        ("cuda_graphs", "none" if settings.enforce_eager else "any", _graphs(selected)),
        ("chunked_prefill", True, selected["chunked_prefill"]),
        ("chunk", settings.chunk, selected["chunk"]),
        ("max_model_len", settings.max_model_len, selected["max_model_len"]),
        ("tensor_parallel_size", settings.tensor_parallel_size, selected["tensor_parallel_size"]),
        ("prefix_caching", False, selected["prefix_caching"]),
        ("speculative_decoding", False, selected["speculative_decoding"]),
    ]
    if selected["device"] == "cpu":
        plain.append(("threads", settings.threads, selected["torch_threads"]))
    return lines + [
        Asked(setting=name, asked=str(asked), got=str(got), honoured=asked in (got, "any"))
        for name, asked, got in plain
    ]


def checkpoint_scheme(config: dict[str, Any]) -> str | None:
    """Name such as W4A16-INT of the quantization in a checkpoint's config.json; None if it has none.

    The activation half is 16 where the scheme leaves activations alone.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    groups = quantization.get("config_groups")
    if not groups:
        return str(quantization.get("quant_method", "unknown"))
    names = set()
    for group in groups.values():
        weights, activations = group.get("weights") or {"type": "float", "num_bits": 16}, group.get("input_activations")
        kind = {"int": "INT", "float": "FP"}.get(weights["type"], weights["type"])
        names.add(f"W{weights['num_bits']}A{activations['num_bits'] if activations else 16}-{kind}")
    return "+".join(sorted(names))


def _counted(values: list[str]) -> str:
    counts = {value: values.count(value) for value in dict.fromkeys(values)}
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{value} ({count} layers)" for value, count in counts.items())


def _graphs(selected: dict[str, Any]) -> str:
    mode = str(selected["cudagraph_mode"]).rpartition(".")[2].lower()
    return "none" if mode in ("none", "0") else mode


def _attention_backend(settings: Settings, selected: dict[str, Any]) -> Asked:
    got = [layer["backend"] for layer in selected["attention"]]
    asked = settings.attention_backend
    honoured = asked == "auto" or set(got) == {asked}
    return Asked(setting="attention_backend", asked=asked, got=_counted(got) or "none", honoured=honoured)


def _kv_cache(settings: Settings, selected: dict[str, Any]) -> Asked:
    asked = settings.kv_cache_dtype
    got = [
        layer["kv_cache_torch_dtype"].removeprefix("torch.")
        if layer["kv_cache_dtype"] == "auto"
        else layer["kv_cache_dtype"]
        for layer in selected["attention"]
    ]
    unsupported = any(not layer["kv_cache_dtype_supported"] for layer in selected["attention"])
    return Asked(
        setting="kv_cache_dtype",
        asked=asked,
        got=_counted(got) or "none",
        honoured=not unsupported and (asked == "auto" or set(got) == {asked}),
        unsupported=unsupported,
    )


def _quantizable(selected: dict[str, Any]) -> list[dict[str, Any]]:
    outside = ("Embedding", "LMHead")
    return [layer for layer in selected["linear"] if not layer["kind"].endswith(outside)]


def _weights(settings: Settings, scheme: str | None, selected: dict[str, Any]) -> Asked:
    asked = settings.quantization or scheme or "none"
    layers = _quantizable(selected)
    got = [
        "none"
        if layer["method"].startswith(UNQUANTIZED)
        else "/".join([layer["scheme"] or layer["method"], *layer["kernels"]])
        for layer in layers
    ]
    honoured = set(got) <= {"none"} if asked == "none" else bool(got) and "none" not in got
    return Asked(setting="weight_quantization", asked=asked, got=_counted(got) or "none", honoured=honoured)


def _activations(settings: Settings, scheme: str | None, selected: dict[str, Any]) -> Asked:
    """Where the scheme leaves activations at 16 bits, no kernel may quantize them."""
    asked = settings.quantization or scheme or "none"
    sixteen = asked == "none" or all("A16" in group for group in asked.split("+"))
    layers = _quantizable(selected)
    unquantized = any(layer["method"].startswith(UNQUANTIZED) for layer in layers)
    integer = [layer for layer in layers if layer["activations"] == "int8"]
    if integer:
        got = f"int8 in {len(integer)} of {len(layers)} layers"
    else:
        got = "16-bit" if sixteen else _counted([layer["scheme"] or layer["method"] for layer in layers])
    return Asked(
        setting="activation_quantization",
        asked="16-bit" if sixteen else asked,
        got=got,
        honoured=not integer if sixteen else bool(layers) and not unquantized,
    )


def _model_implementation(settings: Settings, selected: dict[str, Any]) -> Asked:
    got = "transformers" if "transformers" in selected["model_class"].lower() else "vllm"
    asked = settings.model_impl
    return Asked(setting="model_impl", asked=asked, got=got, honoured=asked in ("auto", got))
