"""Manifests as CycloneDX 1.6: software, devices, model with its card, and how the capture was run.

The same files give the same bytes: the serial number is derived from their digests and there is no timestamp. What
cyclonedx-python-lib has no class for (model card, formulation) is added to its JSON; the schema's strict validator
sees the whole.
"""

import json
from decimal import Decimal
from typing import Any

from cyclonedx.exception import MissingOptionalDependencyException
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.component_evidence import (
    AnalysisTechnique,
    ComponentEvidence,
    Identity,
    IdentityField,
    Method,
    Occurrence,
)
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from kldaudit import __version__
from kldaudit.errors import ExportError
from kldaudit.manifest.inventory import CAPTURE, MODEL, Evidence, Kind, Part, inventory
from kldaudit.manifest.read import in_words

TYPES: dict[Kind, ComponentType] = {
    "capture": ComponentType.APPLICATION,
    "debian": ComponentType.LIBRARY,
    "python": ComponentType.LIBRARY,
    "library": ComponentType.FILE,
    "model": ComponentType.MACHINE_LEARNING_MODEL,
    "weights": ComponentType.FILE,
    "image": ComponentType.CONTAINER,
    "environment": ComponentType.PLATFORM,
    "system": ComponentType.OPERATING_SYSTEM,
    "cpu": ComponentType.DEVICE,
    "gpu": ComponentType.DEVICE,
    "driver": ComponentType.DEVICE_DRIVER,
    "firmware": ComponentType.FIRMWARE,
}


def cyclonedx_document(evidence: Evidence) -> str:
    """The evidence as a CycloneDX 1.6 document in JSON.

    Raises:
        ExportError: the document does not fit the standard's schema.
    """
    parts = inventory(evidence)
    document = json.loads(JsonV1Dot6(_bom(evidence, parts)).output_as_string())
    del document["metadata"]["timestamp"]
    model = next(one for one in document["components"] if one["bom-ref"] == MODEL)
    model["modelCard"] = _model_card(evidence)
    document["formulation"] = [_formula(evidence, parts)]
    text = json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    _validate(text)
    return text


def _validate(text: str) -> None:
    try:
        wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    except MissingOptionalDependencyException as error:
        raise ExportError(
            "a library for exports is not installed",
            where="the validation of CycloneDX documents",
            expected="kldaudit with its extra export",
            found=" ".join(str(error).split()),
            do="pip install 'kldaudit[export]'",
        ) from error
    if wrong is not None:
        raise ExportError(
            "the document is not valid CycloneDX 1.6 and was not written",
            where=wrong.data.json_path,
            expected="what the standard's strict schema allows",
            found=wrong.data.message[:300],
            do="report this with the manifest: it is a fault of kldaudit",
        )


def _bom(evidence: Evidence, parts: list[Part]) -> Bom:
    by_ref = {part.ref: part for part in parts}
    components = {part.ref: _component(part, by_ref) for part in parts}
    root = components[CAPTURE]
    bom = Bom(
        serial_number=evidence.identity,
        metadata=BomMetaData(
            component=root,
            tools=ToolRepository(
                components=[Component(name="kldaudit", version=__version__, type=ComponentType.APPLICATION)]
            ),
        ),
        components=[one for ref, one in components.items() if ref != CAPTURE],
    )
    for part in parts:
        for needed in _needs(part, parts):
            bom.register_dependency(components[part.ref], [components[needed]])
    return bom


def _needs(part: Part, parts: list[Part]) -> list[str]:
    """The capture needs everything that belongs to nothing else; a model its files, a device its firmware."""
    if part.ref == CAPTURE:
        return [one.ref for one in parts if one.ref != CAPTURE and (one.owner is None or one.kind == "library")]
    if part.kind == "library":
        return [part.owner] if part.owner is not None else []
    return [one.ref for one in parts if one.owner == part.ref and one.kind != "library"]


def _component(part: Part, by_ref: dict[str, Part]) -> Component:
    return Component(
        bom_ref=part.ref,
        type=TYPES[part.kind],
        name=part.name,
        version=part.version,
        purl=None if part.purl is None else PackageURL.from_string(part.purl),
        hashes=[] if part.sha256 is None else [HashType(alg=HashAlgorithm.SHA_256, content=part.sha256)],
        properties=_properties(part.facts),
        evidence=_evidence(part, by_ref) if part.kind == "library" else None,
    )


def _properties(facts: dict[str, str]) -> list[Property]:
    return [Property(name=f"kldaudit:{name}", value=value) for name, value in facts.items()]


