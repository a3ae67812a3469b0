"""The page's tables: records in, rows of words out."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kldaudit.report.evidence import Arm, Evidence, Variant
from kldaudit.report.words import count, number, percent, quantile_name

NOT_THE_MODEL = "NOT THE MODEL’S OUTPUT"

NINE = {
    "reference_checkpoint": "Reference checkpoint",
    "runtime_environment": "Full runtime environment",
    "evaluation_text": "Evaluation text",
    "calibration_data": "Calibration data",
    "context_lengths": "Context lengths",
    "sampled_positions": "Sampled positions",
    "kl_direction": "KL direction",
    "vocabulary_truncation": "Vocabulary truncation",
    "aggregation": "Aggregation",
}
"""The nine fields without which no KL figure can be interpreted."""

SPANS = ("tool_call", "generated", "tool_result", "not_tool_call")


@dataclass(frozen=True)
class Mark:
    """A yes or no, and the words that say why."""

    yes: bool
    text: str


@dataclass(frozen=True)
class ClaimRow:
    """One variant's line on top; ``notice`` stands instead of figures."""

    arm: str
    kind: str
    notice: str | None = None
    mean: str = ""
    mean_note: str | None = None
    interval: str = ""
    flips: str = ""
    verified: Mark | None = None
    as_asked: Mark | None = None


def claim_rows(evidence: Evidence) -> list[ClaimRow]:
    """The claim lines, what demands attention first."""
    return [_claim_row(evidence, variant) for variant in evidence.ranked]


def _claim_row(evidence: Evidence, variant: Variant) -> ClaimRow:
    record = variant.divergence
    if variant.refused:
        return ClaimRow(variant.name, "refused", f"refused: {record['reason']}")
    if variant.is_chance:
        return ClaimRow(variant.name, "chance", chance_notice(variant))
    overall, interval = record["overall"], record["interval"]
    note = None
    if float(overall["maximum"]) == 0:
        note = f"exactly 0 at all {count(overall['positions'], 'position')}"
    elif overall["infinite"]:
        note = f"infinite at {overall['infinite']} of {count(overall['positions'], 'position')}"
    span = f"{number(interval['low'])} to {number(interval['high'])}" if interval["low"] is not None else "none"
    return ClaimRow(
        arm=variant.name,
        kind="measured",
        mean=number(overall["mean"]),
        mean_note=note,
        interval=span,
        flips=f"{overall['flips']} of {overall['positions']} ({percent(overall['flips'], overall['positions'])})",
        verified=_verified(evidence.reference, variant),
        as_asked=_as_asked(variant),
    )


def chance_notice(variant: Variant) -> str:
    """Why an arm's figures are no measure of anything."""
    chance = variant.divergence["chance"]
    return (
        f"{NOT_THE_MODEL}: its greedy tokens agree with the reference’s at {percent(chance['agreement'], 1)} of the "
        f"positions, where independent picks would agree at {percent(chance['expected'], 1)}. "
        "Its KL is no measure of a quantization."
    )


def outcome_words(verification: dict[str, Any]) -> str:
    """The outcome of a verification."""
    comparisons = verification["comparisons"]
    differing = sum(not one["identical"] for one in comparisons)
    runs = (
        f"{count(verification['launches'], 'launch', 'launches')} × {count(verification['passes'], 'pass', 'passes')}"
    )
    words = {
        "identical": f"identical bits in {runs}",
        "differs": f"{differing} of {len(comparisons)} comparisons differ, {runs}",
        "refused": f"refused: {verification['reason']}",
        "single": "nothing to compare: one launch, one pass",
    }
    return words[verification["outcome"]]


def _verified(reference: Arm, variant: Arm) -> Mark:
    good = [one.verification["outcome"] == "identical" for one in (reference, variant)]
    text = outcome_words(variant.verification)
    if not good[0]:
        text += f"; the reference: {outcome_words(reference.verification)}"
    return Mark(all(good), text)


def _as_asked(arm: Arm) -> Mark:
    asked = arm.manifest.get("asked") or []
    if not asked:
        return Mark(False, "unknown: the manifest compares no settings")
    wrong = [f"{one['setting']}: asked {one['asked']}, ran {one['got']}" for one in asked if not one["honoured"]]
    return Mark(not wrong, "; ".join(wrong) or f"{count(len(asked), 'setting')} compared")


def interval_notes(evidence: Evidence) -> list[str]:
    """How the intervals were made and what limits them, said once where it is the same for all."""
    notes: dict[str, list[str]] = {}
    figures = [variant for variant in evidence.measured if not variant.is_chance]
    for variant in figures:
        one = variant.divergence["interval"]
        words = f"{one['method']}, {count(one['blocks'], 'block')}, {one['resamples']} resamples, seed {one['seed']}"
        notes.setdefault(words + (f". Caution: {one['caution']}" if one["caution"] else ""), []).append(variant.name)
    return [words if len(names) == len(figures) else f"{', '.join(names)}: {words}" for words, names in notes.items()]


def noise_floor(evidence: Evidence) -> str:
    """The reference's other launch against its first."""
    for variant in evidence.measured:
        floor = variant.divergence["noise_floor"]
        if floor is not None:
            return (
                f"mean KL of the reference’s second launch against its first is {number(floor['mean'])} nats, with "
                f"{floor['flips']} of {floor['positions']} greedy tokens flipped. It is never subtracted."
            )
    return "not measured: there is no comparison of a second launch of the reference."


def window_tables(evidence: Evidence, prompt: str) -> list[dict[str, Any]]:
    """Flips per window of a prompt: a row a window, a cell an arm."""
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for variant in evidence.measured:
        for window in (one for one in variant.divergence["windows"] if one["prompt"] == prompt):
            row = rows.setdefault((window["start"], window["stop"]), {"positions": window["positions"], "flips": {}})
            row["flips"][variant.name] = window["flips"]
    return [{"tokens": f"{start}–{stop - 1}", **row} for (start, stop), row in sorted(rows.items())]


