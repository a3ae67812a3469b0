"""Ties hand-made records of a results folder together, as the workflow would have written them."""

import json
from pathlib import Path

from kldaudit import METHOD_VERSION
from kldaudit.digests import file_sha256
from kldaudit.records import write_json


def update(path: Path, **changes: object) -> None:
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | changes)


def tie_together(results: Path, reference: str) -> None:
    for spec in (results / "arms").glob("*.json"):
        arm = spec.stem
        update(spec, arm=arm)
        update(results / "verification" / f"{arm}.json", arm=arm, parents={"launch1": f"capture of {arm}"})
        manifest = results / "captures" / arm / "launch1.manifest.json"
        update(manifest, arm=arm, launch=1, parents={"spec": file_sha256(spec)})
    for record in (results / "divergence").glob("*.json"):
        parents = {"reference": f"capture of {reference}", "variant": f"capture of {record.stem}"}
        update(record, reference=reference, variant=record.stem, parents=parents, method_version=METHOD_VERSION)
        positions = record.with_suffix(".h5")
        if positions.exists():
            update(record, positions_sha256=file_sha256(positions))
