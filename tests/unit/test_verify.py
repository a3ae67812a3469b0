import h5py
import numpy as np
import pytest

from kldaudit.capture_file import hdf5_type, write_refusal
from kldaudit.errors import CaptureFileError, MismatchError
from kldaudit.verify import Verification, ulp_distance, verify_arm, verify_files

POSITIONS = list(range(3, 48, 4))
"""Positions of a capture of twelve rows, one in four tokens."""


@pytest.fixture
def bits(logits, bits_of):
    return bits_of(logits, "bfloat16")


def with_change(bits, row, column=5, ulp=1):
    changed = bits.copy()
    changed[row, column] += ulp
    return changed


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [
        (0x3F80, 0x3F80, 0),  # 1 and 1
        (0x3F80, 0x3F81, 1),  # 1 and the next BF16 number
        (0x3F80, 0x3F7F, 1),  # 1 and the one before, across a power of two
        (0xBF80, 0xBF81, 1),  # the same, negative
        (0x0000, 0x8000, 0),  # +0 and -0
        (0x0001, 0x8001, 2),  # smallest positive and smallest negative
        (0x0000, 0x8001, 1),
        (0x8000, 0x0001, 1),
        (0x3F80, 0xBF80, 2 * 0x3F80),  # 1 and -1
        (0x7F7F, 0x7F80, 1),  # largest finite and infinity
        (0x7F80, 0xFF80, 2 * 0x7F80),  # infinity and -infinity
    ],
)
def test_ulp_distance_of_bfloat16_by_hand(a, b, distance):
    one, other = np.array([a], np.uint16), np.array([b], np.uint16)
    assert ulp_distance(one, other).tolist() == [distance]
    assert ulp_distance(other, one).tolist() == [distance]


def test_ulp_distance_of_float32_by_hand():
    a = np.array([1.0, -1.0, 0.0, 2.0], np.float32)
    b = np.array([np.nextafter(np.float32(1), np.float32(2)), 1.0, -0.0, 1.0], np.float32)
    assert ulp_distance(a.view(np.uint32), b.view(np.uint32)).tolist() == [1, 2 * 0x3F800000, 0, 2**23]


def test_ulp_distance_counts_the_numbers_between():
    order = np.concatenate([np.arange(0xFF80, 0x8000, -1), np.arange(0, 0x7F81)]).astype(np.uint16)
    steps = ulp_distance(order[1:], order[:-1])
    assert steps.tolist() == [1] * len(steps)


def test_captures_with_the_same_bits_are_identical(write_capture, bits):
    found = verify_files(write_capture("a.h5", bits), write_capture("b.h5", bits))
    assert found.identical
    assert [(one.prompt, one.positions, one.differing, one.max_ulp) for one in found.prompts] == [
        ("words", 12, 0, None)
    ]


def test_a_differing_bit_is_counted_and_placed(write_capture, bits):
    changed = with_change(with_change(bits, 4, ulp=3), 9, ulp=1)
    found = verify_files(write_capture("a.h5", bits), write_capture("b.h5", changed))
    assert not found.identical
    (one,) = found.prompts
    assert (one.differing, one.first_position, one.max_ulp) == (2, POSITIONS[4], 3)
    assert (one.first_layer, one.first_layer_position) == (None, None)


def test_zeros_of_other_sign_differ_at_no_distance(write_capture, bits):
    plus, minus = bits.copy(), bits.copy()
    plus[2, 0], minus[2, 0] = 0x0000, 0x8000
    found = verify_files(write_capture("a.h5", plus), write_capture("b.h5", minus))
    assert not found.identical
    assert (found.prompts[0].differing, found.prompts[0].max_ulp) == (1, 0)


def test_each_prompt_has_its_own_line(write_capture, bits):
    a = write_capture("a.h5", {"calls": bits, "words": bits})
    b = write_capture("b.h5", {"calls": bits, "words": with_change(bits, 0)})
    found = verify_files(a, b)
    assert [(one.prompt, one.differing) for one in found.prompts] == [("calls", 0), ("words", 1)]
    assert not found.identical


