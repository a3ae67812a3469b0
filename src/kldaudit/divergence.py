"""The step *divergence*: KL(reference‖variant) in nats, FP64, from the stored bits, and its statistics.

Arithmetic takes arrays; ``diverge`` reads the captures block by block, so memory is bounded by a block.
"""

from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kldaudit import METHOD_VERSION
from kldaudit.audit import DivergenceSettings
from kldaudit.capture_file import Capture, float_values, refusal
from kldaudit.errors import LogitsError, MismatchError
from kldaudit.history import PromptRecord, Span
from kldaudit.records import Frozen, Real, Record, digests_of

F64 = NDArray[np.float64]

QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
MIN_BEYOND = 5
"""A quantile is reported only if at least this many positions lie beyond it."""

BATCH = 32

COLUMNS = {
    "kl": "KL(reference‖variant), nats",
    "kl_reverse": "KL(variant‖reference), nats",
    "js": "Jensen-Shannon divergence, nats",
    "entropy_reference": "entropy of the reference, nats",
    "entropy_variant": "entropy of the variant, nats",
    "delta_p": "probability of the reference's top token: variant minus reference",
    "flip": "1 where the greedy tokens differ (ties: lowest token id)",
    "tie_reference": "1 where the reference's largest logit is shared by several tokens",
    "tie_variant": "1 where the variant's largest logit is shared by several tokens",
    "flip_at_tie": "1 where a flip is only the choice between tokens that both hold as largest",
    "top5_overlap": "share of the reference's five most probable tokens among the variant's five",
    "top10_overlap": "the same for ten",
}


def compare_rows(reference: F64, variant: F64) -> dict[str, F64]:
    """Compare next-token distributions row by row.

    Args:
        reference: logits, FP64 [n, vocab_size]; -inf stands for probability 0.
        variant: logits, FP64 [n, vocab_size].

    Returns:
        FP64 [n] for each name of COLUMNS. With P = softmax(reference) and Q = softmax(variant):
        KL(P‖Q) = Σ p (log p - log q); a term with p = 0 contributes 0, one with p > 0 and q = 0 makes the sum +inf.
        JS = ½ KL(P‖M) + ½ KL(Q‖M) with M = (P + Q) / 2 (Lin 1991). No clamping, no truncation, no epsilon.
    """
    log_p, log_q = _log_probs(reference), _log_probs(variant)
    p, q = np.exp(log_p), np.exp(log_q)
    log_m = _log_mean(log_p, log_q)
    top = reference.argmax(axis=1)
    top_variant = variant.argmax(axis=1)
    rows = np.arange(len(reference))
    flip = top != top_variant
    shared = (reference[rows, top_variant] == reference[rows, top]) | (variant[rows, top] == variant[rows, top_variant])
    return {
        "kl": _kl(p, log_p, log_q),
        "kl_reverse": _kl(q, log_q, log_p),
        "js": 0.5 * _kl(p, log_p, log_m) + 0.5 * _kl(q, log_q, log_m),
        "entropy_reference": _entropy(p, log_p),
        "entropy_variant": _entropy(q, log_q),
        "delta_p": q[rows, top] - p[rows, top],
        "flip": flip.astype(np.float64),
        "tie_reference": _tied(reference),
        "tie_variant": _tied(variant),
        "flip_at_tie": (flip & shared).astype(np.float64),
        "top5_overlap": _overlap(reference, variant, 5),
        "top10_overlap": _overlap(reference, variant, 10),
    }


