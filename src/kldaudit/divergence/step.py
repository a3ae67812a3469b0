"""Compare the captures of a variant and of the reference, block by block."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kldaudit import METHOD_VERSION
from kldaudit.audit import DivergenceSettings
from kldaudit.capture_file import Capture, check_launches, float_values, refusal
from kldaudit.divergence.rows import COLUMNS, F64, compare_rows
from kldaudit.divergence.statistics import (
    Chance,
    Interval,
    Summary,
    Window,
    bootstrap_mean,
    chance_agreement,
    summarise,
    window_length,
    windows,
)
from kldaudit.errors import LogitsError, MismatchError
from kldaudit.history import PromptRecord, Span
from kldaudit.records import Record, digests_of, write_bytes

BATCH = 32


class Divergence(Record):
    """The comparison of one variant with the reference (``divergence/{variant}.json``)."""

    method_version: str = METHOD_VERSION
    reference: str
    variant: str
    outcome: Literal["measured", "refused"]
    positions_sha256: str | None = Field(None, description="SHA-256 of the file with every position's figures.")
    reason: str | None = Field(None, description="Why the engine refused the variant.")
    direction: str = "KL(reference‖variant)"
    unit: str = "nats"
    vocab_size: int | None = None
    logits_dtype: dict[str, str] = Field(default_factory=dict)
    every: int | None = Field(None, description="Tokens between stored positions.")
    excluded_positions: int | None = Field(None, description="Stored positions left out of the figures.")
    nonfinite_positions: int | None = Field(None, description="Positions with NaN or +inf logits.")
    overall: Summary | None = None
    interval: Interval | None = None
    prompts: dict[str, Summary] = Field(default_factory=dict)
    spans: dict[str, Summary] = Field(default_factory=dict, description="By the span that the predicted token is in.")
    windows: list[Window] = Field(default_factory=list)
    window_rule: str | None = None
    noise_floor: Summary | None = Field(None, description="The reference's second launch against its first.")
    chance: Chance | None = None


def check_alignment(reference: Capture, variant: Capture) -> None:
    """Refuse captures of different prompts, positions or vocabularies."""
    facts: list[tuple[str, Any, Any]] = [
        ("vocabulary size", reference.vocab_size, variant.vocab_size),
        ("prompts", reference.prompts, variant.prompts),
    ]
    for prompt in reference.prompts:
        if prompt in variant.prompts:
            same_tokens = np.array_equal(reference.token_ids(prompt), variant.token_ids(prompt))
            same_positions = np.array_equal(reference.positions(prompt), variant.positions(prompt))
            facts.append((f"token ids of prompt {prompt}", True, same_tokens))
            facts.append((f"positions of prompt {prompt}", True, same_positions))
    for name, expected, found in facts:
        if expected != found:
            raise MismatchError(
                f"the captures differ in their {name}",
                where=f"{reference.path} and {variant.path}",
                expected="the same" if expected is True else str(expected),
                found="other ones" if found is False else str(found),
                do="compare captures of the same prompts, positions and vocabulary",
            )


def _spans(records: list[PromptRecord], capture: Capture) -> dict[str, list[Span]]:
    """Spans of each prompt; a record of other tokens than the captured ones is refused, its spans would be wrong."""
    if records and sorted(record.prompt for record in records) != capture.prompts:
        raise MismatchError(
            "the prompt records are not those of the captures",
            where=str(capture.path),
            expected=f"one record for each of the prompts {', '.join(capture.prompts)}",
            found=", ".join(record.prompt for record in records),
            do="give one record for each prompt, or none",
        )
    for record in records:
        if capture.token_ids(record.prompt).tolist() != record.token_ids:
            raise MismatchError(
                f"prompt record {record.prompt} is not of the prompt that was captured",
                where=str(capture.path),
                expected="the captured token ids",
                found="other token ids",
                do="give the prompt records that the captures were made from",
            )
    return {record.prompt: record.spans for record in records}


def _check_rows(logits: F64, capture: Capture, prompt: str, start: int) -> None:
    bad = np.isnan(logits).any(axis=1) | np.isposinf(logits).any(axis=1) | np.isneginf(logits).all(axis=1)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        kind = "NaN" if np.isnan(logits[row]).any() else "+inf" if np.isposinf(logits[row]).any() else "only -inf"
        raise LogitsError(
            "a row of logits is no distribution",
            where=f"{capture.path}, prompt {prompt}, position {capture.positions(prompt)[start + row]}",
            expected="finite logits, or -inf for tokens that cannot come",
            found=kind,
            do="find out why the engine gave this; no figure is made from such a capture",
        )


@dataclass(frozen=True)
class PromptComparison:
    """One prompt's comparison, position by position."""

    prompt: str
    n_tokens: int
    positions: NDArray[np.int64]
    columns: dict[str, F64]
    tops: NDArray[np.int64]

    @property
    def every(self) -> int:
        """Tokens between stored positions; the first one is every - 1."""
        return int(self.positions[0]) + 1


