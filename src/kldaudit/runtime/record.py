"""``image.json``: what the engine runs in; and what is to be run there."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from kldaudit.audit import Container
from kldaudit.records import Record

Runtime = Literal["venv", "docker", "apptainer"]


class Image(Record):
    """What the engine runs in (``image.json``)."""

    runtime: Runtime = Field(description="venv: a virtual environment made from the lock; else a container.")
    why: str = Field(description="Why this runtime: the audit names it, or what `auto` found.")
    engine: str = Field(description="Name of the engine's lock, or of the adopted image.")
    python: str = Field(description="Version of the interpreter.")
    architecture: str = Field(description="Machine type it runs on, as uname -m says it.")
    location: str = Field(
        description="venv: folder relative to the working folder; docker: image ID; apptainer: the .sif file."
    )
    interpreter: str = Field(description="Path of Python: in a venv relative to the location, else inside the image.")
    overlay: str | None = Field(
        None,
        description="Adopted images: folder, relative to the working folder, with kldaudit and what capturing needs "
        "beside the engine; mounted read-only and put on PYTHONPATH.",
    )
    locks: dict[str, str] = Field(description="SHA-256 of each lock file it was made from.")
    packages: int = Field(description="Number of Python distributions in it.")
    base: str = Field(description="The base file system in words, with its digest; none in a venv.")
    digest: str = Field(
        description="venv: SHA-256 over the sorted distributions' names, versions and RECORD hashes; docker: the image "
        "ID, which is the SHA-256 of the image's configuration with the digests of all layers; apptainer: SHA-256 of "
        "the .sif file."
    )
    layers: list[str] = Field(default_factory=list, description="diffIDs: SHA-256 of each layer's uncompressed tar.")
    reference: str = Field(
        "none: made from its lock", description="Adopted images: NAME[:TAG]@sha256:DIGEST in the registry."
    )
    reference_checked: str = Field(
        "none: made from its lock",
        description="Adopted images: whether the tag still points to the digest, or why that is unknown.",
    )
    built_with: str = Field(description="What made it: pip or container engine, and its version.")


@dataclass(frozen=True)
class Job:
    """A module to run in the engine's environment, and all that it sees of the host."""

    module: str
    arguments: list[str]
    env: dict[str, str]
    reads: list[Path]
    writes: list[Path]
    container: Container
