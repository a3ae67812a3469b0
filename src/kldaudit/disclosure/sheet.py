"""Fill in the fields from the records of an audit, and write the sheet."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from kldaudit import METHOD_VERSION, __version__
from kldaudit.audit import Audit
from kldaudit.digests import file_sha256
from kldaudit.disclosure.fields import FIELDS, FieldSpec
from kldaudit.errors import RecordError
from kldaudit.records import Frozen, Record, read_json

NOT_DISCLOSED = "NOT DISCLOSED"
NOT_RUN = "the engine refused the arm: it did not run"


class Disclosed(Frozen):
    """One filled-in field."""

    key: str
    title: str
    group: str
    status: Literal["disclosed", "unknown", "not_applicable", "NOT DISCLOSED"]
    value: str = Field(description="The value in words, or why there is none.")
    known: Literal["measured", "declared", "derived"] | None = Field(
        description="How it is known; null without a value."
    )
    sources: list[str] = Field(description="Recorded values it stands on.")


class Claim(Frozen):
    """The line on top: one variant's figure."""

    variant: str
    outcome: Literal["measured", "refused", "not the model"]
    sentence: str
    mean_kl: float | None = Field(description="Mean KL(reference‖variant), nats; null if refused or infinite.")
    low: float | None = Field(description="Lower end of the 95 % interval, nats.")
    high: float | None
    positions: int | None
    flips: int | None
    verified: bool = Field(description="Both arms gave identical bits in all launches and passes.")
    as_asked: bool = Field(description="The engine ran what was asked for.")


class Sheet(Frozen):
    """The fields of one variant that are not the same for all."""

    variant: str
    fields: list[Disclosed]


class Disclosure(Record):
    """The disclosure sheet (``disclosure.json``)."""

    audit: str
    reference: str
    kldaudit_version: str
    method_version: str
    claims: list[Claim]
    shared: list[Disclosed] = Field(description="Fields with the same value for every variant that ran.")
    sheets: list[Sheet]


def lookup(records: Any, path: str) -> Any:
    """The recorded value at a path; None where any part of it is missing or empty."""
    for part in path.split("/"):
        if not isinstance(records, dict) or part not in records:
            return None
        records = records[part]
    return None if records in ("", [], {}) else records


def _refused(records: dict[str, Any]) -> bool:
    return bool(lookup(records, "variant/verification/outcome") == "refused")


def fill(spec: FieldSpec, records: dict[str, Any]) -> Disclosed:
    """Fill in one field from the records of one comparison."""

    def filled(status: Any, value: str, known: Any = None) -> Disclosed:
        return Disclosed(
            key=spec.key,
            title=spec.title,
            group=spec.group,
            status=status,
            value=value,
            known=known,
            sources=list(spec.sources),
        )

    if spec.needs_run and _refused(records):
        return filled("not_applicable", NOT_RUN)
    if spec.absent is not None:
        source, beginning, reason = spec.absent
        if str(lookup(records, source)).startswith(beginning):
            return filled("not_applicable", reason)
    values = [lookup(records, source) for source in spec.sources]
    missing = [source for source, value in zip(spec.sources, values, strict=True) if value is None]
    if missing:
        return filled(NOT_DISCLOSED, f"no record of {', '.join(missing)}")
    try:
        value = spec.words(*values)
    except (KeyError, TypeError, StopIteration) as error:
        return filled(NOT_DISCLOSED, f"incomplete record of {', '.join(spec.sources)}: {error!r} is missing")
    return filled("unknown" if "unknown:" in value else "disclosed", value.removeprefix("unknown: "), spec.known)


