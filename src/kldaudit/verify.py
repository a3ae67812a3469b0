"""The step *verify*: does the same arm give the same bits again?

Passes are compared within a launch, launches with each other: first by the digests of the logits, then, where these
differ, by the bits themselves. A difference is an outcome, never an exception.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from kldaudit.capture_file import Capture, check_launches, refusal
from kldaudit.errors import MismatchError
from kldaudit.records import Frozen, Record, digests_of


class Difference(Frozen):
    """Where two replays of one prompt part."""

    prompt: str
    positions: int = Field(description="Stored positions.")
    differing: int = Field(description="Positions whose logits differ in at least one bit.")
    first_position: int | None = Field(description="First differing position (index of the token); null if none.")
    first_layer: str | None = Field(
        description="Layer, in the order in which they ran, that differs first where any does first; "
        "null if none or not recorded."
    )
    layers: int = Field(description="Layers whose digests were compared; 0 if they have other names or were not taken.")
    first_layer_position: int | None = Field(description="That earliest position.")
    max_ulp: int | None = Field(
        description="Largest difference of a logit in units of the last place of its dtype; null if not computed."
    )


class Comparison(Frozen):
    """Two replays of the same history."""

    a: str
    b: str
    identical: bool
    prompts: list[Difference]


class Verification(Record):
    """The outcome for one arm (``verification/{arm}.json``)."""

    arm: str
    outcome: Literal["identical", "differs", "refused", "single"] = Field(
        description="single: one launch and one pass, nothing to compare."
    )
    reason: str | None = Field(None, description="Why the engine refused the arm, or some of its launches.")
    launches: int
    passes: int
    comparisons: list[Comparison]


def ulp_distance(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int64]:
    """Distance in units in the last place between floats given as raw bits (uint16 or uint32).

    Sign-magnitude bits are mapped to integers in the order of the values, so that -0 and +0 are at distance 0.
    """
    sign = np.int64(1) << np.int64(8 * a.dtype.itemsize - 1)

    def ordered(bits: NDArray[Any]) -> NDArray[np.int64]:
        wide = bits.astype(np.int64)
        return np.where(wide >= sign, sign - wide, wide)

    return np.asarray(np.abs(ordered(a) - ordered(b)))


def verify_arm(paths: list[Path]) -> Verification:
    """Compare all passes and launches of one arm with the first pass of its first launch."""
    reasons = {path: refusal(path) for path in paths}
    if any(reasons.values()):
        ran = [path.stem for path, reason in reasons.items() if reason is None]
        reason = next(reason for reason in reasons.values() if reason is not None)
        return Verification(
            parents=_parents(paths),
            arm=paths[0].parent.name,
            outcome="differs" if ran else "refused",
            reason=f"{', '.join(ran)} ran, another launch was refused: {reason}" if ran else reason,
            launches=len(paths),
            passes=0,
            comparisons=[],
        )
    comparisons = []
    with Capture(paths[0]) as first:
        passes = len(first.row_digest(first.prompts[0]))
        for path in paths:
            with Capture(path) as other:
                if path != paths[0]:
                    check_launches(first, other)
                _check_comparable(first, other, passes=True)
                check_integrity(other)
                name = f"launch {other.launch}"
                comparisons += [_passes(other, number, name) for number in range(2, passes + 1)]
                if path != paths[0]:
                    comparisons.append(compare_captures(first, other, f"launch {first.launch}", name))
        same = all(comparison.identical for comparison in comparisons)
        outcome: Literal["identical", "differs", "single"] = "identical" if same else "differs"
        return Verification(
            parents=_parents(paths),
            arm=first.arm,
            outcome=outcome if comparisons else "single",
            launches=len(paths),
            passes=passes,
            comparisons=comparisons,
        )


def verify_files(a: Path, b: Path) -> Comparison:
    """Compare the first passes of two captures of the same prompts, of whatever arms."""
    with Capture(a) as first, Capture(b) as second:
        _check_comparable(first, second)
        check_integrity(first)
        check_integrity(second)
        return compare_captures(first, second, str(a), str(b))


def check_integrity(capture: Capture) -> None:
    """Read all stored logits once: ``blocks`` refuses bits that are not those that the engine computed."""
    for prompt in capture.prompts:
        for _ in capture.blocks(prompt):
            pass


def compare_captures(a: Capture, b: Capture, name_a: str, name_b: str) -> Comparison:
    """Compare the first passes of two captures with the same prompts."""
    differences = []
    for prompt in a.prompts:
        digests_a, digests_b = a.row_digest(prompt)[0], b.row_digest(prompt)[0]
        rows = np.flatnonzero(digests_a != digests_b)
        ulp = [int(ulp_distance(a.bits(prompt, r, r + 1), b.bits(prompt, r, r + 1)).max()) for r in rows.tolist()]
        positions = a.positions(prompt)
        (names, layers_a), (names_b, layers_b) = a.layers(prompt), b.layers(prompt)
        names = names if names == names_b else []
        first_layer = _first_layer(names, layers_a[0], layers_b[0], positions) if names else (None, None)
        differences.append(_difference(prompt, positions, rows, len(names), first_layer, max(ulp, default=None)))
    return _comparison(name_a, name_b, differences)


def _passes(capture: Capture, number: int, name: str) -> Comparison:
    """Compare pass ``number`` of a capture with its first pass."""
    differences = []
    for prompt in capture.prompts:
        rows, bits = capture.pass_bits(prompt, number)
        ulp = [
            int(ulp_distance(capture.bits(prompt, row, row + 1)[0], other).max())
            for row, other in zip(rows.tolist(), bits, strict=True)
        ]
        names, layers = capture.layers(prompt)
        positions = capture.positions(prompt)
        first_layer = _first_layer(names, layers[0], layers[number - 1], positions)
        differences.append(_difference(prompt, positions, rows, len(names), first_layer, max(ulp, default=None)))
    return _comparison(f"{name}, pass 1", f"{name}, pass {number}", differences)


def _first_layer(
    names: list[str], a: NDArray[Any], b: NDArray[Any], positions: NDArray[np.int64]
) -> tuple[str | None, int | None]:
    """First layer, at the earliest position where any layer differs; digests are uint64 [n_layers, n_positions]."""
    differs = a != b
    columns = np.flatnonzero(differs.any(axis=0))
    if not len(columns):
        return None, None
    return names[int(np.argmax(differs[:, columns[0]]))], int(positions[columns[0]])


def _difference(
    prompt: str,
    positions: NDArray[np.int64],
    rows: NDArray[np.int64],
    layers: int,
    first_layer: tuple[str | None, int | None],
    max_ulp: int | None,
) -> Difference:
    return Difference(
        prompt=prompt,
        positions=len(positions),
        differing=len(rows),
        first_position=int(positions[rows[0]]) if len(rows) else None,
        layers=layers,
        first_layer=first_layer[0],
        first_layer_position=first_layer[1],
        max_ulp=max_ulp,
    )


def _comparison(a: str, b: str, differences: list[Difference]) -> Comparison:
    same = all(one.differing == 0 and one.first_layer is None for one in differences)
    return Comparison(a=a, b=b, identical=same, prompts=differences)


def _check_comparable(a: Capture, b: Capture, *, passes: bool = False) -> None:
    a_is, b_is = f"{a.path}", f"{b.path}"
    facts = [
        ("prompts", a.prompts, b.prompts),
        ("vocabulary size", a.vocab_size, b.vocab_size),
        ("logits dtype", a.logits_dtype, b.logits_dtype),
    ]
    for prompt in a.prompts if a.prompts == b.prompts else []:
        facts.append((f"token ids of prompt {prompt}", a.token_ids(prompt).tolist(), b.token_ids(prompt).tolist()))
        if passes:
            numbers = len(a.row_digest(prompt)), len(b.row_digest(prompt))
            facts.append((f"number of passes of prompt {prompt}", *numbers))
            facts.append((f"layers of prompt {prompt}", a.layers(prompt)[0], b.layers(prompt)[0]))
        facts.append((f"positions of prompt {prompt}", a.positions(prompt).tolist(), b.positions(prompt).tolist()))
    for name, one, other in facts:
        if one != other:
            raise MismatchError(
                f"the captures differ in their {name}",
                where=f"{a_is} and {b_is}",
                expected=_short(one),
                found=_short(other),
                do="compare captures of the same prompts and vocabulary",
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:60]} … ({len(value)} in all)"  # type: ignore[arg-type]


def _parents(paths: list[Path]) -> dict[str, str]:
    return digests_of(**{path.stem: path for path in paths})
