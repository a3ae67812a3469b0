import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import kldaudit
from kldaudit.manifest.packages import Owners, _origin, debian_packages, python_packages

LISTING = """
import json
from kldaudit.manifest.packages import python_packages
print(json.dumps({one.name: [one.version, one.record_sha256] for one in python_packages()}))
"""

RECORDS = {
    "Plain": "weather/a.py,sha256=x,1\nweather/b.py,sha256=y,2\n",
    "Changed": "weather/a.py,sha256=z,1\nweather/b.py,sha256=y,2\n",
    "Installed": "../../../bin/weather,sha256=z,9\n"
    "weather/b.py,sha256=y,2\n"
    "weather-1.0.dist-info/INSTALLER,sha256=i,4\n"
    "weather-1.0.dist-info/REQUESTED,sha256=i,0\n"
    "weather-1.0.dist-info/direct_url.json,sha256=i,7\n"
    "weather-1.0.dist-info/RECORD,,\n"
    "weather/__pycache__/a.cpython-311.pyc,,\n"
    "weather/a.py,sha256=x,1\n",
    "Bare": None,
}
"""Distributions to install, by what their RECORD says."""


@pytest.fixture(scope="module")
def listed(tmp_path_factory):
    """Version and RECORD digest of each package of a virtual environment that holds RECORDS and nothing else."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    site = next((folder / "lib").glob("python3*")) / "site-packages"
    for name, record in RECORDS.items():
        information = site / f"{name}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        if record is not None:
            (information / "RECORD").write_text(record, encoding="utf-8")
    libraries = os.pathsep.join([str(Path(kldaudit.__file__).parents[1]), sysconfig.get_path("purelib")])
    command = [str(folder / "bin" / "python"), "-c", LISTING]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": libraries})
    return json.loads(done.stdout)


def test_python_packages_are_those_that_pip_lists():
    command = [sys.executable, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    expected = sorted((one["name"].lower(), one["version"]) for one in json.loads(done.stdout))
    assert sorted((one.name, one.version) for one in python_packages()) == expected


def test_what_can_be_imported_from_elsewhere_is_listed_too(listed):
    assert {"bare", "changed", "installed", "plain"} < set(listed)
    assert "pydantic" in listed  # by PYTHONPATH


def test_of_two_versions_the_one_that_would_be_imported_is_listed(tmp_path, monkeypatch):
    for folder, version in (("first", "2.0"), ("second", "1.0")):
        information = tmp_path / folder / f"twin-{version}.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Twin\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    assert [one.version for one in python_packages() if one.name == "twin"] == ["1.0"]  # the last one prepended


def test_copies_that_a_package_carries_are_not_listed(tmp_path, monkeypatch):
    information = tmp_path / "_vendor" / "carried-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: Carried\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "_vendor"))
    assert "carried" not in {one.name for one in python_packages()}


@pytest.mark.parametrize(
    ("direct_url", "expected"),
    [
        (None, None),
        (
            '{"url": "https://example.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}',
            "https://example.org/a.git at commit c0ffee",
        ),
        (
            '{"url": "https://me:pw@example.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}',
            "withheld: looks like a secret at commit c0ffee",
        ),
        ('{"url": "file:///home/ada/a", "dir_info": {"editable": true}}', "a local folder"),
        (
            '{"url": "file:///tmp/a.whl", "archive_info": {"hashes": {"sha256": "11"}}}',
            "a local file, sha256:11",
        ),
        ("nonsense", "unknown: direct_url.json is not readable: "),
    ],
)
def test_the_origin_of_a_package_that_came_from_no_index(direct_url, expected):
    found = _origin(direct_url)
    assert found == expected or str(found).startswith(str(expected))


def test_every_python_package_has_the_digest_of_its_record_or_says_why_not():
    for one in python_packages():
        assert re.fullmatch(r"[0-9a-f]{64}|unknown: the distribution has no RECORD", one.record_sha256), one.name


def test_a_package_without_a_record_says_so(listed):
    assert listed["bare"] == ["1.0", "unknown: the distribution has no RECORD"]


def test_a_record_digest_is_the_sha256_of_the_sorted_lines(listed):
    lines = b"weather/a.py,sha256=x,1\nweather/b.py,sha256=y,2"
    assert listed["plain"] == ["1.0", hashlib.sha256(lines).hexdigest()]


def test_a_changed_file_changes_the_record_digest(listed):
    assert listed["changed"][1] != listed["plain"][1]


def test_the_record_digest_does_not_depend_on_how_the_package_was_installed(listed):
    assert listed["installed"][1] == listed["plain"][1]


def test_debian_packages_are_those_that_dpkg_lists():
    if shutil.which("dpkg") is None:
        assert str(debian_packages()).startswith("unknown: dpkg-query failed")
        return
    columns = {"COLUMNS": "400", "LC_ALL": "C", "PATH": os.environ["PATH"]}
    shown = subprocess.run(["dpkg", "-l"], capture_output=True, text=True, check=True, env=columns).stdout
    rows = [line.split()[1:4] for line in shown.splitlines() if re.match(r"[a-z]i ", line)]
    found = [[one.name, one.version, one.architecture] for one in debian_packages()]
    assert sorted(found) == sorted(rows)
    assert found == sorted(found)


def test_a_debian_package_names_its_source():
    if shutil.which("dpkg") is None:
        pytest.skip("dpkg is not installed")
    packages = {one.name.partition(":")[0]: one for one in debian_packages()}
    shown = subprocess.run(["dpkg", "-s", "libc6"], capture_output=True, text=True, check=True).stdout
    fields = dict(re.findall(r"^(\S+): (.*)$", shown, flags=re.MULTILINE))
    assert packages["libc6"].source == fields["Source"].split()[0] == "glibc"
    assert packages["libc6"].version == fields["Version"]


def test_the_owner_of_a_python_file_states_its_digest():
    owner, digest = Owners().of(Path(pytest.__file__))
    assert owner == f"python:pytest=={pytest.__version__}"
    assert digest == f"sha256:{hashlib.sha256(Path(pytest.__file__).read_bytes()).hexdigest()}"


def test_the_owner_of_a_system_library_is_the_one_that_dpkg_says():
    if shutil.which("dpkg") is None:
        pytest.skip("dpkg is not installed")
    library = os.path.realpath("/lib/x86_64-linux-gnu/libc.so.6")
    owner, digest = Owners().of(Path(library))
    version = subprocess.run(["dpkg-query", "-W", "-f=${Version}", "libc6"], capture_output=True, text=True, check=True)
    assert owner == f"debian:libc6:amd64={version.stdout}"
    assert digest == f"md5:{hashlib.md5(Path(library).read_bytes(), usedforsecurity=False).hexdigest()}"


def test_every_file_that_dpkg_lists_has_an_owner():
    if shutil.which("dpkg") is None:
        pytest.skip("dpkg is not installed")
    shown = subprocess.run(["dpkg", "-L", "bash", "coreutils"], capture_output=True, text=True, check=True).stdout
    owners = Owners()
    files = [line for line in shown.splitlines() if Path(line).is_file() and not Path(line).is_symlink()]
    assert files
    assert [one for one in files if owners.of(Path(os.path.realpath(one)))[0] == "none"] == []


def test_a_file_of_no_package_has_no_owner(tmp_path):
    assert Owners().of(tmp_path / "x.so") == ("none", None)
