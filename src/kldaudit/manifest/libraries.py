"""Loaded, not merely installed: every shared object that the engine's processes have mapped; and stray ones."""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from kldaudit.manifest.elf import is_elf, newest, read_elf
from kldaudit.manifest.hashing import Hashes
from kldaudit.manifest.packages import Owners, portable_path
from kldaudit.manifest.record import Library, StrayFile

SHARED_OBJECT = re.compile(r"\.so(\.|$)")
VERSION = re.compile(r"\.so\.(\d[\w.]*)$|-(\d[\d.]*)\.so$")
DELETED = " (deleted)"


def processes() -> list[int]:
    """This process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it ended meanwhile
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [os.getpid()]
    while waiting:
        one = waiting.pop()
        found.append(one)
        waiting += children.get(one, [])
    return sorted(found)


def mapped(pids: list[int]) -> list[str]:
    """Paths of the files that processes have mapped executable, sorted; a deleted one keeps the kernel's mark."""
    paths = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue  # it ended meanwhile
        for line in lines:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and "x" in fields[1] and fields[5].startswith("/"):
                paths.add(fields[5])
    return sorted(paths)


def loaded_libraries(memory: Path | None, owners: Owners) -> list[Library] | str:
    """Every shared object and program that the engine's processes have mapped, sorted by path.

    Args:
        memory: file that remembers hashes between runs, or None.
        owners: who owns which file.
    """
    try:
        paths = mapped(processes())
    except OSError as error:
        return f"unknown: /proc cannot be read: {error}"
    hashes = Hashes(memory)
    found = [_library(path, hashes, owners) for path in paths]
    hashes.keep()
    return sorted((one for one in found if one is not None), key=lambda one: one.path)


def _library(path: str, hashes: Hashes, owners: Owners) -> Library | None:
    shown = portable_path(path)
    if path.endswith(DELETED):
        return _unread(shown, "the file was deleted after it was mapped")
    file = Path(path)
    try:
        if not is_elf(file):
            return None
        sha256 = hashes.sha256(file)
    except OSError as error:
        return _unread(shown, str(error.strerror))
    owner, stated = owners.of(Path(os.path.realpath(path)))
    try:
        elf = read_elf(file)
        soname, versions = elf.soname, newest(elf.versions)
    except ValueError:
        soname, versions = None, []
    version = VERSION.search(file.name)
    return Library(
        path=shown,
        sha256=sha256,
        owner=owner,
        as_packaged=_as_packaged(file, sha256, stated),
        soname=soname,
        version=(version[1] or version[2]) if version else None,
        symbol_versions=versions,
    )


def _unread(path: str, reason: str) -> Library:
    return Library(path=path, sha256=f"unknown: {reason}", owner="none", as_packaged=None, soname=None, version=None)


def _as_packaged(file: Path, sha256: str, stated: str | None) -> bool | None:
    if stated is None:
        return None
    kind, _, value = stated.partition(":")
    if kind == "md5":
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == value
    return sha256 == value


def stray_files(root: str, owners: Owners) -> list[StrayFile] | str:
    """Shared objects that no package lists.

    Args:
        root: folder to look in: an image's whole root, or a virtual environment.
        owners: who owns which file.
    """
    hashes = Hashes(None)
    found = []
    for path in _shared_objects(root):
        real = os.path.realpath(path)
        if owners.of(Path(real))[0] == "none" and is_elf(Path(real)):
            found.append(StrayFile(path=portable_path(path), sha256=hashes.sha256(Path(real))))
    return sorted(found, key=lambda one: one.path) or "none: packages list every shared object there"


def _shared_objects(root: str) -> Iterator[str]:
    """Paths of files below a folder that are named as shared objects; other file systems and links are left out."""
    device = Path(root).stat().st_dev
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue  # not readable: not loadable either
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if entry.stat(follow_symlinks=False).st_dev == device:
                    waiting.append(entry.path)
            elif SHARED_OBJECT.search(entry.name) and entry.is_file(follow_symlinks=False):
                yield entry.path
