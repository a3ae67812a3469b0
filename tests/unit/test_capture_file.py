import itertools
import os
import shutil
import struct
import subprocess
import sys
import time

import h5py
import hdf5plugin
import numpy as np
import pytest

from kldaudit.capture_file import (
    BITS,
    Capture,
    CaptureWriter,
    check_disk_space,
    float_values,
    hdf5_type,
    refusal,
    write_refusal,
)
from kldaudit.digests import row_digests
from kldaudit.errors import CaptureFileError

DTYPES = ("bfloat16", "float16", "float32")
ATTRIBUTES = {
    "audit": "test",
    "arm": "bf16",
    "launch": 3,
    "vocab_size": 64,
    "logits_dtype": "bfloat16",
    "spec_sha256": "ab" * 32,
}


pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
"""Random bits hold signalling NaN, of which NumPy warns when it widens them."""


def any_bits(dtype: str, rows: int = 12, columns: int = 64):
    """Random bits: all kinds of values, NaN with payloads and subnormal numbers among them."""
    return np.random.default_rng(0).integers(
        0, np.iinfo(BITS[dtype]).max, (rows, columns), dtype=BITS[dtype], endpoint=True
    )


def every_16_bits():
    return np.arange(2**16, dtype=np.uint16).reshape(64, 1024)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_read_are_the_bits_written(write_capture, dtype):
    written = any_bits(dtype)
    with Capture(write_capture("a.h5", written, dtype=dtype)) as capture:
        read = capture.bits("words", 0, 12)
    assert read.dtype == BITS[dtype]
    np.testing.assert_array_equal(read, written)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_each_of_the_65536_values_of_16_bits_survives(write_capture, dtype):
    with Capture(write_capture("a.h5", every_16_bits(), dtype=dtype)) as capture:
        np.testing.assert_array_equal(capture.bits("words", 0, 64), every_16_bits())


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_hdf5_reader_sees_the_numbers(write_capture, dtype):
    bits = every_16_bits() if dtype != "float32" else any_bits(dtype)
    with h5py.File(write_capture("a.h5", bits, dtype=dtype)) as file:
        seen = file["prompts/words/logits"][:]
    expected = float_values(bits, dtype)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(seen.astype(np.float64)[numbers], expected[numbers])
    assert np.isnan(seen[~numbers]).all()


def test_bfloat16_values_by_hand():
    bits = np.array([0x3F80, 0xBF80, 0x4049, 0x0001, 0x7F7F, 0x7F80, 0xFF80, 0x8000], np.uint16)
    expected = [1.0, -1.0, 3.140625, 2.0**-133, 255 * 2.0**120, np.inf, -np.inf, -0.0]
    assert float_values(bits, "bfloat16").tolist() == expected
    assert np.isnan(float_values(np.array([0x7FC0], np.uint16), "bfloat16"))[0]


def test_float16_values_by_hand():
    bits = np.array([0x3C00, 0x0001, 0x7BFF, 0xFC00], np.uint16)
    assert float_values(bits, "float16").tolist() == [1.0, 2.0**-24, 65504.0, -np.inf]


def test_float32_values_by_hand():
    bits = np.array([0x3F800000, 0x00000001, 0x40490FDB], np.uint32)
    assert float_values(bits, "float32").tolist() == [1.0, 2.0**-149, 13176795 / 2**22]


def shown_by(tool: str, *arguments: str) -> str:
    """What one of HDF5's own command-line tools shows of a file."""
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed (Debian package hdf5-tools)")
    plugins = {**os.environ, "HDF5_PLUGIN_PATH": hdf5plugin.PLUGIN_PATH}
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True, env=plugins).stdout


def test_h5dump_shows_bfloat16_as_a_floating_point_type(write_capture):
    path = write_capture("a.h5", any_bits("bfloat16"))
    shown = shown_by("h5dump", "-H", "-d", "/prompts/words/logits", str(path))
    assert "16-bit little-endian floating-point" in shown
    assert "( 12, 64 )" in shown


