import hashlib

import numpy as np
import pytest

from kldaudit.digests import digest_weights, file_sha256, row_digests, text_sha256

WORD = 2**64


def splitmix64(k: int) -> int:
    """Output number k (from 0) of Vigna's splitmix64.c seeded with 0."""
    z = (k + 1) * 0x9E3779B97F4A7C15 % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return z ^ (z >> 31)


def digest_in_plain_integers(data: bytes) -> int:
    data += bytes(-len(data) % 8)
    total = 0
    for k in range(len(data) // 8):
        x = int.from_bytes(data[8 * k : 8 * k + 8], "little") * 0x9E3779B97F4A7C15 % WORD
        x ^= x >> 32
        total += x * (splitmix64(k) | 1)
    return total % WORD


def test_weights_are_the_published_outputs_of_splitmix64_made_odd():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
    assert digest_weights(5).tolist() == [one | 1 for one in published]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("columns", [1, 3, 4, 7, 8, 64, 257])
def test_row_digest_equals_the_documented_formula_in_plain_integers(dtype, columns):
    raw = np.random.default_rng(columns).bytes(5 * columns * np.dtype(dtype).itemsize)
    rows = np.frombuffer(raw, dtype).reshape(5, columns)
    assert row_digests(rows).tolist() == [digest_in_plain_integers(row.tobytes()) for row in rows]


def test_digest_of_one_word_by_hand():
    x = 0x9E3779B97F4A7C15
    x ^= x >> 32
    assert row_digests(np.array([[1]], np.uint64)).tolist() == [x * 0xE220A8397B1DCDAF % WORD]


def test_digest_of_zero_bits_is_zero():
    assert row_digests(np.zeros((2, 9), np.uint16)).tolist() == [0, 0]


def test_digests_are_uint64_one_per_row():
    digests = row_digests(np.ones((3, 5), np.float32))
    assert digests.dtype == np.uint64
    assert digests.shape == (3,)


def test_every_single_bit_flip_changes_the_digest():
    row = np.frombuffer(np.random.default_rng(1).bytes(2 * 33), np.uint16)[None]
    original = row_digests(row)[0]
    flipped = np.tile(row.view(np.uint8), (row.nbytes * 8, 1))
    for bit in range(row.nbytes * 8):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    digests = row_digests(flipped)
    assert (digests != original).all()
    assert len(set(digests.tolist())) == row.nbytes * 8


def test_swapping_two_words_changes_the_digest():
    assert row_digests(np.array([[1, 2]], np.uint64))[0] != row_digests(np.array([[2, 1]], np.uint64))[0]


def test_the_sum_does_not_depend_on_the_order_of_the_words():
    words = np.random.default_rng(2).integers(0, 2**63, 100, dtype=np.uint64)
    x = words * np.uint64(0x9E3779B97F4A7C15)
    terms = (x ^ (x >> np.uint64(32))) * digest_weights(100)
    order = np.random.default_rng(3).permutation(100)
    assert row_digests(words[None])[0] == terms[order].sum(dtype=np.uint64)


def test_a_row_is_padded_with_zero_bytes_to_whole_words():
    row = np.array([[1, 2, 3]], np.uint16)
    assert row_digests(row) == row_digests(np.array([[1, 2, 3, 0]], np.uint16))


def test_a_row_has_the_same_digest_in_any_company():
    rows = np.random.default_rng(4).integers(0, 2**16, (6, 21), dtype=np.uint16)
    assert row_digests(rows).tolist() == [int(row_digests(rows[i : i + 1])[0]) for i in range(6)]


def test_rows_that_are_not_contiguous_have_the_digests_of_their_copies():
    rows = np.random.default_rng(5).integers(0, 2**16, (8, 40), dtype=np.uint16)[::2, ::2]
    assert row_digests(rows).tolist() == row_digests(rows.copy()).tolist()


def test_negative_zero_and_zero_have_different_digests():
    assert row_digests(np.array([[0.0]], np.float32)) != row_digests(np.array([[-0.0]], np.float32))


def test_file_sha256_is_that_of_the_bytes(tmp_path):
    path = tmp_path / "abc"
    path.write_bytes(b"abc")
    assert file_sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_text_sha256_is_that_of_the_utf8_bytes():
    assert text_sha256("KL(P‖Q)") == hashlib.sha256(b"KL(P\xe2\x80\x96Q)").hexdigest()
