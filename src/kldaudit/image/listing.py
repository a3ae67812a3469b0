"""What an environment says of itself: a script that runs in it, and the digest over its packages."""

import hashlib
from typing import Any

NUMA = 'import ctypes; ctypes.CDLL("libnuma.so.1")  # the CPU kernels need it, and without them vLLM only warns\n'

LISTING = """
import json, platform
from kldaudit.manifest.machine import interpreter
from kldaudit.manifest.packages import python_packages
packages = [[p.name, p.version, p.record_sha256] for p in python_packages()]
print(json.dumps({"python": interpreter(), "architecture": platform.machine(), "packages": packages}))
"""


def script(engine: str) -> str:
    """The script for an engine's environment; it fails where something is missing."""
    return (NUMA if engine == "vllm-cpu" else "") + LISTING


def packages_digest(listing: dict[str, Any]) -> str:
    """SHA-256 over the sorted distributions' names, versions and RECORD hashes."""
    lines = "".join("\t".join(package) + "\n" for package in listing["packages"])
    return hashlib.sha256(lines.encode()).hexdigest()