def quantile_rows(evidence: Evidence) -> list[dict[str, Any]]:
    """Quantiles of KL over all positions, a row an arm."""
    rows = []
    for variant in evidence.measured:
        overall = variant.divergence["overall"]
        cells = [
            (quantile_name(one["q"]), None if one["value"] is None else number(one["value"]), one["withheld"])
            for one in overall["quantiles"]
        ]
        rows.append(
            {
                "arm": variant.name,
                "chance": variant.is_chance,
                "positions": overall["positions"],
                "zero": int((variant.kl() == 0).sum()),
                "infinite": overall["infinite"],
                "quantiles": cells,
                "maximum": number(overall["maximum"]),
            }
        )
    return rows


def mean_table(evidence: Evidence) -> dict[str, Any]:
    """Mean KL and flips of all positions, by prompt and by span: columns with their counts, a row an arm."""
    columns: dict[tuple[str, str], int] = {}
    rows = []
    for variant in evidence.measured:
        record = variant.divergence
        spans = {("span", kind): record["spans"][kind] for kind in SPANS if kind in record["spans"]}
        prompts = {("prompt", name): one for name, one in record["prompts"].items()}
        summaries = {("all", "all positions"): record["overall"], **prompts, **spans}
        columns |= {key: one["positions"] for key, one in summaries.items() if key not in columns}
        cells = {
            key: {"mean": number(one["mean"]), "flips": percent(one["flips"], one["positions"])}
            for key, one in summaries.items()
        }
        rows.append({"arm": variant.name, "chance": variant.is_chance, "cells": cells})
    return {"columns": columns, "rows": rows}


def verification_groups(evidence: Evidence) -> list[dict[str, Any]]:
    """Every comparison of every arm: one row where it is identical, else one for each prompt."""
    groups = []
    for arm in (evidence.reference, *evidence.ranked):
        record = arm.verification
        rows = [row for one in record["comparisons"] for row in _comparison_rows(one)]
        groups.append({"arm": arm.name, "outcome": record["outcome"], "words": outcome_words(record), "rows": rows})
    return groups


def _comparison_rows(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    names = {"a": comparison["a"], "b": comparison["b"]}
    prompts = comparison["prompts"]
    if comparison["identical"]:
        counts = ", ".join(f"{one['prompt']} {one['positions']}" for one in prompts)
        return [{**names, "identical": True, "prompt": counts, "positions": sum(one["positions"] for one in prompts)}]
    return [{**names, "identical": one["differing"] == 0 and one["first_layer"] is None, **one} for one in prompts]


def dishonoured(evidence: Evidence) -> list[dict[str, Any]]:
    """Settings that the engine did not honour, of all arms."""
    return [
        {"arm": arm.name, **line}
        for arm in (evidence.reference, *evidence.ranked)
        for line in arm.manifest.get("asked") or []
        if not line["honoured"]
    ]


def nine_rows(evidence: Evidence) -> list[dict[str, Any]]:
    """The nine fields in their order, each with one entry, or one for each set of variants that share a value."""
    return [{"title": title, "entries": _entries(evidence, key) or [_missing()]} for key, title in NINE.items()]


def _missing() -> dict[str, Any]:
    return {"variants": [], "status": "NOT DISCLOSED", "value": "the sheet has no such field", "known": None}


def _entries(evidence: Evidence, key: str) -> list[dict[str, Any]]:
    entries = [{**one, "variants": []} for one in evidence.sheet["shared"] if one["key"] == key]
    own: dict[tuple[Any, ...], dict[str, Any]] = {}
    for sheet in evidence.sheet["sheets"]:
        refused = evidence.variants[sheet["variant"]].refused
        for one in sheet["fields"]:
            if one["key"] == key and not (refused and one["status"] == "not_applicable"):
                entry = own.setdefault((one["status"], one["value"], one["known"]), {**one, "variants": []})
                entry["variants"].append(sheet["variant"])
    return entries + list(own.values())


def shared_groups(evidence: Evidence) -> list[tuple[str, list[dict[str, Any]]]]:
    """The other fields with the same value for every variant, by group in the sheet's order."""
    return _by_group(one for one in evidence.sheet["shared"] if one["key"] not in NINE)


def variant_sheets(evidence: Evidence) -> list[dict[str, Any]]:
    """What differs, by variant: fields with a row each; those that do not apply for the same reason share one."""
    sheets = {one["variant"]: one["fields"] for one in evidence.sheet["sheets"]}
    found = []
    for variant in (one for one in evidence.ranked if one.name in sheets):
        fields = sheets[variant.name]
        absent: dict[str, list[str]] = {}
        for one in (one for one in fields if one["status"] == "not_applicable"):
            absent.setdefault(one["value"], []).append(one["title"])
        kept = [one for one in fields if one["status"] != "not_applicable"]
        silent = sum(one["status"] in ("NOT DISCLOSED", "unknown") for one in fields)
        found.append({"arm": variant.name, "n": len(fields), "silent": silent, "fields": kept, "absent": absent})
    return found


def _by_group(fields: Iterable[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in fields:
        groups.setdefault(one["group"], []).append(one)
    return list(groups.items())


def does_not_say(evidence: Evidence) -> str:
    """What the number does not say, from the sheet."""
    sheets = evidence.sheet["sheets"]
    fields = evidence.sheet["shared"] + [one for sheet in sheets for one in sheet["fields"]]
    return next((str(one["value"]) for one in fields if one["key"] == "does_not_say"), "NOT DISCLOSED")
