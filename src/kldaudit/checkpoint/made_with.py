"""Versions of the libraries that made a checkpoint: written beside it in the engine, taken away on the host."""

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FILE = "made-with.json"


def write_versions(output: Path, *packages: str) -> None:
    """Write the versions of installed packages into the checkpoint's folder."""

    def found(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "unknown: not installed in the image"

    (output / FILE).write_text(json.dumps({package: found(package) for package in packages}), encoding="utf-8")


def take_versions(output: Path) -> dict[str, str]:
    """Read the versions and remove their file."""
    path = output / FILE
    versions = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    return dict(versions)
