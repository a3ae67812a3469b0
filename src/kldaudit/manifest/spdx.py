"""Manifests as SPDX 2.3: packages, loaded files, devices and the model, and what belongs to what.

SPDX wants a SHA-1 of what it calls a file, and the manifest has SHA-256 only: loaded libraries and weights are
packages whose purpose is FILE. SPDX wants a time of creation too; it is the epoch, so that the same files give the
same bytes.
"""

import json
import re
from datetime import datetime
from typing import Any

from spdx_tools.spdx.jsonschema.document_converter import DocumentConverter
from spdx_tools.spdx.model import (
    Actor,
    ActorType,
    Checksum,
    ChecksumAlgorithm,
    CreationInfo,
    Document,
    ExternalPackageRef,
    ExternalPackageRefCategory,
    Package,
    PackagePurpose,
    Relationship,
    RelationshipType,
    SpdxNoAssertion,
)
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document
from spdx_tools.spdx.writer.write_utils import convert

from kldaudit import __version__
from kldaudit.digests import text_sha256
from kldaudit.errors import ExportError
from kldaudit.manifest.inventory import CAPTURE, Evidence, Kind, Part, inventory

PURPOSES: dict[Kind, PackagePurpose] = {
    "capture": PackagePurpose.APPLICATION,
    "debian": PackagePurpose.LIBRARY,
    "python": PackagePurpose.LIBRARY,
    "library": PackagePurpose.FILE,
    "model": PackagePurpose.OTHER,
    "weights": PackagePurpose.FILE,
    "image": PackagePurpose.CONTAINER,
    "environment": PackagePurpose.OTHER,
    "system": PackagePurpose.OPERATING_SYSTEM,
    "cpu": PackagePurpose.DEVICE,
    "gpu": PackagePurpose.DEVICE,
    "driver": PackagePurpose.OTHER,
    "firmware": PackagePurpose.FIRMWARE,
}

DOCUMENT = "SPDXRef-DOCUMENT"


def spdx_document(evidence: Evidence) -> str:
    """The evidence as an SPDX 2.3 document in JSON.

    Raises:
        ExportError: the document does not fit the standard.
    """
    parts = inventory(evidence)
    document = Document(
        CreationInfo(
            spdx_version="SPDX-2.3",
            spdx_id=DOCUMENT,
            name=f"kldaudit manifest {evidence.title}",
            document_namespace=f"https://spdx.org/spdxdocs/kldaudit-{evidence.identity}",
            creators=[Actor(ActorType.TOOL, f"kldaudit-{__version__}")],
            created=datetime(1970, 1, 1),
            creator_comment="The time of creation is not recorded: the same files give the same document.",
        ),
        packages=[_package(part) for part in parts],
        relationships=[
            Relationship(DOCUMENT, RelationshipType.DESCRIBES, _identifier(CAPTURE)),
            *(_relationship(part) for part in parts if part.ref != CAPTURE),
        ],
    )
    _validate(document)
    content = convert(document, DocumentConverter())
    _hyphenate(content["packages"])
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _hyphenate(packages: list[dict[str, Any]]) -> None:
    """The standard's schema writes PACKAGE-MANAGER where spdx-tools writes PACKAGE_MANAGER."""
    for package in packages:
        for reference in package.get("externalRefs", []):
            reference["referenceCategory"] = reference["referenceCategory"].replace("_", "-")


def _validate(document: Document) -> None:
    wrong = validate_full_spdx_document(document)
    if wrong:
        raise ExportError(
            "the document is not valid SPDX 2.3 and was not written",
            where=str(wrong[0].context.spdx_id or wrong[0].context.parent_id),
            expected="what the standard allows",
            found=wrong[0].validation_message[:300],
            do="report this with the manifest: it is a fault of kldaudit",
        )


def _identifier(ref: str) -> str:
    """SPDX allows letters, digits, dots and hyphens: the digest keeps apart what looks alike without the rest."""
    return f"SPDXRef-{re.sub(r'[^A-Za-z0-9.]+', '-', ref).strip('-')}-{text_sha256(ref)[:8]}"


def _package(part: Part) -> Package:
    references = (
        [ExternalPackageRef(ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", part.purl)] if part.purl else []
    )
    facts = [f"{name}: {value}" for name, value in sorted(part.facts.items())]
    if part.as_packaged is not None:
        facts.append(f"as packaged: {'yes' if part.as_packaged else 'NO'}")
    return Package(
        spdx_id=_identifier(part.ref),
        name=part.name,
        version=part.version,
        download_location=SpdxNoAssertion(),
        files_analyzed=False,
        checksums=[] if part.sha256 is None else [Checksum(ChecksumAlgorithm.SHA256, part.sha256)],
        comment="\n".join(facts) or None,
        external_references=references,
        primary_package_purpose=PURPOSES[part.kind],
    )


def _relationship(part: Part) -> Relationship:
    """What belongs to something is contained in it; the capture depends on everything else."""
    if part.owner is not None:
        return Relationship(_identifier(part.owner), RelationshipType.CONTAINS, _identifier(part.ref))
    return Relationship(_identifier(CAPTURE), RelationshipType.DEPENDS_ON, _identifier(part.ref))
