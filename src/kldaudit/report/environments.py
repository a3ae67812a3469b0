"""What differs between the reference's environment and each variant's: what the audit meant, and what it did not."""

from dataclasses import dataclass

from kldaudit.audit import arm_spec
from kldaudit.manifest.diff import Line
from kldaudit.manifest.meant import diff_of_arms
from kldaudit.report.evidence import Evidence

NAMED = 3
"""Things of a line that are named before the rest is counted."""


@dataclass(frozen=True)
class DifferenceRow:
    """One difference, or several equal ones."""

    group: str
    what: str
    before: str
    after: str
    follows_from: str | None


@dataclass(frozen=True)
class Environment:
    """One variant's environment against the reference's; ``missing`` says why they cannot be compared."""

    arm: str
    not_meant: list[DifferenceRow]
    meant: list[DifferenceRow]
    missing: str | None = None


def environments(evidence: Evidence) -> list[Environment]:
    """Every variant's environment against the reference's."""
    audit = evidence.audit
    found = []
    for variant in evidence.ranked:
        manifests = (evidence.reference.manifest, variant.manifest)
        if variant.refused:
            found.append(Environment(variant.name, [], [], "refused: nothing ran that could be compared"))
            continue
        arms = (arm_spec(audit, audit.reference), arm_spec(audit, variant.name))
        difference = diff_of_arms(*manifests, arms)
        rows = [_row(group.name, line) for group in difference.groups for line in group.lines]
        found.append(
            Environment(
                variant.name,
                not_meant=[row for row in rows if row.follows_from is None],
                meant=[row for row in rows if row.follows_from is not None],
            )
        )
    return found


def _row(group: str, line: Line) -> DifferenceRow:
    things = ", ".join(line.things[:NAMED])
    if len(line.things) > NAMED:
        things += f" and {len(line.things) - NAMED} more"
    fields = [f"{detail.field} " if detail.field else "" for detail in line.details]
    return DifferenceRow(
        group=group,
        what=f"{line.place}: {things}" if things else line.place,
        before="; ".join(
            f"{field}{one.before if one.before is not None else '–'}"
            for field, one in zip(fields, line.details, strict=True)
        ),
        after="; ".join(
            f"{field}{one.after if one.after is not None else '–'}"
            for field, one in zip(fields, line.details, strict=True)
        ),
        follows_from=line.follows_from,
    )
