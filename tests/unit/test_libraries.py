import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kldaudit.manifest.libraries import loaded_libraries, mapped, processes, stray_files
from kldaudit.manifest.packages import Owners


@pytest.fixture(scope="module")
def owners():
    return Owners()


@pytest.fixture
def library(tmp_path):
    """A copy of a small shared object that belongs to nobody."""
    copy = tmp_path / "libcopy.so.1.2.3"
    shutil.copy(os.path.realpath("/lib/x86_64-linux-gnu/libz.so.1"), copy)
    return copy


@pytest.fixture
def process(library):
    """A child that has the library mapped."""
    script = f"import ctypes; ctypes.CDLL({str(library)!r}); print('loaded', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "loaded\n"
    yield child
    child.communicate("")


def test_children_are_among_the_processes(process):
    assert {os.getpid(), process.pid} <= set(processes())


def test_what_a_child_has_mapped_is_listed_with_its_hash(process, library, owners):
    found = {one.path: one for one in loaded_libraries(None, owners)}
    one = found[str(library)]
    assert one.sha256 == hashlib.sha256(library.read_bytes()).hexdigest()
    assert (one.owner, one.as_packaged, one.soname, one.version) == ("none", None, "libz.so.1", "1.2.3")


def test_a_library_that_was_deleted_after_it_was_mapped_says_so(process, library, owners):
    library.unlink()
    found = [one for one in loaded_libraries(None, owners) if one.path.startswith(str(library))]
    assert [one.sha256 for one in found] == ["unknown: the file was deleted after it was mapped"]


def test_the_list_is_the_one_of_the_kernel(owners):
    lines = Path(f"/proc/{os.getpid()}/maps").read_text().splitlines()
    shared = {match[0] for line in lines if " r-xp " in line and (match := re.search(r"/\S.*$", line))}
    assert set(mapped([os.getpid()])) == shared


def test_a_library_of_a_package_is_as_packaged(owners):
    import pydantic_core

    extension = Path(pydantic_core._pydantic_core.__file__)
    one = next(one for one in loaded_libraries(None, owners) if one.path.endswith(extension.name))
    assert one.owner == f"python:pydantic_core=={pydantic_core.__version__}"
    assert one.as_packaged is True
    assert one.path.startswith("{environment}/")


def test_a_library_that_is_not_what_its_package_installed_is_flagged(process, library):
    class Stated(Owners):
        def of(self, path):
            return ("python:zlib==1", f"sha256:{'0' * 64}") if path == library else super().of(path)

    one = next(one for one in loaded_libraries(None, Stated()) if one.path == str(library))
    assert one.as_packaged is False


def test_a_stray_shared_object_is_found_and_others_are_not(tmp_path, owners, library):
    folder = tmp_path / "inner"
    folder.mkdir()
    shutil.copy(library, folder / "planted.so")
    (folder / "script.so").write_text("INPUT(libc.so.6)")
    (folder / "link.so").symlink_to("planted.so")
    (folder / "text.txt").write_text("so")
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    found = stray_files(str(folder), owners)
    assert [(one.path, one.sha256) for one in found] == [(str(folder / "planted.so"), digest)]


def test_a_folder_without_stray_files_says_so(tmp_path, owners):
    assert stray_files(str(tmp_path), owners) == "none: packages list every shared object there"


def test_this_environment_has_no_shared_object_of_no_package(owners):
    assert stray_files(sys.prefix, owners) == "none: packages list every shared object there"
