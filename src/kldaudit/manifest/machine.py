"""The machine: operating system, CPU, interpreter and the build of torch."""

import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

CPUS = Path("/sys/devices/system/cpu")
ISA_CLASSES = (
    "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve",
    "sve2", "bf16", "i8mm",
)  # fmt: skip
"""Instruction sets that engines have kernels of their own for."""


def operating_system() -> str:
    """Name and version of the distribution, or why they are unknown."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError) as error:
        return f"unknown: {error}"


def kernel() -> str:
    """The operating system's kernel: name, release and build."""
    return f"{platform.system()} {platform.release()} {platform.version()}"


def cpu() -> dict[str, Any]:
    """CPU model, microcode, ISA flags, cores, caches, NUMA nodes, hypervisor and memory; what two launches share."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError as error:
        return {"model": f"unknown: {error}", "isa_flags": f"unknown: {error}"}
    fields = dict(re.findall(r"^(.+?)\s*:[ ]?(.*)$", text.partition("\n\n")[0], flags=re.MULTILINE))

    def field(*names: str) -> str:
        return next((fields[name] for name in names if name in fields), f"unknown: /proc/cpuinfo has no {names[0]}")

    flags = field("flags", "Features").split()
    return {
        "model": field("model name", "CPU part"),
        "vendor": field("vendor_id", "CPU implementer"),
        "family_model_stepping": "/".join(fields.get(name, "?") for name in ("cpu family", "model", "stepping")),
        "microcode": field("microcode"),
        "isa_flags": " ".join(sorted(flags)),
        "isa_classes": [name for name in ISA_CLASSES if name in flags],
        "architecture": platform.machine(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "affinity": _ranges(sorted(os.sched_getaffinity(0))),
        "threads_per_core": _threads_per_core(),
        "caches": _caches(),
        "numa_nodes": _numa_nodes(),
        "governor": _line(CPUS / "cpu0/cpufreq/scaling_governor"),
        "hypervisor": {
            "flag": "hypervisor" in flags,
            "type": _line(Path("/sys/hypervisor/type")),
            "vendor": _line(Path("/sys/class/dmi/id/sys_vendor")),
            "product": _line(Path("/sys/class/dmi/id/product_name")),
        },
    }


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        return f"unknown: {path}: {error.strerror}"


def _ranges(numbers: list[int]) -> str:
    """Numbers as the kernel writes them: 0-3,8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ",".join("-".join(str(one) for one in part) for part in parts)


def _threads_per_core() -> int | str:
    siblings = _line(CPUS / "cpu0/topology/thread_siblings_list")
    if siblings.startswith("unknown:"):
        return siblings
    bounds = [[int(end) for end in part.split("-")] for part in siblings.split(",")]
    return sum(part[-1] - part[0] + 1 for part in bounds)


def _caches() -> dict[str, str]:
    """Size of each cache of the first core, such as L2: 1024K."""
    folders = sorted((CPUS / "cpu0/cache").glob("index*"))
    kinds = {"Data": "d", "Instruction": "i"}
    return {f"L{_line(one / 'level')}{kinds.get(_line(one / 'type'), '')}": _line(one / "size") for one in folders}


def _numa_nodes() -> dict[str, str]:
    folders = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {one.name: _line(one / "cpulist") for one in folders}


def torch_build() -> dict[str, Any]:
    """Version, CUDA version, commit, CPU capability and build configuration of torch."""
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "none: CPU build",
        "commit": torch.version.git_version,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "configuration": " ".join(torch.__config__.show().split()),
        "parallel": " ".join(torch.__config__.parallel_info().split()),
    }


def interpreter() -> str:
    """Version of the running interpreter as ``major.minor.micro``."""
    return ".".join(str(part) for part in sys.version_info[:3])
