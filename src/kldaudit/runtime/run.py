"""Run a module of kldaudit in the engine's environment, whatever that is."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from kldaudit.audit import Container
from kldaudit.runtime import apptainer, docker
from kldaudit.runtime.record import Image, Job
from kldaudit.runtime.variables import container_environment, engine_environment
from kldaudit.runtime.venv import engine_python, run_child

NO_CONTAINER = Container()


class Started(Protocol):
    """What runs the module: a process or a container."""

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""


def run_in_engine(
    image: Image,
    module: str,
    arguments: list[str],
    *,
    log: Path,
    reads: Sequence[Path] = (),
    writes: Sequence[Path] = (),
    env: dict[str, str] | None = None,
    container: Container = NO_CONTAINER,
    watch: Callable[[Started], None] | None = None,
) -> int:
    """Run ``python -m module arguments`` in the engine's environment; its output goes to ``log``.

    Args:
        image: where to run.
        module: module of kldaudit.
        arguments: its arguments; paths are absolute and lie in ``reads`` or ``writes``.
        log: file that takes stdout and stderr.
        reads: files and folders that the module reads; a container sees nothing else of the host.
        writes: folders that it writes to.
        env: variables besides the fixed ones.
        container: GPUs and shared memory of a container.
        watch: called with what runs; returns when it has ended.

    Returns:
        The exit code; negative for the signal that ended it.

    Raises:
        EngineError: the environment is gone, or the container engine failed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    env = env or {}
    if image.runtime == "venv":
        command = [str(engine_python(image)), "-m", module, *arguments]
        return run_child(command, log=log, env=engine_environment(env), watch=watch)
    job = Job(module, arguments, container_environment(env), list(reads), list(writes), container)
    if image.runtime == "docker":
        return docker.run_in_docker(image, job, log, watch)
    return run_child(apptainer.apptainer_command(image, job), log=log, env=dict(os.environ), watch=watch)


def container_facts(image: Image, container: Container) -> dict[str, Any] | str:
    """What only the host knows of where an arm ran (``Manifest.container``)."""
    if image.runtime == "venv":
        return "none: a virtual environment on the host's system"
    if image.runtime == "docker":
        return docker.container_facts(image, container)
    return apptainer.container_facts(image, container)


def last_lines(log: Path, count: int = 3) -> str:
    """The last lines of a log, for a message."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-count:]) or "nothing was logged"
