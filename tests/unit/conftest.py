"""Small captures, written through the writer that the engine uses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kldaudit.capture_file import BITS, CaptureWriter
from kldaudit.digests import row_digests


def to_bits(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Raw bits of logits: those of floats rounded to ``dtype`` (nearest even); unsigned integers are bits already."""
    if values.dtype.kind == "u":
        return values.astype(BITS[dtype])
    if dtype == "bfloat16":
        wide = values.astype(np.float32).view(np.uint32).astype(np.uint64)
        rounded = (wide + 0x7FFF + ((wide >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype({"float16": np.float16, "float32": np.float32}[dtype]).view(BITS[dtype])


@pytest.fixture
def bits_of() -> Callable[[NDArray[Any], str], NDArray[Any]]:
    return to_bits


@pytest.fixture
def write_capture(tmp_path: Path) -> Callable[..., Path]:
    def write(
        name: str,
        logits: NDArray[Any] | dict[str, NDArray[Any]],
        *,
        dtype: str = "bfloat16",
        every: int = 4,
        arm: str = "reference",
        launch: int = 1,
        passes: int = 1,
        changed: dict[int, dict[int, NDArray[Any]]] | None = None,
        layers: NDArray[np.uint64] | None = None,
        token_ids: NDArray[Any] | None = None,
    ) -> Path:
        """Write a whole capture, one position in ``every`` tokens; ``changed`` is {pass: {row: logits}}."""
        prompts = logits if isinstance(logits, dict) else {"words": logits}
        bits = {prompt: to_bits(values, dtype) for prompt, values in prompts.items()}
        vocab_size = next(iter(bits.values())).shape[1]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        attributes = {
            "audit": "test",
            "arm": arm,
            "launch": launch,
            "vocab_size": vocab_size,
            "logits_dtype": dtype,
            "spec_sha256": "0" * 64,
        }
        writer = CaptureWriter(path, attributes)
        for prompt, rows in bits.items():
            tokens = np.arange(len(rows) * every) % vocab_size if token_ids is None else token_ids
            writer.add_prompt(prompt, tokens.astype(np.int32), np.arange(every - 1, len(rows) * every, every))
            writer.write_rows(writer.create_logits(f"prompts/{prompt}/logits", len(rows)), 0, rows)
            digests = np.tile(row_digests(rows), (passes, 1))
            for number, differing in (changed or {}).items():
                kept = np.array(sorted(differing), np.int64)
                other = np.stack([to_bits(differing[row], dtype) for row in kept])
                dataset = writer.create_logits(f"prompts/{prompt}/pass{number}/logits", len(kept))
                writer.write_rows(dataset, 0, other)
                writer.file[f"prompts/{prompt}/pass{number}"].create_dataset("rows", data=kept)
                digests[number - 1, kept] = row_digests(other)
            names = [] if layers is None else [f"layers.{index}" for index in range(layers.shape[1])]
            writer.write_digests(prompt, digests, layers, names)
        writer.finish()
        return path

    return write


@pytest.fixture
def logits() -> NDArray[np.float64]:
    """Logits of twelve positions over 64 tokens, about as wide as a model's."""
    return np.random.default_rng(7).normal(0, 4, (12, 64))
