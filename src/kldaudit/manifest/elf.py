"""What an ELF file says of itself: its name and the versions of symbols that it defines.

Source: System V ABI, "Dynamic Section"; Linux Standard Base, "Symbol Versioning".
"""

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path

PT_LOAD, PT_DYNAMIC = 1, 2
DT_STRTAB, DT_SONAME, DT_VERDEF, DT_VERDEFNUM = 5, 14, 0x6FFFFFFC, 0x6FFFFFFD
BASE_DEFINITION = 1
"""Flag of the definition that names the file itself."""


@dataclass(frozen=True)
class Elf:
    """A shared object's own name and the symbol versions that it defines."""

    soname: str | None
    versions: list[str]


def is_elf(path: Path) -> bool:
    """Whether a file begins as an ELF file does."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def read_elf(path: Path) -> Elf:
    """Read a 64-bit little-endian shared object.

    Raises:
        ValueError: it is none, or is damaged.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a 64-bit little-endian ELF file")
        try:
            return _read(data)
        except (struct.error, IndexError) as error:
            raise ValueError(f"damaged: {error}") from error


def _read(data: mmap.mmap) -> Elf:
    offset, size, count = (
        struct.unpack_from("<Q", data, 32)[0],
        *struct.unpack_from("<HH", data, 54),
    )
    headers = [struct.unpack_from("<IIQQQQQQ", data, offset + index * size) for index in range(count)]
    loads = [(one[3], one[2], one[5]) for one in headers if one[0] == PT_LOAD]

    def place(address: int) -> int:
        for start, at, length in loads:
            if start <= address < start + length:
                return int(address - start + at)
        raise IndexError(f"address {address:#x} is in no segment")

    tags: dict[int, int] = {}
    for one in headers:
        if one[0] == PT_DYNAMIC:
            for index in range(one[5] // 16):
                tag, value = struct.unpack_from("<QQ", data, one[2] + 16 * index)
                tags.setdefault(tag, value)
    if DT_STRTAB not in tags:
        return Elf(None, [])
    strings = place(tags[DT_STRTAB])

    def text(index: int) -> str:
        return data[strings + index : data.find(b"\0", strings + index)].decode(errors="replace")

    soname = text(tags[DT_SONAME]) if DT_SONAME in tags else None
    versions = []
    at = place(tags[DT_VERDEF]) if DT_VERDEF in tags else 0
    for _ in range(tags.get(DT_VERDEFNUM, 0)):
        _, flags, _, _, _, auxiliary, following = struct.unpack_from("<HHHHIII", data, at)
        if not flags & BASE_DEFINITION:
            versions.append(text(struct.unpack_from("<I", data, at + auxiliary)[0]))
        at += following
    return Elf(soname, versions)


def newest(versions: list[str]) -> list[str]:
    """Of each family of symbol versions (GLIBC, GOMP, …) the highest, sorted."""
    families: dict[str, tuple[list[int], str]] = {}
    for version in versions:
        found = re.fullmatch(r"(.*?)[_-]?(\d+(?:\.\d+)*)", version)
        family, numbers = (found[1], [int(part) for part in found[2].split(".")]) if found else (version, [])
        families[family] = max(families.get(family, (numbers, version)), (numbers, version))
    return sorted(version for _, version in families.values())
