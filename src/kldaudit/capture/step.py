"""On the host: start one launch, show its progress, and put capture and manifest in place, whole or not at all."""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kldaudit.audit import ArmSpec
from kldaudit.capture_file import check_disk_space, write_refusal
from kldaudit.digests import file_sha256
from kldaudit.errors import CheckpointError, EngineError, PromptError
from kldaudit.history import PromptRecord
from kldaudit.manifest.kernels import onednn_primitives
from kldaudit.records import digests_of, read_json, write_json
from kldaudit.runtime.record import Image
from kldaudit.runtime.run import Started, container_facts, last_lines, run_in_engine

CRASHES = (signal.SIGSEGV, signal.SIGILL, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS)
"""Signals with which an engine ends itself: a refusal. SIGKILL and SIGTERM come from outside: an error."""


def capture(
    spec_path: Path,
    image_path: Path,
    checkpoint_path: Path,
    prompt_paths: list[Path],
    launch: int,
    output: Path,
    manifest: Path,
    log: Path,
) -> str:
    """Capture one launch of one arm.

    Args:
        spec_path: the arm's spec.
        image_path: the engine's image.
        checkpoint_path: the checkpoint's record; its files lie in the folder of the same name beside it.
        prompt_paths: the prompts' records.
        launch: number of the launch, from 1.
        output: the capture to write.
        manifest: the manifest to write.
        log: the engine's output.

    Returns:
        ``captured``, or ``refused: reason`` for a variant that the engine does not run.

    Raises:
        EngineError: the engine was killed, or the reference arm was refused.
        CaptureFileError: the disk has no room.
        PromptError: a prompt is longer than the arm's context.
    """
    spec = ArmSpec.read(spec_path)
    prompts = {PromptRecord.read(path).prompt: path for path in prompt_paths}
    _check_prompts(spec, prompts)
    _check_checkpoint(checkpoint_path)
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    hashes, image = _memory(), Image.read(image_path)
    try:
        check_disk_space(folder, _bytes_needed(spec, checkpoint_path, prompts))
        job = {
            "folder": str(folder.absolute()),
            "spec": str(spec_path.absolute()),
            "spec_sha256": file_sha256(spec_path),
            "checkpoint": str(checkpoint_path.with_suffix("").absolute()),
            "prompts": {name: str(path.absolute()) for name, path in prompts.items()},
            "launch": launch,
            "hashes": str(hashes.absolute()),
            "container": image.runtime != "venv",
            "parents": digests_of(spec=spec_path, image=image_path, checkpoint=checkpoint_path)
            | {f"prompt:{name}": file_sha256(path) for name, path in prompts.items()},
        }
        write_json(folder / "job.json", job)
        status = run_in_engine(
            image,
            "kldaudit.capture.engine",
            [str(folder.absolute() / "job.json")],
            log=log,
            reads=[spec_path, checkpoint_path.with_suffix(""), *prompts.values()],
            writes=[folder, hashes.parent],
            env=engine_variables(spec),
            container=spec.container,
            watch=lambda process: _show_progress(process, folder / "events.jsonl", f"{spec.arm} launch {launch}"),
        )
        outcome = _outcome(status, folder, spec, log)
        _complete_manifest(folder / "manifest.json", container_facts(image, spec.container), log)
        _put_in_place(outcome, folder, spec, job, output, manifest)
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _memory() -> Path:
    """File of the user's that remembers the hashes of libraries."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kldaudit"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "sha256.json"


def engine_variables(spec: ArmSpec) -> dict[str, str]:
    """Environment variables of a launch: thread count and KV space of a CPU engine, then the arm's own."""
    threads = str(spec.settings.threads)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(spec.settings.kv_cache_gib),
        "ONEDNN_VERBOSE": "profile_create",  # names each primitive once, as it is made; nothing while it runs
        **spec.settings.env,
    }


def _check_prompts(spec: ArmSpec, prompts: dict[str, Path]) -> None:
    for name, path in prompts.items():
        tokens = len(PromptRecord.read(path).token_ids)
        if tokens < spec.capture.every:
            raise PromptError(
                f"prompt {name} is too short to be sampled",
                where=str(path),
                expected=f"at least every = {spec.capture.every} tokens",
                found=f"{tokens} tokens",
                do="lengthen the prompt or sample more often",
            )
        if tokens >= spec.settings.max_model_len:
            raise PromptError(
                f"prompt {name} does not fit the context of arm {spec.arm}",
                where=str(path),
                expected=f"fewer than max_model_len = {spec.settings.max_model_len} tokens",
                found=f"{tokens} tokens",
                do="shorten the prompt or raise max_model_len, up to what the model was trained for",
            )