def _evidence(part: Part, by_ref: dict[str, Part]) -> ComponentEvidence:
    """Where the file lies, and why it is thought to be its owner's."""
    occurrences = [Occurrence(location=part.name)]
    owner = None if part.owner is None else by_ref[part.owner].purl
    if owner is None:
        return ComponentEvidence(occurrences=occurrences)
    listed = Method(
        technique=AnalysisTechnique.MANIFEST_ANALYSIS, confidence=Decimal(1), value="the package lists this path"
    )
    compared = {
        True: (Decimal(1), "the hash is the one that the package installed"),
        False: (Decimal(0), "the hash is NOT the one that the package installed"),
    }
    methods = [listed]
    if part.as_packaged is not None:
        confidence, words = compared[part.as_packaged]
        methods.append(Method(technique=AnalysisTechnique.HASH_COMPARISON, confidence=confidence, value=words))
    identity = Identity(field=IdentityField.PURL, concluded_value=owner, methods=methods)
    return ComponentEvidence(identity=[identity], occurrences=occurrences)


def _pairs(facts: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": f"kldaudit:{name}", "value": value} for name, value in sorted(facts.items())]


def _model_card(evidence: Evidence) -> dict[str, Any]:
    """The card: its schema has no room for a method, so that stands in its properties."""
    selected, divergence = evidence.manifest.get("selected", {}), evidence.divergence
    names = ("dtype", "head_dtype", "quantization", "kv_cache_dtype", "max_model_len", "vocab_size")
    method = {name: in_words(selected[name]) for name in names if name in selected}
    card: dict[str, Any] = {}
    if "model_class" in selected:
        card["modelParameters"] = {"modelArchitecture": selected["model_class"]}
    if divergence is not None:
        method |= _method(divergence)
        metrics = _metrics(divergence)
        if metrics:
            card["quantitativeAnalysis"] = {"performanceMetrics": metrics}
    return card | {"properties": _pairs(method)}


def _method(divergence: dict[str, Any]) -> dict[str, str]:
    names = (
        "reference", "variant", "outcome", "reason", "direction", "unit", "method_version", "vocab_size",
        "logits_dtype", "every", "excluded_positions", "nonfinite_positions", "window_rule",
    )  # fmt: skip
    method = {f"divergence {name}": in_words(divergence[name]) for name in names if divergence.get(name) is not None}
    if divergence["overall"] is None:
        return method
    method["divergence arithmetic"] = "FP64 from the stored logits, whole vocabulary, nothing clamped or left out"
    method["divergence aggregation"] = f"unweighted mean over {divergence['overall']['positions']} positions"
    if divergence["interval"] is not None:
        method["divergence interval"] = in_words(divergence["interval"])
    if divergence.get("noise_floor"):
        method["divergence noise floor"] = in_words(divergence["noise_floor"]["mean"])
    return method


def _metrics(divergence: dict[str, Any]) -> list[dict[str, Any]]:
    overall, interval = divergence["overall"], divergence["interval"]
    if overall is None:
        return []
    kind = f"mean {divergence['direction']}, {divergence['unit']}"
    first: dict[str, Any] = {"type": kind, "value": str(overall["mean"])}
    if interval is not None and interval["low"] is not None and interval["high"] is not None:
        first["confidenceInterval"] = {"lowerBound": str(interval["low"]), "upperBound": str(interval["high"])}
    flips = {"type": f"greedy tokens flipped, of {overall['positions']}", "value": str(overall["flips"])}
    spans = [
        {"type": kind, "slice": f"span {name}", "value": str(one["mean"])}
        for name, one in sorted(divergence["spans"].items())
    ]
    return [first, flips, *spans]


def _formula(evidence: Evidence, parts: list[Part]) -> dict[str, Any]:
    """How the capture was run: the model, the engine's arguments and variables, on which devices."""
    manifest = evidence.manifest
    arguments = manifest.get("engine", {}).get("arguments", {})
    inputs: list[dict[str, Any]] = [{"resource": {"ref": MODEL}}]
    if arguments:
        inputs.append(
            {"parameters": [{"name": name, "value": in_words(arguments[name])} for name in sorted(arguments)]}
        )
    variables = sorted(manifest.get("environment", {}).items())
    if variables:
        inputs.append({"environmentVars": [{"name": name, "value": value} for name, value in variables]})
    topology = [part.ref for part in parts if part.kind in ("cpu", "gpu", "driver", "image", "environment", "system")]
    workflow = {
        "bom-ref": "workflow:capture",
        "uid": str(evidence.identity),
        "name": f"kldaudit capture {evidence.title}",
        "description": "One launch of the engine: forced token histories replayed, next-token logits stored.",
        "taskTypes": ["other"],
        "inputs": inputs,
        "runtimeTopology": [{"ref": CAPTURE, "dependsOn": sorted(topology)}],
        "properties": [*_pairs({"outcome": manifest["outcome"]}), *_kernels(manifest.get("kernels"))],
    }
    return {"bom-ref": "formula:capture", "workflows": [workflow]}


def _kernels(kernels: Any) -> list[dict[str, str]]:
    if not isinstance(kernels, list):
        return _pairs({"kernels": "unknown: not recorded" if kernels is None else str(kernels)})
    known = [one if isinstance(one, dict) else {"name": one} for one in kernels]
    words = [f"{one['name']} × {one['count']}" if "count" in one else str(one["name"]) for one in known]
    return [{"name": "kldaudit:kernel", "value": value} for value in sorted(words)]
