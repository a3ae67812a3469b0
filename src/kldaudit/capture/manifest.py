"""The manifest: what was there when the logits were computed, recorded inside the capturing process."""

import os
import platform
import re
import subprocess
import sys
import sysconfig
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from pydantic import Field

from kldaudit.capture.asked import Asked
from kldaudit.digests import text_sha256
from kldaudit.records import Frozen, Record

NUMERIC_PREFIXES = (
    "ATEN_", "CUBLAS", "CUDA_", "CUDNN", "DNNL_", "FLASHINFER_", "GOMP_", "HF_HUB_OFFLINE", "KMP_", "LD_PRELOAD",
    "MALLOC_", "MKL_", "NCCL_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHONHASHSEED", "PYTORCH_", "TORCH",
    "TRITON_", "VLLM_",
)  # fmt: skip
"""Beginnings of the names of environment variables that can change the numbers, the threads or the code path."""

EPHEMERAL = ("TORCHINDUCTOR_CACHE_DIR", "VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME")
"""Variables that the engine sets itself, to a folder of the user's or to a fresh random name in every process."""

DPKG_FORMAT = (
    "${binary:Package}\t${Version}\t${Architecture}\t${source:Package}\t${source:Version}\t${db:Status-Status}\n"
)


class PythonPackage(Frozen):
    """One installed Python distribution."""

    name: str
    version: str
    record_sha256: str = Field(description="SHA-256 of the RECORD file, or `unknown: why`.")


class DebianPackage(Frozen):
    """One installed Debian package."""

    name: str
    version: str
    architecture: str
    source: str
    source_version: str


class Manifest(Record):
    """What was there. A value that could not be read is a string that begins with ``unknown:``."""

    audit: str
    arm: str
    launch: int
    outcome: str = Field(description="captured, or refused: and the engine's reason.")
    asked: list[Asked] = Field(description="Asked for, and got; empty if the engine refused to load.")
    python: str = Field(description="Implementation and version.")
    python_packages: list[PythonPackage]
    debian_packages: list[DebianPackage] | str
    operating_system: str
    kernel: str
    libc: str
    cpu: dict[str, Any] = Field(description="Model name, microcode, ISA flags, cores.")
    gpu: list[dict[str, Any]] | str = Field(description="Each device's name and SM, or why there is none.")
    torch: dict[str, Any]
    engine: dict[str, Any] = Field(description="Name, version, commit, the arguments it was started with.")
    selected: dict[str, Any] = Field(description="What the engine resolved and selected, layer by layer.")
    kernels: list[str] | str = Field(description="Names of the operators or kernels that ran in a profiled prefill.")
    environment: dict[str, str] = Field(description="Environment variables that can change the numbers.")
    capture: dict[str, Any] = Field(description="Positions taken per prompt and pass, and differing ones.")


def record_environment() -> dict[str, Any]:
    """The part of the manifest that does not depend on the engine: packages, system, CPU, GPU, torch, environment."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "python_packages": python_packages(),
        "debian_packages": debian_packages(),
        "operating_system": _operating_system(),
        "kernel": f"{platform.system()} {platform.release()}",
        "libc": " ".join(filter(None, platform.libc_ver())) or "unknown: platform.libc_ver() says nothing",
        "cpu": cpu(),
        "gpu": gpus(),
        "torch": torch_build(),
        "environment": numeric_environment(),
    }


def numeric_environment() -> dict[str, str]:
    """Environment variables that can change the numbers; the environment's own folder is written as {environment}."""
    return {
        name: value.replace(sys.prefix, "{environment}")
        for name, value in sorted(os.environ.items())
        if name.startswith(NUMERIC_PREFIXES) and name not in EPHEMERAL
    }


def python_packages() -> list[PythonPackage]:
    """Every distribution installed in this interpreter's environment, sorted by name."""
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})

    def package(one: Distribution) -> PythonPackage:
        text = one.read_text("RECORD")
        digest = "unknown: the distribution has no RECORD" if text is None else text_sha256(_portable(text))
        return PythonPackage(name=one.name.lower(), version=one.version, record_sha256=digest)

    return sorted((package(one) for one in distributions(path=folders)), key=lambda one: (one.name, one.version))


def _portable(record: str) -> str:
    """RECORD lines without what depends on where and how the package was installed."""
    local = re.compile(r"(^\.\./|__pycache__|\.dist-info/(INSTALLER|REQUESTED|direct_url\.json|RECORD),)")
    return "\n".join(sorted(line for line in record.splitlines() if not local.search(line)))


def debian_packages() -> list[DebianPackage] | str:
    """Every installed Debian package, sorted by name, or why they cannot be listed."""
    try:
        listing = subprocess.run(
            ["dpkg-query", "-W", f"-f={DPKG_FORMAT}"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown: dpkg-query failed: {error}"
    rows = [line.split("\t") for line in listing.splitlines()]
    return [
        DebianPackage(name=row[0], version=row[1], architecture=row[2], source=row[3], source_version=row[4])
        for row in sorted(rows)
        if row[5] == "installed"
    ]


def _operating_system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError) as error:
        return f"unknown: {error}"


def cpu() -> dict[str, Any]:
    """CPU model, microcode, ISA flags and usable cores, from /proc/cpuinfo."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError as error:
        return {"model": f"unknown: {error}", "isa_flags": f"unknown: {error}"}
    fields = dict(re.findall(r"^(.+?)\s*:[ ]?(.*)$", text.partition("\n\n")[0], flags=re.MULTILINE))

    def field(*names: str) -> str:
        return next((fields[name] for name in names if name in fields), f"unknown: /proc/cpuinfo has no {names[0]}")

    return {
        "model": field("model name", "CPU part"),
        "vendor": field("vendor_id", "CPU implementer"),
        "family_model_stepping": "/".join(fields.get(name, "?") for name in ("cpu family", "model", "stepping")),
        "microcode": field("microcode"),
        "isa_flags": " ".join(sorted(field("flags", "Features").split())),
        "architecture": platform.machine(),
        "usable_cores": len(os.sched_getaffinity(0)),
    }


def gpus() -> list[dict[str, Any]] | str:
    """Name, SM and memory of each GPU that torch sees, or why there is none."""
    import torch

    if not torch.cuda.is_available():
        return "none: torch sees no CUDA device"
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": one.name, "sm": f"{one.major}.{one.minor}", "memory_bytes": one.total_memory} for one in properties
    ]


def torch_build() -> dict[str, Any]:
    """Version, CUDA version, commit, CPU capability and build configuration of torch."""
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "none: CPU build",
        "commit": torch.version.git_version,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "configuration": " ".join(torch.__config__.show().split()),
    }


def interpreter() -> str:
    """Version of the running interpreter as ``major.minor.micro``."""
    return ".".join(str(part) for part in sys.version_info[:3])
