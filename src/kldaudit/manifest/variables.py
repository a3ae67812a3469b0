"""Environment variables that can change the numbers, and what is never recorded: secrets."""

import os
import re
import sys
from pathlib import Path

NUMERIC_PREFIXES = (
    "ATEN_", "CUBLAS", "CUDA_", "CUDNN", "DNNL_", "FLASHINFER_", "GOMP_", "HF_HUB_OFFLINE", "KMP_", "LD_PRELOAD",
    "MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHONHASHSEED", "PYTORCH_", "TORCH",
    "TRITON_", "VLLM_",
)  # fmt: skip
"""Beginnings of the names of environment variables that can change the numbers, the threads or the code path."""


EPHEMERAL = ("TORCHINDUCTOR_CACHE_DIR", "VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME")
"""Variables that the engine sets itself, to a folder of the user's or to a fresh random name in every process."""

WITHHELD = "withheld: looks like a secret"

SECRET_NAME = re.compile(
    r"(?:^|[^A-Z])(?:API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|COOKIE|SIGNATURE|PRIVATE)"
    r"(?:[^A-Z]|$)",
    re.IGNORECASE,
)
"""Names with one of these words; a word ends where a letter does not follow, so that OMP_MONKEY is none."""

SECRET_VALUE = re.compile(
    r"//[^/\s:@]+:[^/\s@]+@"  # user:password@ in a URL
    r"|\b(?:hf|sk|pk|rk)[-_][A-Za-z0-9_-]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JWT
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)


def is_secret(name: str, value: str) -> bool:
    """Whether a name or a value looks like a secret."""
    return bool(SECRET_NAME.search(name) or SECRET_VALUE.search(value))


def without_secrets(text: str) -> str:
    """A text, or what says that it is withheld."""
    return WITHHELD if SECRET_VALUE.search(text) else text


def numeric_environment() -> dict[str, str]:
    """Environment variables that can change the numbers.

    The environment's own folder is written as {environment}, the home folder as {home}; what looks like a secret is
    withheld.
    """
    return {
        name: WITHHELD if is_secret(name, value) else portable(value)
        for name, value in sorted(os.environ.items())
        if name.startswith(NUMERIC_PREFIXES) and name not in EPHEMERAL
    }


def portable(text: str) -> str:
    """A text with the environment's own folder written as {environment} and the home folder as {home}."""
    home = str(Path.home())
    text = text.replace(sys.prefix, "{environment}")
    return text.replace(f"{home}/", "{home}/") if home not in ("/", "/tmp") else text  # noqa: S108 - a container's home
