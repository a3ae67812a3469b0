import json
import math

import pytest
from pydantic import ValidationError

from kldaudit.errors import RecordError
from kldaudit.records import Record, digests_of, read_json, read_text, write_json, write_text


class Weather(Record):
    """A record to read and write."""

    place: str
    degrees: float


def test_a_record_written_and_read_again_is_equal(tmp_path):
    record = Weather(place="Zürich", degrees=0.1, parents={"station": "ab"})
    record.write(tmp_path / "weather.json")
    assert Weather.read(tmp_path / "weather.json") == record


def test_infinity_survives_writing_and_reading(tmp_path):
    Weather(place="sun", degrees=math.inf).write(tmp_path / "weather.json")
    assert Weather.read(tmp_path / "weather.json").degrees == math.inf


def test_a_written_record_is_standard_json_even_with_infinity(tmp_path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    Weather(place="sun", degrees=math.inf).write(tmp_path / "weather.json")
    content = json.loads((tmp_path / "weather.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert content["degrees"] == "Infinity"


def test_keys_on_disk_are_sorted_and_text_is_not_escaped(tmp_path):
    Weather(place="Zürich", degrees=1, parents={"b": "2", "a": "1"}).write(tmp_path / "weather.json")
    assert (tmp_path / "weather.json").read_text(encoding="utf-8") == (
        '{\n "degrees": 1.0,\n "parents": {\n  "a": "1",\n  "b": "2"\n },\n'
        ' "place": "Zürich",\n "schema_version": "1"\n}\n'
    )


def test_the_same_facts_give_the_same_bytes_in_any_order(tmp_path):
    Weather(place="x", degrees=1, parents={"b": "2", "a": "1"}).write(tmp_path / "one.json")
    Weather(parents={"a": "1", "b": "2"}, degrees=1, place="x").write(tmp_path / "two.json")
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()


def test_a_record_cannot_be_changed():
    record = Weather(place="x", degrees=1)
    with pytest.raises(ValidationError, match="frozen"):
        record.place = "y"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"place": "x", "degrees": 1, "humidity": 3}', "humidity: Extra inputs are not permitted"),
        ('{"place": "x"}', "degrees: Field required"),
        ('{"place": "x", "degrees": "warm"}', "degrees: Input should be a valid number"),
        ('{"place": "x", "degrees": 1, "schema_version": "2"}', "schema_version: Input should be '1'"),
        ('{"place": "x", ', "the top level: Invalid JSON"),
        ("", "the top level: Invalid JSON"),
        ("[]", "the top level: Input should be an object"),
    ],
)
def test_what_is_no_such_record_is_refused_with_the_reason(tmp_path, text, found):
    path = tmp_path / "weather.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError) as caught:
        Weather.read(path)
    assert f"found: {found}" in str(caught.value)
    assert f"where: {path}" in str(caught.value)


def test_a_missing_file_is_a_record_error(tmp_path):
    with pytest.raises(RecordError, match="No such file"):
        read_text(tmp_path / "nothing.json")


def test_bytes_that_are_no_utf8_are_a_record_error(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecordError, match="a readable UTF-8 text file"):
        read_text(tmp_path / "binary")


def test_broken_json_is_a_record_error_with_its_line(tmp_path):
    (tmp_path / "broken.json").write_text('{"a": 1,\n"b" 2}', encoding="utf-8")
    with pytest.raises(RecordError, match=r"broken\.json, line 2"):
        read_json(tmp_path / "broken.json")


def test_writing_makes_the_folder(tmp_path):
    write_json(tmp_path / "a" / "b" / "c.json", {"x": 1})
    assert read_json(tmp_path / "a" / "b" / "c.json") == {"x": 1}


def test_writing_replaces_the_old_file_and_leaves_nothing_else(tmp_path):
    write_text(tmp_path / "one.txt", "old")
    write_text(tmp_path / "one.txt", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]
    assert (tmp_path / "one.txt").read_text(encoding="utf-8") == "new"


def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(tmp_path):
    write_text(tmp_path / "one.txt", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "one.txt", "half \ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]
    assert (tmp_path / "one.txt").read_text(encoding="utf-8") == "old"


def test_digests_of_names_each_file_with_its_sha256(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert digests_of(one=tmp_path / "empty") == {"one": empty}
