"""The command line: one sub-command a step, each the same line that the workflow's rule calls."""

import errno
import io
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kldaudit import __version__
from kldaudit.audit import arm_spec, audit_schema, read_audit
from kldaudit.errors import KldauditError
from kldaudit.image_cli import app as image_app
from kldaudit.manifest_cli import app as manifest_app
from kldaudit.outputs import keep_apart
from kldaudit.records import write_json, write_text

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(image_app, name="image")
app.add_typer(manifest_app, name="manifest")
out = Console(markup=False, highlight=False, soft_wrap=True)

AuditFile = Annotated[Path, typer.Option("--audit", help="The audit file.")]
Output = Annotated[Path, typer.Option("--output", help="The record to write.")]
ImageFile = Annotated[Path, typer.Option("--image", help="The engine's image.json.")]
CheckpointFile = Annotated[Path, typer.Option("--checkpoint", help="The checkpoint's record.")]
Log = Annotated[Path, typer.Option("--log", help="Takes the engine's output.")]


def _version(wanted: bool) -> None:
    if wanted:
        out.print(__version__)
        raise typer.Exit


@app.callback()
def _root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False) -> None:
    """Find out what a published KL-divergence number of a quantized language model is worth."""


@app.command()
def check(audit: Annotated[Path, typer.Argument(help="The audit file.")]) -> None:
    """Say whether an audit file is valid, and what it would run."""
    found = read_audit(audit)
    capture = found.capture
    out.print(
        f"{audit} is valid: audit {found.name}, reference {found.reference}, variants {', '.join(found.variants)}"
    )
    out.print(
        f"{len(found.arms)} arms × {capture.launches} launches × {capture.passes} passes, every {capture.every} tokens"
    )


@app.command()
def schema(
    output: Output, of: Annotated[str, typer.Option(help="audit, disclosure, image or manifest.")] = "audit"
) -> None:
    """Write the JSON schema of audit files or of a record."""
    from kldaudit.disclosure.sheet import Disclosure
    from kldaudit.manifest.record import Manifest
    from kldaudit.runtime.record import Image

    schemas = {
        "audit": audit_schema,
        "disclosure": Disclosure.model_json_schema,
        "image": Image.model_json_schema,
        "manifest": Manifest.model_json_schema,
    }
    if of not in schemas:
        raise typer.BadParameter(f"{of} is none of {', '.join(schemas)}", param_hint="--of")
    write_json(output, schemas[of]())


@app.command()
def spec(
    audit: AuditFile, output: Output, arm: Annotated[str | None, typer.Option(help="One arm only.")] = None
) -> None:
    """Resolve an audit, or one arm of it, into its spec."""
    found = read_audit(audit)
    (found if arm is None else arm_spec(found, arm)).write(output)


@app.command()
def checkpoint(
    audit: AuditFile,
    name: Annotated[str, typer.Option(help="Name of the checkpoint in the audit.")],
    image: ImageFile,
    output: Output,
    log: Log,
) -> None:
    """Bring a checkpoint's files together and record every one of them."""
    from kldaudit.checkpoint.step import resolve

    resolve(read_audit(audit), name, image, output, log).write(output)


@app.command()
def prompt(
    name: Annotated[str, typer.Option(help="Name of the prompt.")],
    source: Annotated[Path, typer.Option(help="Chat messages (.json) or text (.txt).")],
    about: Annotated[str, typer.Option(help="What the text is and where it comes from.")],
    image: ImageFile,
    checkpoint: CheckpointFile,
    output: Output,
    log: Log,
) -> None:
    """Render a forced token history and record its token ids and spans."""
    from kldaudit.prompt.step import render_prompt

    render_prompt(name, source, about, image, checkpoint, log).write(output)


@app.command()
def capture(
    spec: Annotated[Path, typer.Option(help="The arm's spec.")],
    image: ImageFile,
    checkpoint: CheckpointFile,
    prompt: Annotated[list[Path], typer.Option(help="The prompts' records.")],
    launch: Annotated[int, typer.Option(help="Number of the launch, from 1.")],
    output: Annotated[Path, typer.Option(help="The capture to write.")],
    manifest: Annotated[Path, typer.Option(help="The manifest to write.")],
    log: Log,
) -> None:
    """Replay the prompts through one launch of one arm and store the logits."""
    from kldaudit.capture.step import capture as run

    out.print(f"{spec.stem} launch {launch}: {run(spec, image, checkpoint, prompt, launch, output, manifest, log)}")


