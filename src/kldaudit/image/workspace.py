"""A temporary folder for building: removed at the end, and at the next start if the process was killed."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = ".build-"


@contextmanager
def workspace(parent: Path) -> Iterator[Path]:
    """An empty folder in ``parent``, after sweeping what killed builds left there."""
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.glob(f"{PREFIX}*"):
        if not Path(f"/proc/{old.name.removeprefix(PREFIX)}").exists():
            shutil.rmtree(old, ignore_errors=True)
    folder = parent.absolute() / f"{PREFIX}{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
