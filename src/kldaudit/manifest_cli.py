"""``kldaudit manifest``: show, compare and export what was there when the logits were computed."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kldaudit.audit import ArmSpec
from kldaudit.errors import ExportError
from kldaudit.manifest.diff import diff
from kldaudit.manifest.meant import diff_of_arms
from kldaudit.manifest.read import read_manifest
from kldaudit.manifest.show import TITLES, difference_tree, sections
from kldaudit.outputs import keep_apart
from kldaudit.records import write_text

app = typer.Typer(no_args_is_help=True, help=__doc__)
out = Console(markup=False, highlight=False, soft_wrap=True)

PIPED = 10_000
"""Width of a tree that goes to a file or another program: nothing is wrapped or cut."""

ManifestFile = Annotated[Path, typer.Argument(help="A launch{n}.manifest.json.")]


@app.command()
def show(
    manifest: ManifestFile,
    section: Annotated[str | None, typer.Option(help=f"One section in full: {', '.join(TITLES)}.")] = None,
) -> None:
    """Say in words what a manifest holds."""
    if section is not None and section not in TITLES:
        raise typer.BadParameter(f"{section} is none of {', '.join(TITLES)}", param_hint="--section")
    for one in sections(read_manifest(manifest), full=section is not None):
        if section in (None, one.name):
            out.print(one.title, style="bold")
            for name, value in one.rows:
                out.print(f"  {name}: {value}" if name else f"  {value}")


@app.command("diff")
def compare(
    a: ManifestFile,
    b: ManifestFile,
    arms: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="SPEC_A SPEC_B", help="The two arms' specs: tells what the audit meant to change."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the tree as JSON.")] = False,
) -> None:
    """Compare two environments: nothing and exit 0 if they are equal, else what differs and exit 1."""
    one, other = read_manifest(a), read_manifest(b)
    if arms is None:
        difference = diff(one, other)
    else:
        difference = diff_of_arms(one, other, (ArmSpec.read(arms[0]), ArmSpec.read(arms[1])))
    if not difference:
        return
    if json:
        out.print(difference.model_dump_json(indent=1))
    else:
        Console(width=None if out.is_terminal else PIPED).print(difference_tree(difference, str(a), str(b)))
    raise typer.Exit(1)


class Format(StrEnum):
    """Standards of bills of materials."""

    cyclonedx = "cyclonedx"
    spdx = "spdx"


@app.command()
def export(
    manifest: ManifestFile,
    format: Annotated[Format, typer.Option(help="CycloneDX 1.6 or SPDX 2.3, as JSON.")],  # noqa: A002 - the option's name
    output: Annotated[Path, typer.Option(help="The document to write.")],
    image: Annotated[Path | None, typer.Option(help="The engine's image.json.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="The checkpoint's record.")] = None,
    divergence: Annotated[Path | None, typer.Option(help="The arm's divergence from the reference.")] = None,
) -> None:
    """Write a manifest as a bill of materials that other tools read."""
    keep_apart([manifest, image, checkpoint, divergence], [output])
    try:
        from kldaudit.manifest.cyclonedx import cyclonedx_document
        from kldaudit.manifest.inventory import read_evidence
        from kldaudit.manifest.spdx import spdx_document
    except ModuleNotFoundError as error:
        raise ExportError(
            "a library for exports is not installed",
            where="kldaudit manifest export",
            expected="kldaudit with its extra export",
            found=str(error),
            do="pip install 'kldaudit[export]'",
        ) from error
    write = {Format.cyclonedx: cyclonedx_document, Format.spdx: spdx_document}[format]
    write_text(output, write(read_evidence(manifest, image, checkpoint, divergence)))