def _log_probs(logits: F64) -> F64:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _kl(p: F64, log_p: F64, log_q: F64) -> F64:
    """Σ p (log p - log q), summed as p (log p - log q) - p + q: each term ≥ 0, so rounding cannot make it negative.

    Where p and q are close, q - p is p expm1(log q - log p), which does not cancel.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.where(p > 0, log_p - log_q, 0.0)
        close = p * (difference + np.expm1(-difference))
        apart = p * difference + (np.exp(log_q) - p)
        terms = np.where(p > 0, np.where(np.abs(difference) < 1, close, apart), np.exp(log_q))
    return np.asarray(np.maximum(terms, 0.0).sum(axis=1))


def _log_mean(log_p: F64, log_q: F64) -> F64:
    """Log of (p + q) / 2, from logs: exactly log p where the two are equal, finite where either is."""
    with np.errstate(invalid="ignore"):
        gap = np.where(log_p == log_q, 0.0, -np.abs(log_p - log_q))
    return np.asarray(np.maximum(log_p, log_q) + np.log1p(0.5 * np.expm1(gap)))


def _entropy(p: F64, log_p: F64) -> F64:
    return np.asarray(-np.where(p > 0, p * np.where(p > 0, log_p, 0.0), 0.0).sum(axis=1))


def _tied(logits: F64) -> F64:
    return np.asarray(((logits == logits.max(axis=1, keepdims=True)).sum(axis=1) > 1).astype(np.float64))


def _overlap(reference: F64, variant: F64, k: int) -> F64:
    """Share of common tokens among the k largest of each; equal logits are ordered by token id."""
    k = min(k, reference.shape[1])
    order_a = np.argsort(-reference, axis=1, kind="stable")[:, :k]
    order_b = np.argsort(-variant, axis=1, kind="stable")[:, :k]
    return np.asarray((order_a[:, :, None] == order_b[:, None, :]).any(axis=2).mean(axis=1))


class Quantile(Frozen):
    """A quantile, or why it is withheld."""

    q: float
    value: Real | None = Field(description="Linear interpolation between order statistics; null if withheld.")
    withheld: str | None = Field(None, description="Why it is withheld.")


class Interval(Frozen):
    """A confidence interval of a mean."""

    level: float
    low: float | None
    high: float | None
    method: str
    blocks: int
    resamples: int
    seed: int
    caution: str | None = Field(description="What limits it.")


class Summary(Frozen):
    """Statistics over a set of positions. Divergences in nats."""

    positions: int
    infinite: int = Field(description="Positions with KL = +inf; they make the mean +inf.")
    mean: Real
    minimum: Real
    maximum: Real
    quantiles: list[Quantile]
    mean_reverse: Real
    mean_js: Real
    rms_delta_p: float
    delta_p_quantiles: list[Quantile]
    entropy_reference: float
    entropy_variant: float
    flips: int
    flips_at_ties: int = Field(description="Flips that are only the choice between tokens tied for the largest logit.")
    ties_reference: int
    ties_variant: int
    top5_overlap: float
    top10_overlap: float


class Window(Frozen):
    """Consecutive positions of one prompt."""

    prompt: str
    start: int = Field(description="First token index.")
    stop: int = Field(description="Token index after the last.")
    positions: int
    mean: Real
    flips: int


class Chance(Frozen):
    """Agreement that independent picks with the same token frequencies would have."""

    agreement: float = Field(description="Observed top-1 agreement.")
    expected: float = Field(description="Σ over tokens of (share in the reference) · (share in the variant).")
    is_chance: bool = Field(description="Observed is below one half and below expected + 3 standard errors.")


class Divergence(Record):
    """The comparison of one variant with the reference (``divergence/{variant}.json``)."""

    method_version: str = METHOD_VERSION
    reference: str
    variant: str
    outcome: Literal["measured", "refused"]
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


def _quantile(values: F64, level: float) -> float:
    """Linear interpolation between order statistics, which may be +inf."""
    place = (len(values) - 1) * level
    below, above = np.sort(values)[[int(np.floor(place)), int(np.ceil(place))]]
    fraction = place - np.floor(place)
    return float(below if fraction == 0 or below == above else below + fraction * (above - below))


def quantiles(values: F64, levels: tuple[float, ...]) -> list[Quantile]:
    """Quantiles by linear interpolation; one with fewer than MIN_BEYOND positions beyond it is withheld."""
    found = []
    for level in levels:
        beyond = round(len(values) * min(level, 1 - level), 6)
        if beyond < MIN_BEYOND:
            reason = f"{beyond:.1f} positions lie beyond it, at least {MIN_BEYOND} are needed"
            found.append(Quantile(q=level, value=None, withheld=reason))
        else:
            found.append(Quantile(q=level, value=_quantile(values, level)))
    return found


def summarise(columns: dict[str, F64]) -> Summary:
    """Statistics of the columns that ``compare_rows`` gives, over all their positions."""
    kl, delta_p = columns["kl"], columns["delta_p"]
    return Summary(
        positions=len(kl),
        infinite=int(np.isinf(kl).sum()),
        mean=float(kl.mean()),
        minimum=float(kl.min()),
        maximum=float(kl.max()),
        quantiles=quantiles(kl, QUANTILES),
        mean_reverse=float(columns["kl_reverse"].mean()),
        mean_js=float(columns["js"].mean()),
        rms_delta_p=float(np.sqrt((delta_p**2).mean())),
        delta_p_quantiles=quantiles(delta_p, (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)),
        entropy_reference=float(columns["entropy_reference"].mean()),
        entropy_variant=float(columns["entropy_variant"].mean()),
        flips=int(columns["flip"].sum()),
        flips_at_ties=int(columns["flip_at_tie"].sum()),
        ties_reference=int(columns["tie_reference"].sum()),
        ties_variant=int(columns["tie_variant"].sum()),
        top5_overlap=float(columns["top5_overlap"].mean()),
        top10_overlap=float(columns["top10_overlap"].mean()),
    )


def window_length(n_tokens: int, every: int, settings: DivergenceSettings) -> int:
    """Tokens in a window: ``window_tokens``, or for a prompt with fewer than ``min_windows`` of them an equal share.

    A share is rounded up to whole sampling steps.
    """
    if n_tokens >= settings.window_tokens * settings.min_windows:
        return settings.window_tokens
    share = -(-n_tokens // settings.min_windows)
    return min(settings.window_tokens, -(-share // every) * every)


def bootstrap_mean(blocks: list[F64], settings: DivergenceSettings) -> Interval:
    """Percentile bootstrap of the mean over all positions, resampling whole blocks (windows) with replacement.

    Positions of one text are not independent, so blocks are drawn, not positions (Künsch 1989).
    """
    sums = np.array([block.sum() for block in blocks])
    counts = np.array([len(block) for block in blocks], np.float64)
    random = np.random.default_rng(settings.bootstrap_seed)
    drawn = random.integers(0, len(blocks), (settings.bootstrap_resamples, len(blocks)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    finite = bool(np.isfinite(sums).all()) and len(blocks) > 1
    low, high = np.quantile(means, (0.025, 0.975)) if finite else (None, None)
    caution = None if len(blocks) >= 20 else f"only {len(blocks)} blocks: the interval is too narrow"
    if len(blocks) < 2:
        caution = "one block: no interval"
    return Interval(
        level=0.95,
        low=None if low is None else float(low),
        high=None if high is None else float(high),
        method="percentile bootstrap over contiguous windows; says nothing about other texts",
        blocks=len(blocks),
        resamples=settings.bootstrap_resamples,
        seed=settings.bootstrap_seed,
        caution=caution,
    )


def chance_agreement(top_reference: NDArray[np.int64], top_variant: NDArray[np.int64]) -> Chance:
    """Is the top-1 agreement more than what independent picks would give?"""
    n = len(top_reference)
    size = int(max(top_reference.max(), top_variant.max())) + 1
    share_a = np.bincount(top_reference, minlength=size) / n
    share_b = np.bincount(top_variant, minlength=size) / n
    expected = float(share_a @ share_b)
    observed = float((top_reference == top_variant).mean())
    error = float(np.sqrt(max(expected * (1 - expected), 1 / n) / n))
    return Chance(agreement=observed, expected=expected, is_chance=observed < min(0.5, expected + 3 * error))


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


def compare_prompt(reference: Capture, variant: Capture, prompt: str) -> tuple[dict[str, F64], NDArray[np.int64]]:
    """Columns of one prompt, FP64 [n_positions] each, and both greedy tokens, int64 [2, n_positions]."""
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
    return {name: np.concatenate(values) for name, values in parts.items()}, np.concatenate(tops, axis=1)


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
    if reason is not None:
        record = _refused(reference_path, variant_path, reason)
        if positions_path is not None:
            _write_positions(positions_path, record, {}, {})
        return record
    spans = {one.prompt: one.spans for one in map(PromptRecord.read, prompt_paths or [])}
    with Capture(reference_path) as reference, Capture(variant_path) as variant:
        check_alignment(reference, variant)
        columns, tops, positions, windows, blocks, rules = {}, [], {}, [], [], []
        for prompt in reference.prompts:
            columns[prompt], top = compare_prompt(reference, variant, prompt)
            tops.append(top)
            positions[prompt] = reference.positions(prompt)
            n_tokens = len(reference.token_ids(prompt))
            every = int(positions[prompt][0]) + 1
            length = window_length(n_tokens, every, settings)
            rules.append(f"{prompt}: {length} tokens, {length // every} probes")
            for one, values in _windows(prompt, positions[prompt], columns[prompt], n_tokens, length):
                windows.append(one)
                blocks.append(values)
        noise = _noise_floor(reference, second_launch) if second_launch else None
        everything = _joined(columns)
        both = np.concatenate(tops, axis=1)
        record = Divergence(
            parents=digests_of(reference=reference_path, variant=variant_path)
            | (digests_of(second_launch=second_launch) if second_launch else {}),
            reference=reference.arm,
            variant=variant.arm,
            outcome="measured",
            vocab_size=reference.vocab_size,
            logits_dtype={"reference": reference.logits_dtype, "variant": variant.logits_dtype},
            every=every,
            excluded_positions=0,
            nonfinite_positions=0,
            overall=summarise(everything),
            interval=bootstrap_mean(blocks, settings),
            prompts={prompt: summarise(one) for prompt, one in columns.items()},
            spans=_by_span(columns, positions, spans),
            windows=windows,
            window_rule="; ".join(rules),
            noise_floor=noise,
            chance=chance_agreement(both[0], both[1]),
        )
    if positions_path is not None:
        _write_positions(positions_path, record, columns, positions)
    return record


def _windows(
    prompt: str, positions: NDArray[np.int64], columns: dict[str, F64], n_tokens: int, length: int
) -> list[tuple[Window, F64]]:
    found = []
    for start in range(0, n_tokens, length):
        inside = (positions >= start) & (positions < start + length)
        if inside.any():
            kl = columns["kl"][inside]
            window = Window(
                prompt=prompt,
                start=start,
                stop=min(start + length, n_tokens),
                positions=int(inside.sum()),
                mean=float(kl.mean()),
                flips=int(columns["flip"][inside].sum()),
            )
            found.append((window, kl))
    return found


def _joined(columns: dict[str, dict[str, F64]]) -> dict[str, F64]:
    return {name: np.concatenate([one[name] for one in columns.values()]) for name in COLUMNS}


def _by_span(
    columns: dict[str, dict[str, F64]], positions: dict[str, NDArray[np.int64]], spans: dict[str, list[Span]]
) -> dict[str, Summary]:
    chosen: dict[str, list[dict[str, F64]]] = {}
    for prompt, values in columns.items():
        for kind, mask in span_of(positions[prompt], spans.get(prompt, [])).items():
            if spans and mask.any():
                chosen.setdefault(kind, []).append({name: column[mask] for name, column in values.items()})
    return {
        kind: summarise({name: np.concatenate([one[name] for one in parts]) for name in COLUMNS})
        for kind, parts in chosen.items()
    }


def _noise_floor(reference: Capture, second_launch: Path) -> Summary:
    with Capture(second_launch) as second:
        check_alignment(reference, second)
        return summarise(_joined({p: compare_prompt(reference, second, p)[0] for p in reference.prompts}))


def _write_positions(
    path: Path, record: Divergence, columns: dict[str, dict[str, F64]], positions: dict[str, NDArray[np.int64]]
) -> None:
    """Every position's columns, FP64, as HDF5 (``divergence/{variant}.h5``)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with h5py.File(temporary, "w") as file:
        file.attrs.update({"format": "kldaudit-divergence", "format_version": "1.0", "method_version": METHOD_VERSION})
        file.attrs.update({"reference": record.reference, "variant": record.variant, "outcome": record.outcome})
        for prompt, values in columns.items():
            group = file.create_group(f"prompts/{prompt}")
            group.create_dataset("positions", data=positions[prompt])
            for name, column in values.items():
                group.create_dataset(name, data=column).attrs["meaning"] = COLUMNS[name]
    temporary.replace(path)