def gather(results: Path) -> tuple[Audit, dict[str, dict[str, Any]]]:
    """The records of every comparison of an audit, keyed by variant."""
    audit = Audit.read(results / "spec.json")
    prompts = {name: read_json(results / "prompts" / f"{name}.json") for name in audit.prompts}
    shared = {
        "image": read_json(results / "image.json"),
        "prompts": prompts,
        "reference": _arm_records(results, audit, audit.reference),
        "kldaudit": {"version": __version__, "method_version": METHOD_VERSION},
    }
    comparisons = {}
    for variant in audit.variants:
        records = _arm_records(results, audit, variant)
        records["divergence"] = read_json(results / "divergence" / f"{variant}.json")
        comparisons[variant] = {**shared, "variant": records}
    return audit, comparisons


def check_chain(results: Path, audit: Audit) -> None:
    """The records are of the arms that their names say, and were made from each other.

    A record of another arm, or one that is older than what it was made from, would put a wrong figure on the sheet.
    """
    facts: list[tuple[str, Any, Any]] = []
    captures: dict[str, dict[str, str]] = {}
    for arm in audit.arms:
        spec, verification = f"arms/{arm}.json", f"verification/{arm}.json"
        manifest = f"captures/{arm}/launch1.manifest.json"
        read = {name: read_json(results / name) for name in (spec, verification, manifest)}
        captures[arm] = lookup(read[verification], "parents") or {}
        facts += [(f"{name}: arm", lookup(record, "arm"), arm) for name, record in read.items()]
        spec_sha256 = file_sha256(results / spec)
        facts.append((f"{manifest}: parents.spec", lookup(read[manifest], "parents/spec"), spec_sha256))
    reference = audit.reference
    for variant in audit.variants:
        name = f"divergence/{variant}.json"
        record = read_json(results / name)
        facts += [
            (f"{name}: variant", lookup(record, "variant"), variant),
            (f"{name}: reference", lookup(record, "reference"), reference),
            (f"{name}: method_version", lookup(record, "method_version"), METHOD_VERSION),
            (f"{name}: parents.variant", lookup(record, "parents/variant"), captures[variant].get("launch1")),
            (f"{name}: parents.reference", lookup(record, "parents/reference"), captures[reference].get("launch1")),
        ]
    for place, found, expected in facts:
        if found != expected:
            raise RecordError(
                "the records do not belong together",
                where=f"{results}, {place}",
                expected=str(expected),
                found=str(found),
                do="run the workflow again; it makes what is out of date",
            )


def record_paths(results: Path, audit: Audit) -> list[Path]:
    """The records that the sheet stands on."""
    names = ["spec", "image"]
    names += [f"checkpoints/{name}" for name in audit.checkpoints] + [f"prompts/{name}" for name in audit.prompts]
    names += [f"{folder}/{arm}" for folder in ("arms", "verification") for arm in audit.arms]
    names += [f"divergence/{variant}" for variant in audit.variants]
    manifests = [path for arm in audit.arms for path in results.glob(f"captures/{arm}/launch*.manifest.json")]
    return sorted([*(results / f"{name}.json" for name in names), *manifests])


def _arm_records(results: Path, audit: Audit, arm: str) -> dict[str, Any]:
    return {
        "arm": read_json(results / "arms" / f"{arm}.json"),
        "checkpoint": read_json(results / "checkpoints" / f"{audit.arms[arm].checkpoint}.json"),
        "manifest": read_json(results / "captures" / arm / "launch1.manifest.json"),
        "verification": read_json(results / "verification" / f"{arm}.json"),
    }