def test_h5dump_shows_the_numbers(write_capture):
    path = write_capture("a.h5", np.array([[0x3F80, 0xC020, 0x4049, 0xFF80]], np.uint16))
    shown = shown_by("h5dump", "-y", "-m", "%.8g", "-d", "/prompts/words/logits", str(path))
    assert "1, -2.5, 3.140625, -inf" in " ".join(shown.split())


def test_h5ls_shows_the_fields_of_bfloat16(write_capture):
    path = write_capture("a.h5", any_bits("bfloat16"))
    shown = " ".join(shown_by("h5ls", "-v", f"{path}/prompts/words/logits").split())
    assert "significant for 7 bits at bit 0, msb implied" in shown
    assert "exponent for 8 bits at bit 7, bias is 0x7f" in shown
    assert "sign bit at 15" in shown


def test_the_bfloat16_type_has_the_fields_of_bfloat16_in_the_file(write_capture):
    with h5py.File(write_capture("a.h5", any_bits("bfloat16"))) as file:
        stored = file["prompts/words/logits"].id.get_type()
    assert (stored.get_size(), stored.get_precision(), stored.get_ebias()) == (2, 16, 127)
    assert stored.get_fields() == (15, 7, 8, 0, 7)
    assert stored.get_order() == h5py.h5t.ORDER_LE
    assert stored.get_norm() == h5py.h5t.NORM_IMPLIED


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_types_are_the_ieee_ones(dtype):
    assert hdf5_type(dtype).equal({"float16": h5py.h5t.IEEE_F16LE, "float32": h5py.h5t.IEEE_F32LE}[dtype])


def test_a_chunk_is_a_row_compressed_with_bitshuffle(write_capture):
    with h5py.File(write_capture("a.h5", any_bits("bfloat16"))) as file:
        dataset = file["prompts/words/logits"]
        assert dataset.chunks == (1, 64)
        assert [dataset.id.get_create_plist().get_filter(i)[0] for i in range(1)] == [32008]


def test_root_attributes_are_those_of_the_format(write_capture):
    path = write_capture("a.h5", any_bits("float16"), dtype="float16", arm="int8", launch=2)
    with h5py.File(path) as file:
        assert dict(file.attrs) == {
            "format": "kldaudit-capture",
            "format_version": "1.0",
            "audit": "test",
            "arm": "int8",
            "launch": 2,
            "vocab_size": 64,
            "logits_dtype": "float16",
            "spec_sha256": "0" * 64,
            "complete": True,
        }


def test_datasets_have_the_types_of_the_format(write_capture):
    layers = np.zeros((2, 3, 12), np.uint64)
    with h5py.File(write_capture("a.h5", any_bits("bfloat16"), passes=2, layers=layers)) as file:
        group = file["prompts/words"]
        found = {name: (group[name].dtype.name, group[name].shape) for name in group if name != "logits"}
    assert found == {
        "token_ids": ("int32", (48,)),
        "positions": ("int64", (12,)),
        "row_digest": ("uint64", (2, 12)),
        "layer_digest": ("uint64", (2, 3, 12)),
    }


def test_a_capture_says_what_it_holds(write_capture):
    rows = any_bits("bfloat16")
    path = write_capture("a.h5", {"words": rows, "calls": rows[:5]}, arm="int8", launch=2)
    with Capture(path) as capture:
        assert (capture.arm, capture.launch, capture.vocab_size) == ("int8", 2, 64)
        assert (capture.logits_dtype, capture.spec_sha256) == ("bfloat16", "0" * 64)
        assert capture.prompts == ["calls", "words"]
        assert capture.token_ids("calls").tolist() == list(range(20))
        assert capture.positions("calls").tolist() == [3, 7, 11, 15, 19]
        assert capture.row_digest("calls").tolist() == [row_digests(rows[:5]).tolist()]