def compare_prompt(reference: Capture, variant: Capture, prompt: str) -> PromptComparison:
    """Compare one prompt: columns FP64 [n_positions] each, greedy tokens of both arms int64 [2, n_positions]."""
    parts: dict[str, list[F64]] = {name: [] for name in COLUMNS}
    tops = []
    for start, bits in reference.blocks(prompt, BATCH):
        a = float_values(bits, reference.logits_dtype)
        b = float_values(variant.bits(prompt, start, start + len(bits)), variant.logits_dtype)
        _check_rows(a, reference, prompt, start)
        _check_rows(b, variant, prompt, start)
        for name, values in compare_rows(a, b).items():
            parts[name].append(values)
        tops.append(np.stack([a.argmax(axis=1), b.argmax(axis=1)]))
    return PromptComparison(
        prompt=prompt,
        n_tokens=len(reference.token_ids(prompt)),
        positions=reference.positions(prompt),
        columns={name: np.concatenate(values) for name, values in parts.items()},
        tops=np.concatenate(tops, axis=1),
    )


def span_of(positions: NDArray[np.int64], spans: list[Span]) -> dict[str, NDArray[np.bool_]]:
    """Masks, bool [n_positions], of the positions whose predicted token (position + 1) lies in each kind of span."""
    predicted = positions + 1
    masks = {}
    for kind in ("tool_call", "generated", "tool_result"):
        inside = np.zeros(len(positions), np.bool_)
        for span in (one for one in spans if one.kind == kind):
            inside |= (predicted >= span.start) & (predicted < span.end)
        masks[kind] = inside
    masks["not_tool_call"] = ~masks["tool_call"]
    return masks


def _refused(reference: Path, variant: Path, reason: str) -> Divergence:
    with h5py.File(variant, "r") as file, Capture(reference) as first:
        return Divergence(
            parents=digests_of(reference=reference, variant=variant),
            reference=first.arm,
            variant=str(file.attrs.get("arm", variant.parent.name)),
            outcome="refused",
            reason=reason,
        )