def test_the_first_layer_is_the_earliest_at_the_earliest_differing_position(write_capture, bits):
    layers = np.zeros((1, 4, 12), np.uint64)
    changed = layers.copy()
    changed[0, 2:, 6] = 1  # layers 2 and 3 at row 6
    changed[0, 0, 8] = 1  # layer 0, but later
    a = write_capture("a.h5", bits, layers=layers)
    b = write_capture("b.h5", with_change(bits, 8), layers=changed)
    (one,) = verify_files(a, b).prompts
    assert (one.first_layer, one.first_layer_position) == ("layers.2", POSITIONS[6])
    assert (one.differing, one.first_position) == (1, POSITIONS[8])


def test_a_layer_that_differs_under_equal_logits_is_a_difference(write_capture, bits):
    layers = np.zeros((1, 4, 12), np.uint64)
    changed = layers.copy()
    changed[0, 1, 3] = 1
    found = verify_files(write_capture("a.h5", bits, layers=layers), write_capture("b.h5", bits, layers=changed))
    assert not found.identical
    assert (found.prompts[0].differing, found.prompts[0].first_layer) == (0, "layers.1")


def test_launches_with_the_same_bits_are_identical(write_capture, bits):
    paths = [write_capture(f"launch{n}.h5", bits, launch=n, passes=2) for n in (1, 2)]
    found = verify_arm(paths)
    assert (found.outcome, found.arm, found.launches, found.passes) == ("identical", "reference", 2, 2)
    assert [(one.a, one.b, one.identical) for one in found.comparisons] == [
        ("launch 1, pass 1", "launch 1, pass 2", True),
        ("launch 2, pass 1", "launch 2, pass 2", True),
        ("launch 1", "launch 2", True),
    ]
    assert sorted(found.parents) == ["launch1", "launch2"]


def test_a_differing_launch_is_an_outcome(write_capture, bits):
    paths = [write_capture("launch1.h5", bits), write_capture("launch2.h5", with_change(bits, 7), launch=2)]
    found = verify_arm(paths)
    assert found.outcome == "differs"
    (comparison,) = found.comparisons
    assert (comparison.a, comparison.b, comparison.identical) == ("launch 1", "launch 2", False)
    assert comparison.prompts[0].first_position == POSITIONS[7]


def test_a_differing_pass_is_counted_and_placed(write_capture, bits):
    other = with_change(bits, 2, ulp=4)
    layers = np.zeros((2, 3, 12), np.uint64)
    layers[1, 1, 2] = 9
    path = write_capture("launch1.h5", bits, passes=2, changed={2: {2: other[2]}}, layers=layers)
    found = verify_arm([path])
    assert (found.outcome, found.launches, found.passes) == ("differs", 1, 2)
    (one,) = found.comparisons[0].prompts
    assert (one.differing, one.first_position, one.max_ulp) == (1, POSITIONS[2], 4)
    assert (one.first_layer, one.first_layer_position) == ("layers.1", POSITIONS[2])


def test_only_the_pass_that_differs_is_reported_as_differing(write_capture, bits):
    path = write_capture("launch1.h5", bits, passes=3, changed={3: {0: with_change(bits, 0)[0]}})
    found = verify_arm([path])
    assert [(one.b, one.identical) for one in found.comparisons] == [
        ("launch 1, pass 2", True),
        ("launch 1, pass 3", False),
    ]


def test_one_launch_with_one_pass_has_nothing_to_compare(write_capture, bits):
    found = verify_arm([write_capture("launch1.h5", bits)])
    assert (found.outcome, found.comparisons) == ("single", [])


def test_a_refused_arm_is_an_outcome_with_its_reason(tmp_path):
    paths = [tmp_path / "int8" / f"launch{n}.h5" for n in (1, 2)]
    paths[0].parent.mkdir()
    for path in paths:
        write_refusal(path, {"audit": "test", "arm": "int8", "launch": 1}, "no such kernel")
    found = verify_arm(paths)
    assert (found.arm, found.outcome, found.reason) == ("int8", "refused", "no such kernel")
    assert (found.launches, found.passes, found.comparisons) == (2, 0, [])


