"""The part of the manifest that does not depend on the engine."""

import platform
from pathlib import Path
from typing import Any

from kldaudit.manifest.gpu import gpus
from kldaudit.manifest.libraries import loaded_libraries, stray_files
from kldaudit.manifest.machine import cpu, kernel, operating_system, torch_build
from kldaudit.manifest.packages import Owners, debian_packages, python_packages
from kldaudit.manifest.stack import stack
from kldaudit.manifest.variables import numeric_environment


def record_environment(memory: Path | None, root: str) -> dict[str, Any]:
    """Packages, loaded libraries, system, CPU, GPU, torch and environment variables.

    Args:
        memory: file that remembers the hashes of libraries between runs, or None.
        root: folder in which every shared object should belong to a package.
    """
    owners = Owners()
    libraries = loaded_libraries(memory, owners)
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "python_packages": python_packages(),
        "debian_packages": debian_packages(),
        "stray_files": stray_files(root, owners),
        "libraries": libraries,
        "stack": stack(libraries),
        "operating_system": operating_system(),
        "kernel": kernel(),
        "libc": " ".join(filter(None, platform.libc_ver())) or "unknown: platform.libc_ver() says nothing",
        "cpu": cpu(),
        "gpu": gpus(),
        "torch": torch_build(),
        "environment": numeric_environment(),
    }
