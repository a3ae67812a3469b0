"""The parts of one capture's environment, each with what identifies it: what both exports are made from."""

import re
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from packageurl import PackageURL
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kldaudit.digests import file_sha256
from kldaudit.errors import ExportError, RecordError
from kldaudit.manifest.read import in_words, read_manifest
from kldaudit.records import Frozen, first_error, read_json
from kldaudit.runtime.record import Image

Kind = Literal[
    "capture", "debian", "python", "library", "model", "weights", "image", "environment", "system", "cpu", "gpu",
    "driver", "firmware",
]  # fmt: skip

CAPTURE = "capture"
MODEL = "model"


class Part(Frozen):
    """One part: a package, a file, a device, or the capture itself, which needs all others."""

    ref: str = Field(description="Unique in the inventory.")
    kind: Kind
    name: str
    version: str | None = None
    purl: str | None = None
    sha256: str | None = None
    owner: str | None = Field(None, description="Reference of the package that a library belongs to.")
    as_packaged: bool | None = Field(None, description="Whether its hash is the one that the owner installed.")
    facts: dict[str, str] = Field(default_factory=dict, description="What else was recorded, by name.")


class Evidence(Frozen):
    """A manifest and the records that say more of what it names."""

    manifest: dict[str, Any]
    image: Image | None
    checkpoint: dict[str, Any] | None
    divergence: dict[str, Any] | None
    digests: dict[str, str] = Field(description="SHA-256 of each of these files.")

    @property
    def identity(self) -> uuid.UUID:
        """The same for the same files, of whatever names."""
        return uuid.uuid5(uuid.NAMESPACE_URL, "urn:kldaudit:" + ":".join(sorted(self.digests.values())))

    @property
    def title(self) -> str:
        """Audit, arm and launch."""
        return f"{self.manifest['audit']}/{self.manifest['arm']}/launch{self.manifest['launch']}"


