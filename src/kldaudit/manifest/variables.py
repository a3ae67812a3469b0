"""Environment variables that can change the numbers."""

import os
import sys

NUMERIC_PREFIXES = (
    "ATEN_", "CUBLAS", "CUDA_", "CUDNN", "DNNL_", "FLASHINFER_", "GOMP_", "HF_HUB_OFFLINE", "KMP_", "LD_PRELOAD",
    "MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHONHASHSEED", "PYTORCH_", "TORCH",
    "TRITON_", "VLLM_",
)  # fmt: skip
"""Beginnings of the names of environment variables that can change the numbers, the threads or the code path."""


EPHEMERAL = ("TORCHINDUCTOR_CACHE_DIR", "VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME")
"""Variables that the engine sets itself, to a folder of the user's or to a fresh random name in every process."""


def numeric_environment() -> dict[str, str]:
    """Environment variables that can change the numbers; the environment's own folder is written as {environment}."""
    return {
        name: value.replace(sys.prefix, "{environment}")
        for name, value in sorted(os.environ.items())
        if name.startswith(NUMERIC_PREFIXES) and name not in EPHEMERAL
    }
