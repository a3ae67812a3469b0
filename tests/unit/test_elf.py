"""Against readelf, on the libraries that are here."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from kldaudit.manifest.elf import is_elf, newest, read_elf


def libraries() -> list[Path]:
    site = Path(sysconfig.get_path("purelib"))
    system = [Path("/lib/x86_64-linux-gnu") / name for name in ("libc.so.6", "libm.so.6", "libgcc_s.so.1", "libz.so.1")]
    return [path for path in system if path.exists()] + sorted(site.rglob("*.so"))[:20] + sorted(site.rglob("*.so.*"))


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf is not installed")
@pytest.mark.parametrize("path", libraries(), ids=lambda path: path.name)
def test_name_and_symbol_versions_are_those_that_readelf_shows(path):
    shown = subprocess.run(["readelf", "-dVW", path], capture_output=True, text=True, check=True).stdout
    soname = re.search(r"\(SONAME\)\s+Library soname: \[(.*)\]", shown)
    definitions = shown.partition("Version definition section")[2].partition("Version needs section")[0]
    entries = re.findall(r"Rev: \d+\s+Flags: (.*?)\s+Index: \d+\s+Cnt: \d+\s+Name: (\S+)", definitions)
    found = read_elf(path)
    assert found.soname == (soname[1] if soname else None)
    assert found.versions == [name for flags, name in entries if "BASE" not in flags]


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "a.so").write_text("INPUT(libc.so.6)")
    assert not is_elf(tmp_path / "a.so")
    with pytest.raises(ValueError, match="not a 64-bit"):
        read_elf(tmp_path / "a.so")


@pytest.mark.parametrize("length", [64, 200, 1000])
def test_a_file_cut_off_before_its_segments_is_damaged(tmp_path, length):
    content = Path("/lib/x86_64-linux-gnu/libz.so.1").resolve().read_bytes()[:length]
    (tmp_path / "a.so").write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        read_elf(tmp_path / "a.so")


def test_the_newest_version_of_each_family():
    versions = ["GLIBC_2.2.5", "GLIBC_2.34", "GLIBC_2.9", "GLIBC_PRIVATE", "GOMP_1.0", "GOMP_5.0.1", "OMP_5.0"]
    assert newest(versions) == ["GLIBC_2.34", "GLIBC_PRIVATE", "GOMP_5.0.1", "OMP_5.0"]
