"""The manifest's reading of a real NVIDIA GPU, against nvidia-smi."""

import csv
import shutil
import subprocess

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA GPU: nvidia-smi is not installed"),
]

QUERY = (
    "name", "driver_version", "vbios_version", "compute_cap", "ecc.mode.current", "mig.mode.current", "power.limit",
    "inforom.img", "pcie.link.width.max", "persistence_mode",
)  # fmt: skip


@pytest.fixture(scope="module")
def shown():
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    rows = csv.reader(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
    return [dict(zip(QUERY, (cell.strip() for cell in row), strict=True)) for row in rows]


@pytest.fixture(scope="module")
def found():
    from kldaudit.manifest.gpu import gpus

    return gpus()


def test_every_device_is_the_one_that_nvidia_smi_shows(shown, found):
    assert [one["name"] for one in found] == [one["name"] for one in shown]
    assert [one["driver"] for one in found] == [one["driver_version"] for one in shown]
    assert [one["vbios"] for one in found] == [one["vbios_version"] for one in shown]
    assert [one["sm"] for one in found] == [one["compute_cap"] for one in shown]
    assert [one["inforom"]["image"] for one in found] == [one["inforom.img"] for one in shown]
    assert [str(one["pcie"]["width"]) for one in found] == [one["pcie.link.width.max"] for one in shown]


def test_modes_and_limits_are_those_that_nvidia_smi_shows(shown, found):
    modes = {"Enabled": "on", "Disabled": "off"}
    assert [one["ecc"]["current"] for one in found] == [modes[one["ecc.mode.current"]] for one in shown]
    assert [one["mig"]["current"] for one in found] == [modes[one["mig.mode.current"]] for one in shown]
    assert [one["persistence_mode"] for one in found] == [modes[one["persistence_mode"]] for one in shown]
    assert [one["power_limit_mw"]["enforced"] / 1000 for one in found] == [float(one["power.limit"]) for one in shown]


def test_the_uuid_and_the_serial_number_are_not_recorded(found):
    command = ["nvidia-smi", "--query-gpu=uuid,serial", "--format=csv,noheader"]
    cells = subprocess.run(command, capture_output=True, text=True, check=True).stdout.replace("\n", ",").split(",")
    secret = [cell.strip() for cell in cells if cell.strip() not in ("", "[N/A]", "0")]
    assert secret
    assert [cell for cell in secret if cell in str(found)] == []