def claim_line(variant: str, records: dict[str, Any]) -> Claim:
    """The variant's figure in one sentence, with what limits it."""
    divergence = records["variant"]["divergence"]
    asked = records["variant"]["manifest"].get("asked", [])
    as_asked = bool(asked) and all(line["honoured"] for line in asked)
    outcomes = [records[side]["verification"]["outcome"] for side in ("reference", "variant")]
    verified = outcomes == ["identical", "identical"]
    overall = divergence.get("overall")
    if overall is None:
        return Claim(
            variant=variant,
            outcome="refused",
            sentence=f"{variant}: refused: {divergence['reason']}",
            mean_kl=None,
            low=None,
            high=None,
            positions=None,
            flips=None,
            verified=False,
            as_asked=as_asked,
        )
    interval, chance = divergence["interval"], divergence["chance"]
    span = "no interval" if interval["low"] is None else f"95 % {interval['low']:.3g} to {interval['high']:.3g}"
    share = 100 * overall["flips"] / overall["positions"]
    sentence = (
        f"{variant}: mean KL({divergence['reference']}‖{variant}) = {float(overall['mean']):.3g} nats ({span}), "
        f"{overall['flips']} of {overall['positions']} greedy tokens flipped ({share:.1f} %), "
        + ("bits verified" if verified else f"bits NOT verified (reference {outcomes[0]}, variant {outcomes[1]})")
    )
    if not as_asked:
        sentence += "; the engine did not run what was asked for"
    if chance["is_chance"]:
        sentence = (
            f"{variant}: NOT THE MODEL'S OUTPUT: its greedy tokens agree with the reference's as often as chance "
            f"({100 * chance['agreement']:.1f} %); its KL is no measure of a quantization"
        )
    return Claim(
        variant=variant,
        outcome="not the model" if chance["is_chance"] else "measured",
        sentence=sentence,
        mean_kl=None if overall["infinite"] else overall["mean"],
        low=interval["low"],
        high=interval["high"],
        positions=overall["positions"],
        flips=overall["flips"],
        verified=verified,
        as_asked=as_asked,
    )


def disclose(results: Path) -> Disclosure:
    """The sheet of an audit, from the records in its results folder."""
    audit, comparisons = gather(results)
    check_chain(results, audit)
    try:
        claims = [claim_line(variant, records) for variant, records in comparisons.items()]
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise RecordError(
            "a record is malformed",
            where=f"{results}, verification/ or divergence/",
            expected="records as the workflow wrote them",
            found=f"{type(error).__name__}: {error}",
            do="remove the record and run the workflow again",
        ) from error
    filled = {variant: [fill(spec, records) for spec in FIELDS] for variant, records in comparisons.items()}
    ran = [variant for variant, records in comparisons.items() if not _refused(records)] or list(comparisons)
    columns = [list(column) for column in zip(*(filled[variant] for variant in ran), strict=True)]
    same = {column[0].key for column in columns if all(one == column[0] for one in column)}
    shared = [column[0] for column in columns if column[0].key in same]
    return Disclosure(
        parents={str(path.relative_to(results)): file_sha256(path) for path in record_paths(results, audit)},
        audit=audit.name,
        reference=audit.reference,
        kldaudit_version=__version__,
        method_version=METHOD_VERSION,
        claims=claims,
        shared=shared,
        sheets=[
            Sheet(variant=variant, fields=[one for one in fields if one.key not in same or one not in shared])
            for variant, fields in filled.items()
        ],
    )


def markdown(disclosure: Disclosure) -> str:
    """The sheet as Markdown."""
    lines = [f"# Disclosure sheet: {disclosure.audit}", "", f"Reference: `{disclosure.reference}`.", ""]
    lines += [f"- {claim.sentence}" for claim in disclosure.claims]
    lines += ["", "## The same for every variant that ran", ""]
    lines += _table(disclosure.shared)
    for sheet in disclosure.sheets:
        lines += ["", f"## {sheet.variant}", "", *_table(sheet.fields)]
    return "\n".join(lines) + "\n"


def _table(fields: list[Disclosed]) -> list[str]:
    rows = ["| Field | Value | How known |", "|---|---|---|"]
    not_run = [one.title for one in fields if one.value == NOT_RUN]
    if not_run:
        rows.append(f"| {', '.join(not_run)} | **not applicable**: {NOT_RUN} | – |")
    for one in (one for one in fields if one.value != NOT_RUN):
        value = one.value.replace("|", "\\|").replace("\n", " ")
        shown = value if one.status == "disclosed" else f"**{one.status.replace('_', ' ')}**: {value}"
        rows.append(f"| {one.title} | {shown} | {one.known or '–'} |")
    return rows
