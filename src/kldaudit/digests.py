"""Digests: SHA-256 of files and folders, and the order-independent 64-bit digest of a row of bits.

The row digest (capture-format.md, "Row digest") is defined on the row's bytes, padded with zero bytes to a
multiple of 8 and read as little-endian 64-bit words v[k], all arithmetic modulo 2**64::

    x = v[k] * 0x9E3779B97F4A7C15;  x = x ^ (x >> 32);  digest = sum over k of x * weight[k]
    weight[k] = splitmix64(k) | 1

Each step is a bijection of the word, so changing one word (a fortiori one bit) always changes the digest, and
the sum does not depend on its order, so any device and any number of threads gives the same digest.
"""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def text_sha256(text: str) -> str:
    """SHA-256 of a text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest_weights(words: int) -> NDArray[np.uint64]:
    """Odd 64-bit weights of the row digest.

    Args:
        words: number of 64-bit words in a row.

    Returns:
        uint64 [words]: ``splitmix64(k) | 1`` for k = 0, 1, …

    Source: Steele, Lea & Flood, "Fast splittable pseudorandom number generators" (2014), mixing function as
    in Vigna's splitmix64.c.
    """
    state = (np.arange(1, words + 1, dtype=np.uint64)) * np.uint64(GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) | np.uint64(1)


def row_digests(rows: NDArray[np.generic]) -> NDArray[np.uint64]:
    """Row digest of each row's raw bytes.

    Args:
        rows: [n_rows, n_columns] of any fixed-size dtype.

    Returns:
        uint64 [n_rows].
    """
    width = rows.shape[1] * rows.dtype.itemsize
    data = np.ascontiguousarray(rows).view(np.uint8).reshape(rows.shape[0], width)
    if width % 8:
        data = np.pad(data, ((0, 0), (0, -width % 8)))
    words = np.ascontiguousarray(data).view("<u8")
    mixed = words * np.uint64(GOLDEN)
    mixed ^= mixed >> np.uint64(32)
    return np.asarray((mixed * digest_weights(words.shape[1])).sum(axis=1, dtype=np.uint64))
