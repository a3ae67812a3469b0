"""Manifests as they are found: those of today and those of earlier versions, which recorded less."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kldaudit.errors import RecordError
from kldaudit.records import first_error, read_json

NOT_RECORDED = "not recorded"
"""Stands for a field that the version of kldaudit which made the manifest did not know."""


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Package(_Open):
    name: str
    version: str


class _DebianPackage(_Package):
    architecture: str


class _File(_Open):
    path: str
    sha256: str


class _Asked(_Open):
    setting: str
    asked: str
    got: str
    honoured: bool


class _Kernel(_Open):
    name: str
    count: int
    share: float


class _Layer(_Open):
    layer: str


class _Linear(_Layer):
    method: str
    scheme: str | None
    kernels: list[str]


class _Selected(_Open):
    attention: list[_Layer] = []
    linear: list[_Linear] = []


class _Shape(_Open):
    """What every manifest has, also that of an engine that crashed, and the types of what only some have."""

    arm: str
    audit: str
    launch: int
    outcome: str
    parents: dict[str, str]
    engine: dict[str, Any] = {}
    selected: _Selected = _Selected()
    python_packages: list[_Package] = []
    environment: dict[str, str] = {}
    asked: list[_Asked] = []
    cpu: dict[str, Any] = {}
    torch: dict[str, Any] = {}
    caches: dict[str, Any] = {}
    stack: dict[str, str] = {}
    debian_packages: list[_DebianPackage] | str | None = None
    stray_files: list[_File] | str | None = None
    libraries: list[_File] | str | None = None
    gpu: list[dict[str, Any]] | str | None = None
    kernels: list[_Kernel] | list[str] | str | None = None
    primitives: list[str] | str | None = None
    container: dict[str, Any] | str | None = None


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest of any version.

    Returns:
        The manifest as it stands in the file. Fields that its version did not record are missing.

    Raises:
        RecordError: the file is missing, no JSON, or no manifest.
    """
    content = read_json(path)
    try:
        _Shape.model_validate(content)
    except ValidationError as error:
        raise RecordError(
            f"{path} is no manifest",
            where=str(path),
            expected="a launch{n}.manifest.json that kldaudit capture wrote",
            found=first_error(error),
            do="name a manifest, such as results/AUDIT/captures/ARM/launch1.manifest.json",
        ) from error
    assert isinstance(content, dict)
    return content


def in_words(value: Any) -> str:
    """A recorded value in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(one)}" for name, one in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(in_words(one) for one in value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    return str(value)
