"""State of the caches of autotuning and JIT compilation: what was there decides which kernels run, and how fast."""

import getpass
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

from kldaudit.digests import file_sha256

MOST_FILES, MOST_BYTES = 20_000, 2 * 2**30
"""Beyond these only names and sizes are digested."""

BESIDE = (".log", ".lock")
"""Suffixes of what lies in caches and is no entry."""


def cache_folders() -> dict[str, Path]:
    """Where each library keeps its cache, as its own variables and defaults say."""
    home, environment = Path.home(), os.environ
    base = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
    temporary = Path(tempfile.gettempdir())
    return {
        "triton": Path(environment.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
        "flashinfer": Path(environment.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer",
        "inductor": Path(environment.get("TORCHINDUCTOR_CACHE_DIR") or temporary / f"torchinductor_{_user()}"),
        "vllm": Path(environment.get("VLLM_CACHE_ROOT") or base / "vllm") / "torch_compile_cache",
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # a mapped user has no name


def cache_state() -> dict[str, Any]:
    """Each cache's state, number of files, digest over their sorted names and contents, and its keys."""
    return {name: _state(folder) for name, folder in cache_folders().items()}


def _state(folder: Path) -> dict[str, Any]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in BESIDE)
    if not files:
        return {"state": "cold", "entries": 0, "digest": "none: no entries", "keys": []}
    sizes = [path.stat().st_size for path in files]
    whole = len(files) <= MOST_FILES and sum(sizes) <= MOST_BYTES
    lines = "".join(
        f"{path.relative_to(folder)}\t{file_sha256(path) if whole else size}\n"
        for path, size in zip(files, sizes, strict=True)
    )
    digest = hashlib.sha256(lines.encode()).hexdigest()
    return {
        "state": "warm",
        "entries": len(files),
        "digest": digest if whole else f"{digest}, of names and sizes",
        "keys": sorted({path.relative_to(folder).parts[0] for path in files}),
    }
