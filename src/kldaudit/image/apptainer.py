"""An Apptainer image (.sif) from the Docker image, for machines that run no Docker engine."""

import subprocess
from pathlib import Path

from kldaudit.digests import file_sha256
from kldaudit.errors import EngineError
from kldaudit.image.workspace import workspace
from kldaudit.runtime.apptainer import apptainer_program
from kldaudit.runtime.docker import docker_client
from kldaudit.runtime.record import Image
from kldaudit.runtime.run import last_lines


def build_command(program: str, sif: Path, archive: Path) -> list[str]:
    """The command that turns a saved Docker image into a .sif file."""
    return [program, "build", "--force", str(sif), f"docker-archive:{archive}"]


def build_apptainer(image: Image, location: Path, log: Path) -> Image:
    """Convert a built or adopted Docker image; the record names both digests.

    Raises:
        EngineError: apptainer is missing or fails.
    """
    program = apptainer_program()
    sif = location.with_suffix(".sif")
    with workspace(location.parent) as folder:
        archive = folder / "image.tar"
        with archive.open("wb") as file:
            for chunk in docker_client().images.get(image.location).save(named=False):
                file.write(chunk)
        with log.open("a", encoding="utf-8") as output:
            command = build_command(program, folder / sif.name, archive)
            done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise EngineError(
                "the image cannot be converted",
                where=f"{' '.join(command[:2])}, log {log}",
                expected=f"{sif.name}",
                found=last_lines(log),
                do="read the log; often the disk is full",
            )
        (folder / sif.name).replace(sif)
    changes = {
        "runtime": "apptainer",
        "location": str(sif),
        "digest": file_sha256(sif),
        "built_with": f"{image.built_with}; converted from image {image.location} by apptainer",
    }
    return image.model_copy(update=changes)
