"""Run in an Apptainer container of the same image, for machines without a Docker engine of one's own."""

import shutil
from typing import Any

from kldaudit.audit import Container
from kldaudit.errors import EngineError
from kldaudit.runtime.docker import mounts, overlay_of
from kldaudit.runtime.record import Image, Job


def apptainer_program() -> str:
    """Path of the program.

    Raises:
        EngineError: it is not installed.
    """
    found = shutil.which("apptainer") or shutil.which("singularity")
    if found is None:
        raise EngineError(
            "the runtime apptainer needs the program apptainer",
            where="PATH",
            expected="apptainer or singularity",
            found="neither",
            do="load the site's module, or install Apptainer (apptainer.org); or choose another runtime",
        )
    return found


def apptainer_command(image: Image, job: Job) -> list[str]:
    """The command that runs a module in the image.

    ``--containall`` leaves nothing of the host but what is bound; ``--network none`` needs no privilege beyond those of
    ``--net``, which the site has to allow (``allow net users``) or root has.
    """
    overlay, env = overlay_of(image)
    binds = [
        f"--bind={one['Source']}:{one['Target']}:{'ro' if one['ReadOnly'] else 'rw'}"
        for one in mounts([*job.reads, *overlay], job.writes)
    ]
    return [
        apptainer_program(), "exec", "--containall", "--cleanenv", "--no-home", "--net", "--network=none", "--pwd=/tmp",
        *binds,
        *(f"--env={name}={value}" for name, value in sorted({**env, **job.env}.items())),
        *(["--nv"] if job.container.gpus is not None else []),
        image.location, image.interpreter, "-m", job.module, *job.arguments,
    ]  # fmt: skip


def container_facts(image: Image, container: Container) -> dict[str, Any]:
    """What only the host knows of a container (``Manifest.container``)."""
    return {
        "runtime": "apptainer",
        "image": f"sha256:{image.digest}",
        "network": "none",
        "root": "read-only",
        "user": "the caller's",
        "gpus": container.gpus if container.gpus is not None else "none",
    }
