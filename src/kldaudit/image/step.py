"""Choose the runtime and make or adopt what the engine runs in."""

from pathlib import Path
from typing import Literal

from kldaudit.errors import EngineError
from kldaudit.image.adopt import adopt
from kldaudit.image.apptainer import build_apptainer
from kldaudit.image.base import Mirror
from kldaudit.image.docker import build_docker
from kldaudit.image.venv import make_venv
from kldaudit.runtime.apptainer import apptainer_program
from kldaudit.runtime.docker import docker_client
from kldaudit.runtime.record import Image, Runtime

Asked = Literal["venv", "docker", "apptainer", "auto"]


def choose(asked: Asked) -> tuple[Runtime, str]:
    """The runtime and why: what was asked for, or Docker if an engine answers."""
    if asked != "auto":
        return asked, f"the audit says {asked}"
    try:
        version = docker_client().version()["Version"]
    except EngineError as error:
        return "venv", f"auto: no Docker engine can be used: {' '.join(str(error).split())[:200]}"
    return "docker", f"auto: Docker Engine {version} answers"


def build(
    asked: Asked, engine: str, locks: list[Path], location: Path, source: Path, recipe: Path, base_lock: Path,
    mirror: Mirror, log: Path,
) -> Image:  # fmt: skip
    """Make the engine runnable from its locks, in the runtime that is asked for.

    Args:
        asked: the runtime.
        engine: name of the engine's lock.
        locks: requirement files with hashes, in order of installation.
        location: folder of a virtual environment; a container's temporary files and .sif lie beside it.
        source: folder of kldaudit's own source.
        recipe: the Dockerfile.
        base_lock: lock of the base file system.
        mirror: where the base's packages come from.
        log: takes the tools' output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    runtime, why = choose(asked)
    if runtime == "venv":
        return make_venv(engine, locks, location, source, log, why)
    if runtime == "apptainer":
        apptainer_program()
    image = build_docker(engine, locks, recipe, base_lock, mirror, source, location.parent, log, why)
    return build_apptainer(image, location, log) if runtime == "apptainer" else image


def adopt_image(asked: Asked, reference: str, lock: Path, location: Path, source: Path, log: Path) -> Image:
    """Take an existing image by digest, in the runtime that is asked for.

    Raises:
        EngineError: it cannot be had, its tag has moved, or it cannot run here.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("", encoding="utf-8")
    runtime, why = choose(asked)
    if runtime == "venv":
        raise EngineError(
            "an adopted image needs a container engine",
            where=reference,
            expected="a Docker engine, or apptainer",
            found=why,
            do="start a Docker engine; or leave `adopt` out of the audit and build from the locks",
        )
    if runtime == "apptainer":
        apptainer_program()
    image = adopt(reference, lock, location, source, log, why)
    return build_apptainer(image, location, log) if runtime == "apptainer" else image
