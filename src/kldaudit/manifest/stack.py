"""Versions of what really served: read from the libraries that are mapped, not from what is installed."""

import ctypes
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kldaudit.manifest.record import Library

NOT_LOADED = "none: not loaded"

PATTERNS = {
    "CUDA driver API": r"/libcuda\.so",
    "CUDA runtime": r"/libcudart[-.]",
    "cuDNN": r"/libcudnn\.so",
    "cuBLAS": r"/libcublas\.so",
    "NCCL": r"/libnccl\.so",
    "NVRTC": r"/libnvrtc\.so",
    "OpenMP": r"/lib(?:gomp|iomp5|omp)(?:[-.]|$)",
}
"""What each part's library is called."""


def stack(libraries: list[Library] | str) -> dict[str, str]:
    """Version of each part that served, and the library that it is in; or that none was loaded."""
    if isinstance(libraries, str):
        return dict.fromkeys((*PATTERNS, "driver", "Triton", "FlashInfer", "oneDNN"), libraries)
    found = {name: [one for one in libraries if re.search(pattern, one.path)] for name, pattern in PATTERNS.items()}
    parts = {name: _said(name, ones) for name, ones in found.items()}
    return {
        **parts,
        "driver": _driver(),
        "Triton": _module("triton"),
        "FlashInfer": _module("flashinfer"),
        "oneDNN": _onednn(),
    }


def _said(name: str, libraries: list[Library]) -> str:
    return "; ".join(_one(name, one) for one in libraries) or NOT_LOADED


def _one(name: str, library: Library) -> str:
    asked = ASK.get(name)
    path = library.path.replace("{environment}", sys.prefix)
    version = asked(path) if asked else library.version or "version not in its name"
    newest = f", {', '.join(library.symbol_versions)}" if name == "OpenMP" and library.symbol_versions else ""
    owner = library.owner if library.owner != "none" else "no package"
    return f"{version}{newest} ({Path(path).name}, {owner})"


def _called(function: str, read: Callable[[Any], str]) -> Callable[[str], str]:
    """The version that a mapped library's own function gives."""

    def ask(path: str) -> str:
        try:
            # only what is mapped already is opened
            library = ctypes.CDLL(path, mode=os.RTLD_LAZY | os.RTLD_NOLOAD)
            return read(getattr(library, function))
        except (OSError, AttributeError) as error:
            return f"unknown: {function}: {error}"

    return ask


def _integer(function: Any) -> int:
    value = ctypes.c_int(0)
    status = function(ctypes.byref(value))
    if status:
        raise OSError(f"status {status}")
    return value.value


def _cuda(function: Any) -> str:
    value = _integer(function)
    return f"{value // 1000}.{value % 1000 // 10}"


def _nccl(function: Any) -> str:
    value = _integer(function)
    return f"{value // 10000}.{value % 10000 // 100}.{value % 100}"


def _cudnn(function: Any) -> str:
    function.restype = ctypes.c_size_t
    value = int(function())
    return f"{value // 10000}.{value % 10000 // 100}.{value % 100}"


def _cublas(function: Any) -> str:
    parts = []
    for index in range(3):
        value = ctypes.c_int(0)
        if function(index, ctypes.byref(value)):
            raise OSError("no such property")
        parts.append(str(value.value))
    return ".".join(parts)


def _nvrtc(function: Any) -> str:
    major, minor = ctypes.c_int(0), ctypes.c_int(0)
    if function(ctypes.byref(major), ctypes.byref(minor)):
        raise OSError("no version")
    return f"{major.value}.{minor.value}"


ASK: dict[str, Callable[[str], str]] = {
    "CUDA driver API": _called("cuDriverGetVersion", _cuda),
    "CUDA runtime": _called("cudaRuntimeGetVersion", _cuda),
    "cuDNN": _called("cudnnGetVersion", _cudnn),
    "cuBLAS": _called("cublasGetProperty", _cublas),
    "NCCL": _called("ncclGetVersion", _nccl),
    "NVRTC": _called("nvrtcVersion", _nvrtc),
}
"""Functions of the libraries that give their versions (CUDA Toolkit and NCCL reference manuals)."""


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "none: no NVIDIA kernel module"
    found = re.search(r"(?:Module|NVRM version:.*?)\s+(\d+\.\d+(?:\.\d+)?)", text)
    return found[1] if found else f"unknown: {text.splitlines()[0]}"


def _module(name: str) -> str:
    """Version of a Python package that has been imported."""
    module = sys.modules.get(name)
    if module is None:
        return NOT_LOADED
    return str(getattr(module, "__version__", f"unknown: {name} has no __version__"))


def _onednn() -> str:
    import torch

    found = re.search(r"MKL-DNN v([\d.]+)[^\n]*|oneDNN v([\d.]+)[^\n]*", torch.__config__.show())
    if found is None:
        return "none: this build of torch has none"
    return f"torch's {found[1] or found[2]}; an engine's own copy names itself among the primitives"