def test_an_arm_that_one_launch_refuses_differs(write_capture, bits, tmp_path):
    paths = [write_capture("launch1.h5", bits), tmp_path / "launch2.h5"]
    write_refusal(paths[1], {"audit": "test", "arm": "int8", "launch": 2}, "no such kernel")
    for order in (paths, paths[::-1]):
        found = verify_arm(order)
        assert (found.outcome, found.launches) == ("differs", 2)
        assert found.reason == "launch1 ran, another launch was refused: no such kernel"


def test_a_verification_written_and_read_again_is_equal(write_capture, bits, tmp_path):
    paths = [write_capture("launch1.h5", bits), write_capture("launch2.h5", with_change(bits, 7), launch=2)]
    found = verify_arm(paths)
    found.write(tmp_path / "verification.json")
    assert Verification.read(tmp_path / "verification.json") == found


def test_a_stored_bit_that_was_flipped_is_detected(write_capture, bits):
    path = write_capture("launch1.h5", bits)
    changed = with_change(bits, 5)
    with h5py.File(path, "r+") as file:
        dataset = file["prompts/words/logits"]
        dataset.id.write(h5py.h5s.ALL, h5py.h5s.ALL, changed, mtype=hdf5_type("bfloat16"))
    with pytest.raises(CaptureFileError, match="prompt words, row 5"):
        verify_arm([path])
    good = write_capture("good.h5", bits)
    for pair in ((path, good), (good, path)):
        with pytest.raises(CaptureFileError, match=r"launch1\.h5, prompt words, row 5"):
            verify_files(*pair)


def test_a_row_digest_that_was_changed_is_detected(write_capture, bits):
    path = write_capture("launch1.h5", bits)
    with h5py.File(path, "r+") as file:
        file["prompts/words/row_digest"][0, 11] += np.uint64(1)
    with pytest.raises(CaptureFileError, match="prompt words, row 11"):
        verify_arm([path])


def test_captures_of_different_prompts_are_refused(write_capture, bits):
    with pytest.raises(MismatchError, match=r"differ in their prompts[\s\S]*expected: \['words'\][\s\S]*'calls'"):
        verify_files(write_capture("a.h5", bits), write_capture("b.h5", {"calls": bits}))


def test_captures_of_different_vocabularies_are_refused(write_capture, bits):
    with pytest.raises(MismatchError, match="vocabulary size"):
        verify_files(write_capture("a.h5", bits), write_capture("b.h5", bits[:, :32]))


def test_captures_of_different_types_are_refused(write_capture, logits):
    with pytest.raises(MismatchError, match="logits dtype"):
        verify_files(write_capture("a.h5", logits), write_capture("b.h5", logits, dtype="float16"))


def test_captures_of_different_token_ids_are_refused(write_capture, bits):
    with pytest.raises(MismatchError, match="token ids of prompt words"):
        verify_files(write_capture("a.h5", bits), write_capture("b.h5", bits, token_ids=np.zeros(48)))


def test_captures_of_different_positions_are_refused(write_capture, bits):
    tokens = np.zeros(48)
    a = write_capture("a.h5", bits, token_ids=tokens)
    with pytest.raises(MismatchError, match="positions of prompt words"):
        verify_files(a, write_capture("b.h5", np.vstack([bits, bits]), token_ids=tokens, every=2))


def test_launches_with_different_numbers_of_passes_are_refused(write_capture, bits):
    paths = [write_capture("launch1.h5", bits, passes=2), write_capture("launch2.h5", bits, passes=1, launch=2)]
    with pytest.raises((MismatchError, CaptureFileError)):
        verify_arm(paths)


def test_captures_of_different_arms_are_no_launches_of_one(write_capture, bits):
    paths = [write_capture("launch1.h5", bits), write_capture("launch2.h5", bits, arm="int8", launch=2)]
    with pytest.raises(MismatchError, match="not launches of one arm"):
        verify_arm(paths)


def test_the_same_launch_twice_verifies_nothing(write_capture, bits):
    with pytest.raises(MismatchError, match="the same launch"):
        verify_arm([write_capture("launch1.h5", bits), write_capture("launch2.h5", bits)])
