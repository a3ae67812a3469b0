import os
import platform
import re
from pathlib import Path

from kldaudit.manifest.machine import _ranges, cpu, interpreter, kernel


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


def test_the_affinity_is_written_as_the_kernel_writes_it():
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    assert cpu()["affinity"] == re.search(r"^Cpus_allowed_list:\s*(\S+)", status, flags=re.MULTILINE)[1]


def test_ranges_of_numbers():
    assert _ranges([0, 1, 2, 5, 8, 9]) == "0-2,5,8-9"
    assert _ranges([3]) == "3"


def test_the_kernel_is_what_uname_says():
    uname = os.uname()
    assert kernel() == f"{uname.sysname} {uname.release} {uname.version}"


def test_isa_classes_are_those_of_the_flags():
    found = cpu()
    flags = found["isa_flags"].split()
    assert ("avx2" in found["isa_classes"]) == ("avx2" in flags)
    assert ("amx_bf16" in found["isa_classes"]) == ("amx_bf16" in flags)


def test_two_readings_are_the_same():
    assert cpu() == cpu()
