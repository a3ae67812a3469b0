import io
import json
import tarfile

import pytest

from kldaudit.errors import EngineError
from kldaudit.image.base import Bootstrap, _compare, _versions, read_lock
from kldaudit.image.docker import without_index
from kldaudit.image.normalise import normalise_tar, timestamp
from kldaudit.image.workspace import PREFIX, workspace

EPOCH = 1_796_083_200


def tar(path, mtime, owner, names=("a", "b/c")):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as file:
        for name in names:
            member = tarfile.TarInfo(name)
            member.mtime, member.uname, member.size = mtime, owner, len(name)
            member.pax_headers = {"mtime": f"{mtime}.123456", "SCHILY.xattr.user.x": "kept"}
            file.addfile(member, io.BytesIO(name.encode()))
        link = tarfile.TarInfo("d")
        link.type, link.linkname, link.mtime = tarfile.SYMTYPE, "a", mtime
        file.addfile(link)


def normalised(source, target):
    with source.open("rb") as file:
        return normalise_tar(file, target, EPOCH)


def test_the_same_files_at_another_time_of_another_owner_give_the_same_tar(tmp_path):
    tar(tmp_path / "x.tar", EPOCH + 5, "ada")
    tar(tmp_path / "y.tar", EPOCH + 99, "root")
    assert normalised(tmp_path / "x.tar", tmp_path / "x") == normalised(tmp_path / "y.tar", tmp_path / "y")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


def test_content_links_attributes_and_older_times_stay(tmp_path):
    tar(tmp_path / "x.tar", EPOCH - 7, "ada")
    normalised(tmp_path / "x.tar", tmp_path / "x")
    with tarfile.open(tmp_path / "x") as file:
        assert file.getnames() == ["a", "b/c", "d"]
        assert file.extractfile("b/c").read() == b"b/c"
        assert {one.mtime for one in file} == {EPOCH - 7}
        assert file.getmember("d").linkname == "a"
        assert file.getmember("a").pax_headers["SCHILY.xattr.user.x"] == "kept"


def test_a_normalised_tar_stays_as_it_is(tmp_path):
    tar(tmp_path / "x.tar", EPOCH + 5, "ada")
    once = normalised(tmp_path / "x.tar", tmp_path / "x")
    assert normalised(tmp_path / "x", tmp_path / "y") == once


def test_an_epoch_as_an_image_writes_it():
    assert timestamp(EPOCH) == "2026-12-01T00:00:00Z"
    assert Bootstrap(suite="s", snapshot="20261201T000000Z", include=[]).epoch == EPOCH


def test_packages_and_versions_are_read_from_dpkgs_status():
    status = io.BytesIO(b"Package: b\nVersion: 2\n\nPackage: a\nStatus: installed\nVersion: 1:1\n")
    assert _versions(status) == {"a": "1:1", "b": "2"}


@pytest.fixture
def wanted():
    return Bootstrap(suite="s", snapshot="20261201T000000Z", include=[], packages={"a": "1", "b": "1"}, sha256="11")


def test_the_locked_base_is_as_locked(wanted):
    assert _compare(wanted, "system", "11", {"a": "1", "b": "1"}).endswith("from the system's mirror, 2 packages, "
                                                                           "tar sha256:11: as locked")  # fmt: skip


def test_another_base_from_the_systems_mirror_is_told_with_its_packages(wanted):
    found = _compare(wanted, "system", "22", {"a": "2", "c": "1"})
    assert found.endswith("NOT AS LOCKED (3 of 3 packages differ: a 2 for 1, b missing for 1, c 1 for none)")


def test_another_base_from_the_snapshot_is_refused(wanted):
    with pytest.raises(EngineError, match=r"(?s)not the locked one.*sha256:11.*sha256:22; 1 of 2 packages differ: a 2"):
        _compare(wanted, "snapshot", "22", {"a": "2", "b": "1"})


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"pull": "debian:12"},
        {
            "pull": f"debian@sha256:{'0' * 64}",
            "bootstrap": {"suite": "s", "snapshot": "20261201T000000Z", "include": []},
        },
        {"bootstrap": {"suite": "s", "snapshot": "yesterday", "include": []}},
    ],
)
def test_a_lock_of_a_base_that_says_too_little_or_too_much_is_refused(tmp_path, content):
    (tmp_path / "base.json").write_text(json.dumps(content))
    with pytest.raises(EngineError, match="the base's lock is not valid"):
        read_lock(tmp_path / "base.json")


def test_a_lock_goes_into_the_image_without_the_indexes_that_it_names(tmp_path):
    (tmp_path / "lock.txt").write_text("--extra-index-url https://x\ntorch==1 \\\n    --hash=sha256:11\n")
    assert without_index(tmp_path / "lock.txt") == "torch==1 \\\n    --hash=sha256:11\n"


def test_a_workspace_is_removed_also_after_an_error_and_what_a_killed_build_left_is_swept(tmp_path):
    (tmp_path / f"{PREFIX}999999999").mkdir()
    (tmp_path / f"{PREFIX}1").mkdir()  # of a process that lives

    def build():
        with workspace(tmp_path) as folder:
            (folder / "half").write_text("made")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        build()
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}1"]
