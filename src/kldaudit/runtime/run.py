"""Run a module of kldaudit in the engine's environment, whatever that is."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kldaudit.runtime.record import Image
from kldaudit.runtime.variables import engine_environment
from kldaudit.runtime.venv import run_in_venv


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
    log.parent.mkdir(parents=True, exist_ok=True)
    return run_in_venv(image, module, arguments, log=log, env=engine_environment(env or {}), watch=watch)


def last_lines(log: Path, count: int = 3) -> str:
    """The last lines of a log, for a message."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-count:]) or "nothing was logged"
