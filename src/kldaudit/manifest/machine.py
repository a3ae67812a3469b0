"""The machine: operating system, CPU, interpreter and the build of torch."""

import os
import platform
import re
import sys
from pathlib import Path
from typing import Any


def operating_system() -> str:
    """Name and version of the distribution, or why they are unknown."""
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
