"""Statistics over positions: summary, quantiles, windows, interval, chance."""

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kldaudit.audit import DivergenceSettings
from kldaudit.divergence.rows import F64
from kldaudit.records import Frozen, Real

QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
MIN_BEYOND = 5
"""A quantile is reported only if at least this many positions lie beyond it."""


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


def windows(
    prompt: str, positions: NDArray[np.int64], columns: dict[str, F64], n_tokens: int, length: int
) -> list[tuple[Window, F64]]:
    """Cut one prompt into windows of ``length`` tokens: each window, and the KL of its positions."""
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
