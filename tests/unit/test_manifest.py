import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import kldaudit
from kldaudit.capture.manifest import cpu, debian_packages, interpreter, numeric_environment, python_packages

LISTING = """
import json
from kldaudit.capture.manifest import python_packages
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


def test_python_packages_are_those_that_importlib_finds_in_the_environment():
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    expected = sorted((one.name.lower(), one.version) for one in importlib.metadata.distributions(path=folders))
    assert [(one.name, one.version) for one in python_packages()] == expected


def test_every_python_package_has_the_digest_of_its_record_or_says_why_not():
    for one in python_packages():
        assert re.fullmatch(r"[0-9a-f]{64}|unknown: the distribution has no RECORD", one.record_sha256), one.name


def test_packages_outside_the_environment_are_not_listed(listed):
    assert sorted(listed) == ["bare", "changed", "installed", "plain"]


def test_a_package_without_a_record_says_so(listed):
    assert listed["bare"] == ["1.0", "unknown: the distribution has no RECORD"]


def test_a_record_digest_is_the_sha256_of_the_sorted_lines(listed):
    lines = b"weather/a.py,sha256=x,1\nweather/b.py,sha256=y,2"
    assert listed["plain"] == ["1.0", hashlib.sha256(lines).hexdigest()]


def test_a_changed_file_changes_the_record_digest(listed):
    assert listed["changed"][1] != listed["plain"][1]


def test_the_record_digest_does_not_depend_on_how_the_package_was_installed(listed):
    assert listed["installed"][1] == listed["plain"][1]


def test_only_variables_that_can_change_the_numbers_are_recorded(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    monkeypatch.setenv("EDITOR", "vi")
    found = numeric_environment()
    assert (found["OMP_NUM_THREADS"], found["VLLM_CPU_INT4_W4A8"]) == ("3", "0")
    assert "EDITOR" not in found


@pytest.mark.parametrize("name", ["VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "TORCHINDUCTOR_CACHE_DIR"])
def test_names_that_the_engine_makes_up_are_not_recorded(monkeypatch, name):
    monkeypatch.setenv(name, "/tmp/8036e61d")
    assert name not in numeric_environment()


def test_the_environments_own_folder_is_not_recorded(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", f"{sys.prefix}/lib/libgomp.so")
    assert numeric_environment()["LD_PRELOAD"] == "{environment}/lib/libgomp.so"


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


def test_the_cpu_is_the_one_of_the_kernels_list():
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    found = cpu()
    assert found["architecture"] == platform.machine()
    assert found["usable_cores"] == len(os.sched_getaffinity(0))
    if platform.machine() == "x86_64":
        assert found["model"] == fields["model name"]
        assert found["vendor"] == fields["vendor_id"]
        assert found["microcode"] == fields.get("microcode", "unknown: /proc/cpuinfo has no microcode")
        assert found["family_model_stepping"] == f"{fields['cpu family']}/{fields['model']}/{fields['stepping']}"
        assert set(found["isa_flags"].split()) == set(fields["flags"].split())


def test_isa_flags_are_sorted():
    flags = cpu()["isa_flags"].split()
    assert flags == sorted(flags)


def test_the_interpreter_is_the_one_that_runs():
    assert interpreter() == platform.python_version().partition("+")[0]
