"""The commands ``kldaudit image …``: make or adopt what the engine runs in."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kldaudit.image.base import Mirror
from kldaudit.image.step import Asked
from kldaudit.records import write_json

app = typer.Typer(no_args_is_help=True, help="Make or adopt what the engine runs in.")

Runtime = Annotated[Asked, typer.Option("--runtime", help="What the engine runs in.")]
Location = Annotated[Path, typer.Option("--location", help="Folder of the environment; temporary files lie beside it.")]
Source = Annotated[Path, typer.Option("--source", help="Folder of kldaudit's source.")]
Output = Annotated[Path, typer.Option("--output", help="The record to write.")]
Log = Annotated[Path, typer.Option("--log", help="Takes the tools' output.")]
MirrorOption = Annotated[
    Mirror,
    typer.Option("--mirror", help="Debian's packages from the snapshot service, the system's apt sources, or auto."),
]


@app.command()
def build(
    engine: Annotated[str, typer.Option(help="Name of the engine's lock.")],
    lock: Annotated[list[Path], typer.Option(help="Requirement files with hashes, in order of installation.")],
    location: Location,
    source: Source,
    output: Output,
    log: Log,
    runtime: Runtime = "venv",
    recipe: Annotated[Path, typer.Option(help="Dockerfile; not for venv.")] = Path("containers/vllm-cpu/Dockerfile"),
    base: Annotated[Path, typer.Option(help="Lock of the base; not for venv.")] = Path("containers/base/cpu.json"),
    mirror: MirrorOption = "auto",
) -> None:
    """Make the engine runnable from its locks."""
    from kldaudit.image.step import build as run

    run(runtime, engine, lock, location, source, recipe, base, mirror, log).write(output)


@app.command()
def adopt(
    reference: Annotated[str, typer.Argument(help="NAME[:TAG]@sha256:DIGEST")],
    lock: Annotated[Path, typer.Option(help="Requirement file with hashes of what the image may lack.")],
    location: Location,
    source: Source,
    output: Output,
    log: Log,
    runtime: Runtime = "docker",
) -> None:
    """Take an existing image by digest, without changing it."""
    from kldaudit.image.step import adopt_image

    adopt_image(runtime, reference, lock, location, source, log).write(output)


@app.command()
def lock(
    base: Annotated[Path, typer.Option(help="Lock of a base that is bootstrapped.")],
    log: Log,
    mirror: MirrorOption = "snapshot",
) -> None:
    """Bootstrap a base and write its packages and its digest into its lock."""
    from kldaudit.image.base import lock_base

    with tempfile.TemporaryDirectory() as folder:
        write_json(base, lock_base(base, mirror, Path(folder), log))