def test_layer_digests_are_read_with_the_names_in_their_order(write_capture):
    layers = np.arange(2 * 3 * 12, dtype=np.uint64).reshape(2, 3, 12)
    with Capture(write_capture("a.h5", any_bits("bfloat16"), passes=2, layers=layers)) as capture:
        names, read = capture.layers("words")
    assert names == ["layers.0", "layers.1", "layers.2"]
    np.testing.assert_array_equal(read, layers)


def test_a_capture_without_layer_digests_has_no_layers(write_capture):
    with Capture(write_capture("a.h5", any_bits("bfloat16"), passes=2)) as capture:
        names, read = capture.layers("words")
    assert names == []
    assert read.shape == (2, 0, 12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_differing_rows_of_a_later_pass_are_read_as_written(write_capture, dtype):
    rows, other = any_bits(dtype), any_bits(dtype)[::-1]
    path = write_capture("a.h5", rows, dtype=dtype, passes=3, changed={3: {2: other[2], 7: other[7]}})
    with Capture(path) as capture:
        kept, bits = capture.pass_bits("words", 3)
        np.testing.assert_array_equal(capture.bits("words", 0, 12), rows)
    assert kept.tolist() == [2, 7]
    np.testing.assert_array_equal(bits, other[[2, 7]])


def test_a_pass_that_did_not_differ_has_no_rows(write_capture):
    with Capture(write_capture("a.h5", any_bits("float32"), dtype="float32", passes=2)) as capture:
        kept, bits = capture.pass_bits("words", 2)
    assert kept.shape == (0,)
    assert (bits.shape, bits.dtype) == ((0, 64), np.uint32)


@pytest.mark.parametrize("rows", [1, 5, 12, 64])
def test_blocks_give_every_row_once_and_in_order(write_capture, rows):
    written = any_bits("bfloat16")
    with Capture(write_capture("a.h5", written)) as capture:
        blocks = list(capture.blocks("words", rows))
    assert [start for start, _ in blocks] == list(range(0, 12, rows))
    assert all(len(bits) <= rows for _, bits in blocks)
    np.testing.assert_array_equal(np.concatenate([bits for _, bits in blocks]), written)


def test_rows_written_in_pieces_are_the_rows_written_at_once(write_capture, tmp_path):
    rows = any_bits("bfloat16")
    writer = CaptureWriter(tmp_path / "pieces.h5", ATTRIBUTES)
    writer.add_prompt("words", np.arange(48), np.arange(3, 48, 4))
    dataset = writer.create_logits("prompts/words/logits", 12)
    for start, stop in itertools.pairwise([0, 1, 7, 12]):
        writer.write_rows(dataset, start, rows[start:stop])
    writer.write_digests("words", row_digests(rows)[None], None, [])
    writer.finish()
    with Capture(tmp_path / "pieces.h5") as capture:
        np.testing.assert_array_equal(capture.bits("words", 0, 12), rows)


def test_the_same_data_written_twice_gives_identical_bytes(write_capture):
    layers = np.arange(24, dtype=np.uint64).reshape(1, 2, 12)
    a = write_capture("a.h5", any_bits("bfloat16"), layers=layers)
    b = write_capture("b.h5", any_bits("bfloat16"), layers=layers)
    assert a.read_bytes() == b.read_bytes()


def test_a_capture_holds_no_trace_of_the_time_of_its_writing(write_capture):
    before = int(time.time())
    content = write_capture("a.h5", np.zeros((2, 64), np.uint16)).read_bytes()
    seconds = range(before, int(time.time()) + 1)
    assert [one for one in seconds if struct.pack("<I", one) in content] == []


def test_a_writer_that_never_finishes_leaves_a_file_that_is_refused(tmp_path):
    writer = CaptureWriter(tmp_path / "a.h5", ATTRIBUTES)
    writer.add_prompt("words", np.arange(48), np.arange(3, 48, 4))
    writer.write_rows(writer.create_logits("prompts/words/logits", 12), 0, any_bits("bfloat16"))
    writer.write_digests("words", row_digests(any_bits("bfloat16"))[None], None, [])
    writer.file.close()
    with pytest.raises(CaptureFileError, match="the capture is not complete"):
        Capture(tmp_path / "a.h5")


KILLED = """
import os, sys
from pathlib import Path
import numpy as np
from kldaudit.capture_file import CaptureWriter
attributes = {"audit": "a", "arm": "b", "launch": 1, "vocab_size": 64, "logits_dtype": "bfloat16", "spec_sha256": "c"}
writer = CaptureWriter(Path(sys.argv[1]), attributes)
writer.add_prompt("words", np.arange(48), np.arange(3, 48, 4))
writer.write_rows(writer.create_logits("prompts/words/logits", 12), 0, np.zeros((12, 64), np.uint16))
if sys.argv[2] == "flushed":
    writer.file.flush()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("state", ["flushed", "unflushed"])
def test_a_writer_killed_leaves_a_file_that_is_refused(tmp_path, state):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "a.h5", state], check=False)
    assert done.returncode == -9
    with pytest.raises(CaptureFileError):
        Capture(tmp_path / "a.h5")


def test_an_abandoned_capture_is_gone(tmp_path):
    writer = CaptureWriter(tmp_path / "a.h5", ATTRIBUTES)
    writer.add_prompt("words", np.arange(48), np.arange(3, 48, 4))
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_the_completion_mark_is_not_there_before_finishing(tmp_path):
    writer = CaptureWriter(tmp_path / "a.h5", ATTRIBUTES)
    assert "complete" not in writer.file.attrs
    writer.finish()
    with h5py.File(tmp_path / "a.h5") as file:
        assert bool(file.attrs["complete"]) is True


@pytest.mark.parametrize(
    "content",
    [b"", b"not HDF5 at all\n", b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" + bytes(4096)],
    ids=["empty", "text", "signature only", "signature and zeros"],
)
def test_a_file_that_is_no_hdf5_is_refused(tmp_path, content):
    (tmp_path / "a.h5").write_bytes(content)
    with pytest.raises(CaptureFileError, match="cannot open the capture"):
        Capture(tmp_path / "a.h5")


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999])
def test_a_truncated_capture_is_refused(write_capture, share):
    path = write_capture("a.h5", any_bits("bfloat16"))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CaptureFileError, match="cannot open the capture"):
        Capture(path)


def test_a_missing_capture_is_refused(tmp_path):
    with pytest.raises(CaptureFileError, match="cannot open the capture"):
        Capture(tmp_path / "a.h5")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(CaptureFileError, match="cannot open the capture"):
        Capture(tmp_path)


def test_a_damaged_chunk_is_refused_with_its_rows(write_capture):
    path = write_capture("a.h5", any_bits("bfloat16"))
    with h5py.File(path) as file:
        chunk = file["prompts/words/logits"].id.get_chunk_info(4)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset : chunk.byte_offset + chunk.size] = b"\xff" * chunk.size
    path.write_bytes(content)
    with Capture(path) as capture, pytest.raises(CaptureFileError, match="rows 3 to 5"):
        capture.bits("words", 3, 6)


def set_attribute(name, value):
    def change(file):
        file.attrs[name] = value

    return change


def remove_attribute(name):
    def change(file):
        del file.attrs[name]

    return change


def remove(name):
    def change(file):
        del file[name]

    return change


def replace(name, data):
    def change(file):
        del file[name]
        file[name] = data

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_attribute("format", "other"), "no capture that this version reads"),
        (remove_attribute("format"), "no capture that this version reads"),
        (set_attribute("format_version", "2.0"), "no capture that this version reads"),
        (set_attribute("format_version", "10.0"), "no capture that this version reads"),
        (set_attribute("complete", False), "the capture is not complete"),
        (remove_attribute("complete"), "the capture is not complete"),
        (remove_attribute("arm"), "wrong kind: arm"),
        (remove_attribute("spec_sha256"), "wrong kind: spec_sha256"),
        (remove("prompts"), "wrong kind: prompts"),
        (remove("prompts/words"), "wrong kind: prompts"),
        (set_attribute("logits_dtype", "int8"), "unknown logits dtype"),
        (remove("prompts/words/logits"), "missing: logits"),
        (remove("prompts/words/row_digest"), "missing: row_digest"),
        (set_attribute("vocab_size", 63), "of the wrong shape"),
        (replace("prompts/words/positions", np.arange(11)), "not every nth"),
        (replace("prompts/words/row_digest", np.zeros((1, 11), np.uint64)), "row digests of 11 positions"),
    ],
)
def test_a_capture_that_breaks_a_rule_of_the_format_is_refused(write_capture, change, message):
    path = write_capture("a.h5", any_bits("bfloat16"))
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(CaptureFileError, match=message):
        Capture(path)


def test_a_later_minor_version_of_the_format_is_read(write_capture):
    path = write_capture("a.h5", any_bits("bfloat16"))
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = "1.7"
    with Capture(path) as capture:
        assert capture.prompts == ["words"]


def test_logits_of_another_type_than_the_capture_says_are_refused(write_capture):
    path = write_capture("a.h5", any_bits("bfloat16"))
    with h5py.File(path, "r+") as file:
        replace("prompts/words/logits", np.full((12, 64), 0.1, np.float32))(file)
    with pytest.raises(CaptureFileError):
        Capture(path)


def test_what_stands_in_place_of_a_refused_arm_says_why(tmp_path):
    write_refusal(tmp_path / "a.h5", {"audit": "test", "arm": "int8"}, "no such kernel")
    assert refusal(tmp_path / "a.h5") == "no such kernel"
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]


def test_a_refused_arm_is_no_capture(tmp_path):
    write_refusal(tmp_path / "a.h5", {"audit": "test", "arm": "int8"}, "no such kernel")
    with pytest.raises(CaptureFileError) as caught:
        Capture(tmp_path / "a.h5")
    assert "arm int8" in str(caught.value)
    assert "found: refused: no such kernel" in str(caught.value)


def test_a_capture_was_not_refused(write_capture):
    assert refusal(write_capture("a.h5", any_bits("bfloat16"))) is None


def test_asking_a_text_file_for_a_refusal_is_a_capture_file_error(tmp_path):
    (tmp_path / "a.h5").write_text("text", encoding="utf-8")
    with pytest.raises(CaptureFileError):
        refusal(tmp_path / "a.h5")


def test_more_than_the_disk_has_is_refused(tmp_path):
    with pytest.raises(CaptureFileError, match="not enough disk space"):
        check_disk_space(tmp_path, 10**18)


def test_what_the_disk_has_is_accepted(tmp_path):
    check_disk_space(tmp_path, 1)


def test_a_prompt_that_is_no_group_is_refused(write_capture):
    path = write_capture("a.h5", any_bits("bfloat16"))
    with h5py.File(path, "r+") as file:
        replace("prompts/words", np.zeros(3))(file)
    with pytest.raises(CaptureFileError, match="prompt words of the capture is incomplete"):
        Capture(path)


@pytest.mark.parametrize(
    "change",
    [
        set_attribute("launch", "first"),
        replace("prompts", np.zeros(3)),
        replace("prompts/words/row_digest", np.zeros(12, np.uint64)),
        replace("prompts/words/positions", np.arange(12) + 0.5),
        replace("prompts/words/positions", np.arange(100, 112)),
    ],
    ids=["launch is a text", "prompts is a dataset", "one-dimensional digests", "fractions", "beyond the tokens"],
)
def test_a_capture_with_a_part_of_the_wrong_kind_is_refused(write_capture, change):
    path = write_capture("a.h5", any_bits("bfloat16"))
    with h5py.File(path, "r+") as file:
        change(file)
    with pytest.raises(CaptureFileError):
        Capture(path)