class _CheckpointShape(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    checkpoint: str
    source: str
    revision: str
    made_by: str
    calibration: str
    quantization: dict[str, Any] | None
    files: list[dict[str, Any]]


class _DivergenceShape(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    reference: str
    variant: str
    outcome: str
    direction: str
    unit: str
    method_version: str
    overall: dict[str, Any] | None
    interval: dict[str, Any] | None
    spans: dict[str, dict[str, Any]]


def read_evidence(manifest: Path, image: Path | None, checkpoint: Path | None, divergence: Path | None) -> Evidence:
    """Read a manifest and the records beside it.

    Raises:
        RecordError: a file is missing or is not such a record.
        ExportError: a record is of another image, checkpoint or arm than the manifest.
    """
    found = read_manifest(manifest)
    paths = {"manifest": manifest, "image": image, "checkpoint": checkpoint, "divergence": divergence}
    digests = {name: file_sha256(path) for name, path in paths.items() if path is not None}
    for name in ("image", "checkpoint"):
        if name in digests and digests[name] != found["parents"].get(name):
            raise _foreign(paths[name], f"sha256 {found['parents'].get(name)}", f"sha256 {digests[name]}")
    compared = None if divergence is None else _shaped(divergence, _DivergenceShape)
    if compared is not None and compared["variant"] != found["arm"]:
        raise _foreign(divergence, f"the divergence of {found['arm']}", f"that of {compared['variant']}")
    return Evidence(
        manifest=found,
        image=None if image is None else Image.read(image),
        checkpoint=None if checkpoint is None else _shaped(checkpoint, _CheckpointShape),
        divergence=compared,
        digests=digests,
    )


def _shaped(path: Path, shape: type[BaseModel]) -> dict[str, Any]:
    content = read_json(path)
    try:
        return shape.model_validate(content).model_dump()
    except ValidationError as error:
        raise RecordError(
            f"{path} is no such record",
            where=str(path),
            expected="the record that kldaudit wrote",
            found=first_error(error),
            do="make the file again with this version of kldaudit",
        ) from error


def _foreign(path: Path | None, expected: str, found: str) -> ExportError:
    return ExportError(
        "a record does not belong to the manifest",
        where=str(path),
        expected=expected,
        found=found,
        do="give the records of the audit that the manifest is from",
    )


def inventory(evidence: Evidence) -> list[Part]:
    """Every part, the capture first, the others sorted by reference."""
    manifest = evidence.manifest
    packages = [*_debian(manifest), *_python(manifest)]
    parts = [
        *packages,
        *_files(manifest, {part.ref for part in packages}),
        *_model(evidence),
        *_image(evidence),
        *_machine(manifest),
    ]
    return [_capture(evidence), *sorted(_numbered(parts), key=lambda part: part.ref)]


def _numbered(parts: list[Part]) -> list[Part]:
    """References made unique: the second of the same name and version is #2."""
    seen: Counter[str] = Counter()
    unique = []
    for part in parts:
        seen[part.ref] += 1
        number = seen[part.ref]
        unique.append(part if number == 1 else part.model_copy(update={"ref": f"{part.ref}#{number}"}))
    return unique


def _capture(evidence: Evidence) -> Part:
    manifest = evidence.manifest
    facts = {"outcome": manifest["outcome"], "manifest sha256": evidence.digests["manifest"]}
    facts |= {f"parent {name} sha256": digest for name, digest in manifest["parents"].items()}
    return Part(ref=CAPTURE, kind="capture", name=f"kldaudit capture {evidence.title}", facts=facts)


def _facts(record: dict[str, Any], *without: str) -> dict[str, str]:
    return {name: in_words(value) for name, value in record.items() if name not in without}


def _hash(value: Any) -> str | None:
    return value if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) else None


def _debian(manifest: dict[str, Any]) -> list[Part]:
    listed = manifest.get("debian_packages")
    return [
        Part(
            ref=f"debian:{one['name']}={one['version']}",
            kind="debian",
            name=one["name"],
            version=one["version"],
            purl=_debian_purl(one, str(manifest.get("operating_system"))),
            facts=_facts(one, "name", "version"),
        )
        for one in (listed if isinstance(listed, list) else [])
    ]


def _debian_purl(package: dict[str, Any], system: str) -> str | None:
    """The purl needs the vendor, which only the operating system's name tells; without it there is none."""
    found = re.match(r"(Debian|Ubuntu)\D*([\d.]*)", system)
    if found is None:
        return None
    vendor, release = found[1].lower(), found[2].rstrip(".")
    qualifiers = {"arch": str(package["architecture"])} | ({"distro": f"{vendor}-{release}"} if release else {})
    name = package["name"].partition(":")[0]
    return PackageURL("deb", vendor, name, package["version"], qualifiers).to_string()


def _python(manifest: dict[str, Any]) -> list[Part]:
    return [
        Part(
            ref=f"python:{one['name']}=={one['version']}",
            kind="python",
            name=one["name"],
            version=one["version"],
            purl=PackageURL("pypi", None, one["name"], one["version"]).to_string(),
            facts=_facts(one, "name", "version"),
        )
        for one in manifest.get("python_packages", [])
    ]


def _files(manifest: dict[str, Any], packages: set[str]) -> list[Part]:
    """Loaded libraries, and shared objects of no package whether loaded or not."""
    libraries = manifest.get("libraries")
    loaded = {one["path"]: one for one in libraries} if isinstance(libraries, list) else {}
    stray = manifest.get("stray_files")
    strays = {one["path"]: one for one in stray} if isinstance(stray, list) else {}
    parts = []
    for path, one in (strays | loaded).items():
        owner = one.get("owner")
        facts = _facts(one, "path", "sha256", "version", "as_packaged") | {"loaded": in_words(path in loaded)}
        facts |= {"hash": one["sha256"]} if _hash(one["sha256"]) is None else {}
        facts |= {"stray": "yes"} if path in strays else {}
        parts.append(
            Part(
                ref=f"file:{path}",
                kind="library",
                name=path,
                version=one.get("version"),
                sha256=_hash(one["sha256"]),
                owner=owner if owner in packages else None,
                as_packaged=one.get("as_packaged"),
                facts=facts,
            )
        )
    return parts


def _model(evidence: Evidence) -> list[Part]:
    manifest, checkpoint = evidence.manifest, evidence.checkpoint
    digest = {"checkpoint record sha256": manifest["parents"].get("checkpoint", "unknown: not recorded")}
    if checkpoint is None:
        return [Part(ref=MODEL, kind="model", name=f"checkpoint of arm {manifest['arm']}", facts=digest)]
    facts = {name: in_words(checkpoint[name]) for name in ("source", "made_by", "calibration", "quantization")}
    model = Part(
        ref=MODEL,
        kind="model",
        name=checkpoint["checkpoint"],
        version=checkpoint["revision"],
        facts=facts | digest,
    )
    weights = [
        Part(
            ref=f"checkpoint:{one['path']}",
            kind="weights",
            name=one["path"],
            sha256=_hash(one["sha256"]),
            owner=MODEL,
            facts={"size in bytes": str(one["size"])},
        )
        for one in checkpoint["files"]
    ]
    return [model, *weights]


def _image(evidence: Evidence) -> list[Part]:
    image, container = evidence.image, evidence.manifest.get("container")
    if image is not None:
        facts = _facts(image.model_dump(), "schema_version", "digest", "engine")
        kind: Kind = "environment" if image.runtime == "venv" else "image"
        return [Part(ref="image", kind=kind, name=image.engine, sha256=_hash(image.digest), facts=facts)]
    if isinstance(container, dict):
        return [Part(ref="image", kind="image", name="container of the capture", facts=_facts(container))]
    return []


def _machine(manifest: dict[str, Any]) -> list[Part]:
    system = str(manifest.get("operating_system", "unknown: not recorded"))
    parts = [Part(ref="system", kind="system", name=system, facts=_facts(_known(manifest, "kernel", "libc")))]
    cpu = manifest.get("cpu", {})
    if cpu:
        parts.append(Part(ref="cpu", kind="cpu", name=in_words(cpu.get("model")), facts=_facts(cpu, "model")))
        parts += _firmware("cpu", "microcode", cpu.get("microcode"))
    gpu = manifest.get("gpu")
    for index, one in enumerate(gpu if isinstance(gpu, list) else []):
        ref = f"gpu:{index}"
        parts.append(Part(ref=ref, kind="gpu", name=in_words(one.get("name")), facts=_facts(one, "name")))
        parts += _firmware(ref, "VBIOS", one.get("vbios"))
    driver = manifest.get("stack", {}).get("driver", "none: not recorded")
    if not driver.startswith("none"):
        parts.append(Part(ref="driver", kind="driver", name="NVIDIA driver", version=driver))
    return parts


def _known(manifest: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: manifest[name] for name in names if name in manifest}


def _firmware(device: str, name: str, version: Any) -> list[Part]:
    if version is None:
        return []
    return [Part(ref=f"{device}:{name}", kind="firmware", name=name, version=in_words(version), owner=device)]
