"""Run in a virtual environment: a child process that dies with its parent."""

import ctypes
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kldaudit.errors import EngineError
from kldaudit.runtime.record import Image


def engine_python(image: Image) -> Path:
    """The interpreter of a venv image."""
    python = Path(image.location) / "bin" / "python"
    if not python.exists():
        raise EngineError(
            "the engine's environment is gone",
            where=image.location,
            expected=f"{python}",
            found="no such file",
            do="run the rule image again (snakemake --forcerun image)",
        )
    return python.absolute()


def _die_with_parent() -> None:
    """Ask Linux to kill this child when its parent dies, however it dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def run_child(command: list[str], *, log: Path, env: dict[str, str], watch: Callable[[Any], None] | None) -> int:
    """Run a command whose process dies with this one; see ``run_in_engine``."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            preexec_fn=_die_with_parent,
        )
        try:
            if watch is not None:
                watch(process)
            return process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