def diverge(
    reference_path: Path,
    variant_path: Path,
    settings: DivergenceSettings,
    *,
    second_launch: Path | None = None,
    prompt_paths: list[Path] | None = None,
    positions_path: Path | None = None,
) -> Divergence:
    """Compare a variant's capture with the reference's.

    Args:
        reference_path: capture of the reference.
        variant_path: capture of the variant.
        settings: windows and bootstrap.
        second_launch: another launch of the reference, for the noise floor.
        prompt_paths: prompt records, for the spans.
        positions_path: HDF5 file to be written with every position's columns.

    Raises:
        MismatchError: the captures are of different prompts, positions or vocabularies.
        LogitsError: a row is no distribution.
    """
    reason = refusal(variant_path)
    comparisons: list[PromptComparison] = []
    if reason is not None:
        record = _refused(reference_path, variant_path, reason)
    else:
        records = [PromptRecord.read(path) for path in prompt_paths or []]
        with Capture(reference_path) as reference, Capture(variant_path) as variant:
            check_alignment(reference, variant)
            spans = _spans(records, reference)
            parents = digests_of(reference=reference_path, variant=variant_path)
            comparisons = [compare_prompt(reference, variant, prompt) for prompt in reference.prompts]
            facts = {
                "reference": reference.arm,
                "variant": variant.arm,
                "vocab_size": reference.vocab_size,
                "logits_dtype": {"reference": reference.logits_dtype, "variant": variant.logits_dtype},
            }
            if second_launch is not None:
                facts["noise_floor"] = _noise_floor(reference, second_launch)
                parents |= digests_of(second_launch=second_launch)
        record = _measured(facts, parents, comparisons, spans, settings)
    if positions_path is None:
        return record
    content = _positions_file(record, comparisons)
    write_bytes(positions_path, content)
    return record.model_copy(update={"positions_sha256": hashlib.sha256(content).hexdigest()})


def _measured(
    facts: dict[str, Any],
    parents: dict[str, str],
    comparisons: list[PromptComparison],
    spans: dict[str, list[Span]],
    settings: DivergenceSettings,
) -> Divergence:
    lengths = {one.prompt: window_length(one.n_tokens, one.every, settings) for one in comparisons}
    cut = [
        pair
        for one in comparisons
        for pair in windows(one.prompt, one.positions, one.columns, one.n_tokens, lengths[one.prompt])
    ]
    tops = np.concatenate([one.tops for one in comparisons], axis=1)
    every = comparisons[0].every
    return Divergence(
        parents=parents,
        outcome="measured",
        every=every,
        excluded_positions=0,  # none is ever left out
        nonfinite_positions=0,  # _check_rows refuses a capture that has one
        overall=summarise(_joined([one.columns for one in comparisons])),
        interval=bootstrap_mean([values for _, values in cut], settings),
        prompts={one.prompt: summarise(one.columns) for one in comparisons},
        spans=_by_span(comparisons, spans),
        windows=[window for window, _ in cut],
        window_rule="; ".join(f"{name}: {n} tokens, {n // every} probes" for name, n in lengths.items()),
        chance=chance_agreement(tops[0], tops[1]),
        **facts,
    )


def _joined(parts: list[dict[str, F64]]) -> dict[str, F64]:
    return {name: np.concatenate([part[name] for part in parts]) for name in COLUMNS}


def _by_span(comparisons: list[PromptComparison], spans: dict[str, list[Span]]) -> dict[str, Summary]:
    chosen: dict[str, list[dict[str, F64]]] = {}
    for one in comparisons if spans else []:
        for kind, mask in span_of(one.positions, spans.get(one.prompt, [])).items():
            if mask.any():
                chosen.setdefault(kind, []).append({name: column[mask] for name, column in one.columns.items()})
    return {kind: summarise(_joined(parts)) for kind, parts in chosen.items()}


def _noise_floor(reference: Capture, second_launch: Path) -> Summary:
    with Capture(second_launch) as second:
        check_launches(reference, second)
        check_alignment(reference, second)
        return summarise(_joined([compare_prompt(reference, second, prompt).columns for prompt in reference.prompts]))


def _positions_file(record: Divergence, comparisons: list[PromptComparison]) -> bytes:
    """Every position's columns, FP64, as HDF5 (``divergence/{variant}.h5``); made in memory, it is small."""
    content = io.BytesIO()
    with h5py.File(content, "w") as file:
        file.attrs.update({"format": "kldaudit-divergence", "format_version": "1.0", "method_version": METHOD_VERSION})
        file.attrs.update({"reference": record.reference, "variant": record.variant, "outcome": record.outcome})
        for one in comparisons:
            group = file.create_group(f"prompts/{one.prompt}")
            group.create_dataset("positions", data=one.positions)
            for name, column in one.columns.items():
                group.create_dataset(name, data=column).attrs["meaning"] = COLUMNS[name]
    return content.getvalue()