@app.command()
def verify(
    captures: Annotated[list[Path], typer.Argument(help="Two captures; or with --output, all launches of one arm.")],
    output: Annotated[Path | None, typer.Option(help="Write the arm's record and exit 0 whatever it says.")] = None,
) -> None:
    """Compare captures bit for bit: exit 0 if they are identical, 1 if not."""
    from kldaudit.verify import verify_arm, verify_files

    if output is not None:
        verify_arm(captures).write(output)
        return
    if len(captures) != 2:
        raise typer.BadParameter(f"give two captures, not {len(captures)}", param_hint="captures")
    comparison = verify_files(*captures)
    for one in comparison.prompts:
        if one.differing == 0 and one.first_layer is None:
            layers = f", {one.layers} layers" if one.layers else "; layers not compared"
            out.print(f"{one.prompt}: identical, {one.positions} positions{layers}")
            continue
        layer = f"{one.first_layer} at {one.first_layer_position}" if one.first_layer else "not compared"
        out.print(
            f"{one.prompt}: {one.differing} of {one.positions} positions differ, first at {one.first_position}, "
            f"first layer {layer}, at most {one.max_ulp} ULP"
        )
    raise typer.Exit(0 if comparison.identical else 1)


@app.command()
def divergence(
    reference: Annotated[Path, typer.Argument(help="Capture of the reference.")],
    variant: Annotated[Path, typer.Argument(help="Capture of the variant.")],
    output: Annotated[
        Path | None, typer.Option(help="The record to write; without it the figures are printed.")
    ] = None,
    positions: Annotated[Path | None, typer.Option(help="HDF5 file for every position's figures.")] = None,
    second_launch: Annotated[
        Path | None, typer.Option(help="Another launch of the reference: the noise floor.")
    ] = None,
    prompt: Annotated[list[Path] | None, typer.Option(help="Prompt records, for the spans.")] = None,
    audit: Annotated[Path | None, typer.Option(help="Audit file with the windows and the bootstrap.")] = None,
) -> None:
    """Compute KL(reference‖variant) in nats, FP64, from the stored bits."""
    from kldaudit.audit import DivergenceSettings
    from kldaudit.divergence.step import diverge

    keep_apart([reference, variant, second_launch, audit, *(prompt or [])], [output, positions])
    settings = read_audit(audit).divergence if audit else DivergenceSettings()
    found = diverge(
        reference,
        variant,
        settings,
        second_launch=second_launch,
        prompt_paths=prompt or [],
        positions_path=positions,
    )
    if output is not None:
        found.write(output)
    elif found.overall is None:
        out.print(f"{found.variant}: refused: {found.reason}")
    else:
        flips = f"{found.overall.flips} of {found.overall.positions} greedy tokens flipped"
        out.print(
            f"mean KL({found.reference}‖{found.variant}) = {found.overall.mean:.6g} nats, {flips}", soft_wrap=True
        )
        if found.chance and found.chance.is_chance:
            out.print(
                "WARNING: the agreement is that of chance: the variant's output is not the model's", style="bold red"
            )


Results = Annotated[Path, typer.Option("--results", help="Results folder of one audit.")]


@app.command()
def disclosure(results: Results) -> None:
    """Write the disclosure sheet, disclosure.json and disclosure.md."""
    from kldaudit.disclosure.sheet import disclose, markdown

    sheet = disclose(results)
    write_text(results / "disclosure.md", markdown(sheet))
    sheet.write(results / "disclosure.json")
    for claim in sheet.claims:
        out.print(claim.sentence)


@app.command()
def report(results: Results) -> None:
    """Write report.html, self-contained."""
    from kldaudit.report import render_report

    write_text(results / "report.html", render_report(results))


def main() -> None:
    """Run a command; what goes wrong ends in one message and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except KldauditError as error:
        message = str(error)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        message = f"cannot read or write a file\n  found: {error}" + (
            "\n  what to do: free some space and run it again" if full else ""
        )
    else:
        return
    sys.stderr.write(f"kldaudit: {message}\n")
    sys.exit(2)
