"""The part of the manifest that does not depend on the engine."""

import platform
from typing import Any

from kldaudit.manifest.gpu import gpus
from kldaudit.manifest.machine import cpu, operating_system, torch_build
from kldaudit.manifest.packages import debian_packages, python_packages
from kldaudit.manifest.variables import numeric_environment


def record_environment() -> dict[str, Any]:
    """Packages, system, CPU, GPU, torch and environment variables."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "python_packages": python_packages(),
        "debian_packages": debian_packages(),
        "operating_system": operating_system(),
        "kernel": f"{platform.system()} {platform.release()}",
        "libc": " ".join(filter(None, platform.libc_ver())) or "unknown: platform.libc_ver() says nothing",
        "cpu": cpu(),
        "gpu": gpus(),
        "torch": torch_build(),
        "environment": numeric_environment(),
    }
