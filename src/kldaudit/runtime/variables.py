"""Environment variables of an engine process: an allow-list of the caller's, and ours."""

import os

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OPENBLAS_CORETYPE")
"""The only variables of the caller that reach the engine."""

PASSED_INTO_CONTAINERS = ("CUDA_VISIBLE_DEVICES", "OPENBLAS_CORETYPE")
"""Those of them that mean the same inside a container."""

FIXED = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What every engine process gets: offline, one process, no colours."""


def engine_environment(extra: dict[str, str]) -> dict[str, str]:
    """Environment of an engine process: an explicit allow-list of the caller's, ours, and ``extra``."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {**passed, **FIXED, **extra}


def container_environment(extra: dict[str, str]) -> dict[str, str]:
    """Environment of an engine process in a container: ours and ``extra`` beside the image's own."""
    passed = {name: os.environ[name] for name in PASSED_INTO_CONTAINERS if name in os.environ}
    return {**passed, **FIXED, **extra}
