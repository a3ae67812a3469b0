import hashlib
import json
import os

from kldaudit.manifest.hashing import Hashes


def test_a_known_file_is_not_read_again(tmp_path):
    file, memory = tmp_path / "a", tmp_path / "memory.json"
    file.write_bytes(b"one")
    hashes = Hashes(memory)
    assert hashes.sha256(file) == hashlib.sha256(b"one").hexdigest()
    hashes.keep()
    known = json.loads(memory.read_text())
    memory.write_text(json.dumps(dict.fromkeys(known, "remembered")))
    assert Hashes(memory).sha256(file) == "remembered"


def test_a_file_changed_behind_its_time_and_size_is_read_again(tmp_path):
    file, memory = tmp_path / "a", tmp_path / "memory.json"
    file.write_bytes(b"one")
    stat = file.stat()
    hashes = Hashes(memory)
    hashes.sha256(file)
    hashes.keep()
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert Hashes(memory).sha256(file) == hashlib.sha256(b"two").hexdigest()


def test_a_damaged_memory_is_an_empty_one(tmp_path):
    file, memory = tmp_path / "a", tmp_path / "memory.json"
    file.write_bytes(b"one")
    for content in ("", "[1]", "{", '"text"'):
        memory.write_text(content)
        assert Hashes(memory).sha256(file) == hashlib.sha256(b"one").hexdigest()


def test_without_a_memory_nothing_is_kept(tmp_path):
    Hashes(None).keep()
    assert list(tmp_path.iterdir()) == []