def _check_checkpoint(record: Path) -> None:
    """The files that will be loaded are those that were recorded, byte for byte."""
    folder = record.with_suffix("")
    for file in read_json(record)["files"]:
        path = folder / file["path"]
        found = file_sha256(path) if path.is_file() else "no such file"
        if found != file["sha256"]:
            raise CheckpointError(
                "the checkpoint is no longer what was recorded",
                where=str(path),
                expected=f"sha256 {file['sha256']}",
                found=found,
                do=f"run the rule checkpoint again (snakemake --forcerun checkpoint), or restore {path.name}",
            )


def _bytes_needed(spec: ArmSpec, checkpoint: Path, prompts: dict[str, Path]) -> int:
    """Uncompressed size of the first pass's logits; later passes store only rows that differ."""
    config = read_json(checkpoint.with_suffix("") / "config.json")
    vocabulary = int((config.get("text_config") or config)["vocab_size"])
    rows = sum(len(PromptRecord.read(path).token_ids) // spec.capture.every for path in prompts.values())
    wide = "float32" in (spec.settings.dtype, spec.settings.head_dtype)
    return rows * vocabulary * (4 if wide else 2) + 2**20


def _show_progress(process: Started, events: Path, title: str) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    done, seconds, read = 0, 0.0, 0
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task(title, total=None, rate="")
        while process.poll() is None:
            lines = events.read_text(encoding="utf-8").split("\n")[:-1] if events.exists() else []
            for event in (json.loads(line) for line in lines[read:]):
                if "stage" in event:
                    progress.update(task, description=f"{title}: {event['stage']}", total=event.get("total"))
                if "done" in event:
                    done, seconds = done + event["done"], seconds + event["seconds"]
                    progress.update(task, completed=done, rate=f"{done / seconds:.1f} positions/s")
            read = len(lines)
            time.sleep(0.2)


def _outcome(status: int, folder: Path, spec: ArmSpec, log: Path) -> str:
    record = folder / "outcome.json"
    if status == 0 and record.exists():
        outcome = str(read_json(record)["outcome"])
    elif -status in CRASHES:
        outcome = f"refused: the engine crashed with {signal.Signals(-status).name}: {last_lines(log, 1)}"
    else:
        name = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        raise EngineError(
            f"the engine process of arm {spec.arm} did not finish",
            where=str(log),
            expected="a capture, or a refusal by the engine",
            found=f"{name}: {last_lines(log)}",
            do="read the log; if memory or the disk ran out, or someone ended the process, run it again",
        )
    if spec.reference and outcome != "captured":
        raise EngineError(
            f"the engine refused the reference arm {spec.arm}",
            where=str(log),
            expected="a reference that runs: nothing can be compared without it",
            found=outcome,
            do="change the reference arm's settings in the audit",
        )
    return outcome


def _complete_manifest(path: Path, container: dict[str, Any] | str, log: Path) -> None:
    """Add what only the host knows: the container, and what oneDNN wrote into the log."""
    if path.exists():
        primitives = onednn_primitives(log.read_text(encoding="utf-8", errors="replace"))
        write_json(path, read_json(path) | {"container": container, "primitives": primitives})


def _put_in_place(outcome: str, folder: Path, spec: ArmSpec, job: dict[str, Any], output: Path, manifest: Path) -> None:
    if outcome != "captured":
        attributes = {"audit": spec.audit, "arm": spec.arm, "launch": job["launch"], "spec_sha256": job["spec_sha256"]}
        write_refusal(folder / "capture.h5", attributes, outcome.removeprefix("refused: "))
    if (folder / "manifest.json").exists():
        (folder / "manifest.json").replace(manifest)
    else:
        facts = {"audit": spec.audit, "arm": spec.arm, "launch": job["launch"], "outcome": outcome}
        write_json(manifest, {"schema_version": "1", "parents": job["parents"], **facts})
    (folder / "capture.h5").replace(output)
