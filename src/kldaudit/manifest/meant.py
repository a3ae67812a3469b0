"""Which differences between two arms' manifests the audit meant, and which it did not.

A difference is meant if it follows from a setting, checkpoint or container that the two arms' specs ask for
differently. Everything else is not meant: another hash of a library, another package, GPU, driver, microcode or
environment variable. Two arms with equal settings mean nothing.
"""

from typing import Any

from kldaudit.audit import ArmSpec
from kldaudit.manifest.diff import Change, Difference, changes, matches, tree

RAN = ("kernels", "primitives", "engine/**/enabled_custom_ops", "engine/**/disabled_custom_ops")
LINEAR = ("asked/weight_quantization", "asked/activation_quantization", "selected/quantization", "selected/linear")
CACHE_ROOM = ("engine/**/num_?pu_blocks", "engine/**/kv_cache_size_tokens", "engine/**/kv_cache_max_concurrency")

FOLLOWS: dict[str, tuple[str, ...]] = {
    "checkpoint": (
        "parents/checkpoint", "engine/**/quantization*", "engine/**/quant_config*", "engine/**/hf_*config",
        "selected/attention/*/kv_scales", *LINEAR, *RAN,
    ),
    "dtype": (
        "asked/dtype", "asked/head_dtype", "asked/kv_cache_dtype", "engine/**/dtype", "selected/dtype",
        "selected/head_dtype", "selected/attention/*/kv_cache_torch_dtype", "selected/linear", *CACHE_ROOM, *RAN,
    ),
    "head_dtype": (
        "asked/head_dtype", "engine/**/hf_overrides", "engine/**/head_dtype", "selected/head_dtype", *RAN,
    ),
    "attention_backend": (
        "asked/attention_backend", "engine/**/attention_config", "engine/**/attention_backend", "selected/attention",
        "selected/kv_block_size", "engine/**/block_size", *CACHE_ROOM, *RAN,
    ),
    "kv_cache_dtype": (
        "asked/kv_cache_dtype", "engine/**/kv_cache_dtype", "engine/**/cache_dtype", "selected/kv_cache_dtype",
        "selected/attention/*/kv_*", *CACHE_ROOM, *RAN,
    ),
    "quantization": ("engine/**/quantization*", "engine/**/quant_config*", *LINEAR, *RAN),
    "model_impl": (
        "asked/model_impl", "engine/**/model_impl", "engine/**/architecture*", "selected/model_class",
        "selected/attention", "selected/linear", *RAN,
    ),
    "enforce_eager": (
        "asked/enforce_eager", "asked/cuda_graphs", "engine/**/enforce_eager", "engine/**/compilation_config",
        "engine/**/cudagraph*", "selected/enforce_eager", "selected/compilation_mode", "selected/cudagraph_mode", *RAN,
    ),
    "chunk": (
        "asked/chunk", "selected/chunk", "engine/**/max_num_batched_tokens", "engine/**/max_num_scheduled_tokens",
        "engine/**/max_num_encoder_input_tokens", "engine/**/encoder_cache_size", "engine/**/compile_*",
        "kernels/*/count",
    ),
    "max_model_len": ("asked/max_model_len", "engine/**/*max_model_len", "selected/max_model_len", *CACHE_ROOM),
    "tensor_parallel_size": (
        "asked/tensor_parallel_size", "engine/**/tensor_parallel_size", "engine/**/world_size*",
        "engine/**/distributed_executor_backend", "selected/tensor_parallel_size", "selected/linear", *CACHE_ROOM,
        *RAN,
    ),
    "threads": (
        "asked/threads", "environment/OMP_NUM_THREADS", "environment/MKL_NUM_THREADS", "selected/torch_threads",
        "torch/parallel", "kernels/*/count",
    ),
    "kv_cache_gib": (
        "environment/VLLM_CPU_KVCACHE_SPACE", "engine/**/*kvcache_space*", "engine/**/kv_cache_memory_bytes",
        *CACHE_ROOM,
    ),
    "seed": ("engine/**/seed", "selected/seed"),
    "allow_unsupported": ("outcome",),
    "gpus": ("container/gpus", "container/device_requests", "environment/NVIDIA_VISIBLE_DEVICES", "gpu"),
    "shm_gib": ("container/shm*",),
}  # fmt: skip
"""What follows from each setting that two arms may differ in, as patterns of paths (see ``kldaudit.manifest.diff``).

``checkpoint`` is the arm's; ``gpus`` and ``shm_gib`` are its container's. The variables of ``env`` follow by name.
"""

LOADS = frozenset(
    {"attention_backend", "checkpoint", "enforce_eager", "kv_cache_dtype", "model_impl", "quantization",
     "tensor_parallel_size"}
)  # fmt: skip
"""Settings that may also load other libraries and compile other kernels: a library more or less is meant, a library
with another hash never is."""


def diff_of_arms(a: dict[str, Any], b: dict[str, Any], arms: tuple[ArmSpec, ArmSpec]) -> Difference:
    """What differs from manifest ``a`` to manifest ``b``, and which of it the audit meant.

    Args:
        a: manifest of the first arm.
        b: manifest of the second arm.
        arms: the two arms' specs, in the same order.
    """
    asked = differing_settings(*arms)
    return tree(
        (change.model_copy(update={"follows_from": _cause(change, asked)}) for change in changes(a, b)),
        compared_with_arms=True,
    )


def differing_settings(a: ArmSpec, b: ArmSpec) -> list[str]:
    """Names of what the two specs ask for differently; a variable of ``env`` as ``env: NAME``."""
    names = ["checkpoint"] if a.checkpoint != b.checkpoint else []
    names += [name for name, value in a.settings if name != "env" and value != getattr(b.settings, name)]
    names += [name for name, value in a.container if value != getattr(b.container, name)]
    one, other = a.settings.env, b.settings.env
    return names + [f"env: {name}" for name in sorted({*one, *other}) if one.get(name) != other.get(name)]


def _cause(change: Change, asked: list[str]) -> str | None:
    """The setting that meant a change: the first that has it as a consequence."""
    for name in asked:
        variable = name.removeprefix("env: ")
        patterns = FOLLOWS[name] if variable == name else (f"environment/{variable}",)
        if matches(change.path, patterns) or (name in LOADS and _loads(change)):
            return name
    return None


def _loads(change: Change) -> bool:
    if change.path[0] == "libraries":
        return change.kind != "changed"
    if change.path[0] == "stack":
        return str(change.before).startswith("none") or str(change.after).startswith("none")
    return change.path[:2] == ("caches", "after")
