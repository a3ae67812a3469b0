"""The engine's environment as a thing to run Python in: ``image.json`` and the command and variables that use it."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from kldaudit.errors import EngineError
from kldaudit.records import Record

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "OPENBLAS_CORETYPE")
"""The only variables of the caller that reach the engine."""

FIXED = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONNOUSERSITE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What every engine process gets: offline, one process, no colours."""


class Image(Record):
    """What the engine runs in (``image.json``)."""

    runtime: Literal["venv"] = Field(description="venv: a virtual environment made from the lock.")
    engine: str = Field(description="Name of the engine's lock.")
    python: str = Field(description="Version of the interpreter.")
    location: str = Field(description="Folder of the environment, relative to the working folder.")
    locks: dict[str, str] = Field(description="SHA-256 of each lock file it was made from.")
    packages: int = Field(description="Number of Python distributions in it.")
    digest: str = Field(description="SHA-256 over the sorted distributions' names, versions and RECORD hashes (venv).")


def engine_environment(extra: dict[str, str]) -> dict[str, str]:
    """Environment of an engine process: an explicit allow-list of the caller's, ours, and ``extra``."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {**passed, **FIXED, **extra}


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


def run_in_engine(
    image: Image,
    module: str,
    arguments: list[str],
    *,
    log: Path,
    env: dict[str, str] | None = None,
    watch: Callable[[subprocess.Popen[Any]], None] | None = None,
) -> int:
    """Run ``python -m module arguments`` in the engine's environment; its output goes to ``log``.

    Args:
        image: where to run.
        module: module of kldaudit.
        arguments: its arguments.
        log: file that takes stdout and stderr.
        env: variables besides the fixed ones.
        watch: called with the process while it runs; returns when it has ended.

    Returns:
        The exit code; negative for the signal that ended it.
    """
    command = [str(engine_python(image)), "-m", module, *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=engine_environment(env or {}),
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


def last_lines(log: Path, count: int = 3) -> str:
    """The last lines of a log, for a message."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-count:]) or "nothing was logged"
