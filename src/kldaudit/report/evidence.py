"""Read what one audit left in its results folder, and refuse records that do not belong together."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from kldaudit.audit import Audit
from kldaudit.digests import file_sha256
from kldaudit.errors import RecordError
from kldaudit.records import read_json

COLUMNS = ("positions", "kl")
"""Per-position columns that the report shows; flips come by window, from the record."""

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Arm:
    """The records of one arm."""

    name: str
    verification: dict[str, Any]
    manifest: dict[str, Any]


@dataclass(frozen=True)
class Variant(Arm):
    """The records of one variant, and its per-position columns, [n_positions] each, by prompt."""

    divergence: dict[str, Any]
    columns: dict[str, Columns]

    @property
    def refused(self) -> bool:
        """Whether there are no figures, because the engine refused the arm."""
        return self.divergence["overall"] is None

    @property
    def is_chance(self) -> bool:
        """Whether its greedy tokens agree with the reference's no more often than chance: not the model's output."""
        return not self.refused and bool((self.divergence["chance"] or {}).get("is_chance"))

    @property
    def mean(self) -> float:
        """Mean KL(reference‖variant), nats; of a variant that ran."""
        return float(self.divergence["overall"]["mean"])

    def kl(self) -> NDArray[np.float64]:
        """KL(reference‖variant) at all positions of all prompts, nats, FP64 [n_positions]."""
        return np.concatenate([columns["kl"] for columns in self.columns.values()])


@dataclass(frozen=True)
class Evidence:
    """Everything that the report shows."""

    audit: Audit
    sheet: dict[str, Any]
    sheet_sha256: str
    prompts: dict[str, dict[str, Any]]
    reference: Arm
    variants: dict[str, Variant]

    @property
    def ranked(self) -> list[Variant]:
        """Variants, what demands attention first: not the model, then worst mean KL first, then refused."""
        ran = [one for one in self.variants.values() if not one.refused]
        ran.sort(key=lambda one: (not one.is_chance, -one.mean, one.name))
        return ran + [one for one in self.variants.values() if one.refused]

    @property
    def measured(self) -> list[Variant]:
        """The ranked variants that have figures."""
        return [one for one in self.ranked if not one.refused]


def read_evidence(results: Path) -> Evidence:
    """Read the records of an audit.

    Raises:
        RecordError: a record is missing, malformed, or not the one that the disclosure sheet was made from.
    """
    sheet_path = results / "disclosure.json"
    sheet = read_record(sheet_path)
    parents = sheet.get("parents", {})
    _check_parent(results, results / "spec.json", parents)
    audit = Audit.read(results / "spec.json")

    def record(*parts: str) -> dict[str, Any]:
        path = results.joinpath(*parts)
        found = read_record(path)
        _check_parent(results, path, parents)
        return found

    def arm(name: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
        return name, record("verification", f"{name}.json"), record("captures", name, "launch1.manifest.json")

    variants = {}
    for name in audit.variants:
        divergence = record("divergence", f"{name}.json")
        columns = read_columns(results / "divergence" / f"{name}.h5", divergence)
        variants[name] = Variant(*arm(name), divergence, columns)
    return Evidence(
        audit=audit,
        sheet=sheet,
        sheet_sha256=file_sha256(sheet_path),
        prompts={name: record("prompts", f"{name}.json") for name in audit.prompts},
        reference=Arm(*arm(audit.reference)),
        variants=variants,
    )


def read_record(path: Path) -> dict[str, Any]:
    """A record of another step, as JSON."""
    content = read_json(path)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != "1":
        raise RecordError(
            f"{path} is no record",
            where=str(path),
            expected="a JSON object of schema version 1",
            found=f"schema version {version}" if version else "something else",
            do="make the file again with this version of kldaudit",
        )
    return dict(content)


def _check_parent(results: Path, path: Path, parents: dict[str, str]) -> None:
    """Refuse a record that changed since the disclosure sheet was made: page and sheet would contradict each other."""
    expected = parents.get(str(path.relative_to(results)))
    found = file_sha256(path) if path.exists() else "no such file"
    if found != expected:
        raise RecordError(
            f"the disclosure sheet was not made from this {path.name}",
            where=str(path),
            expected=f"SHA-256 {expected}" if expected else "a file that the sheet names in its parents",
            found=found,
            do="run `kldaudit disclosure` again, then the report",
        )


def read_columns(path: Path, divergence: dict[str, Any]) -> dict[str, Columns]:
    """Per-position columns of a variant, by prompt; none where the variant was refused."""
    try:
        content = path.read_bytes()
        with h5py.File(io.BytesIO(content), "r") as file:
            prompts = file.get("prompts", {})
            found = {name: {column: group[column][:] for column in COLUMNS} for name, group in prompts.items()}
            arms = (str(file.attrs.get("reference")), str(file.attrs.get("variant")))
    except (OSError, KeyError, RuntimeError, ValueError, TypeError) as error:
        raise RecordError(
            f"cannot read {path}",
            where=str(path),
            expected="the per-position columns that `kldaudit divergence --positions` writes",
            found=str(error),
            do="run the step divergence again",
        ) from error
    counts = {name: len(columns["kl"]) for name, columns in found.items()}
    expected = {name: summary["positions"] for name, summary in divergence["prompts"].items()}
    whole = hashlib.sha256(content).hexdigest() == divergence.get("positions_sha256")
    if not whole or counts != expected or arms != (divergence["reference"], divergence["variant"]):
        raise RecordError(
            f"{path.name} does not belong to {path.stem}.json",
            where=str(path),
            expected=f"{divergence['reference']} and {divergence['variant']}, positions {expected}, as it was written",
            found=f"{' and '.join(arms)}, positions {counts}, {'as it was written' if whole else 'changed since'}",
            do="run the step divergence again",
        )
    return found
