"""How the tests run the tiny audit and look at what it left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
AUDIT = "tests/data/tiny.yaml"


def snakemake(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "snakemake"), "--cores", "all", *arguments, "--config", f"audit={AUDIT}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if check and done.returncode:
        pytest.fail(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done


def kldaudit(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BIN / "kldaudit"), *arguments], cwd=ROOT, capture_output=True, text=True)


def manifest(results: Path, arm: str, launch: int = 1) -> dict:
    return json.loads((results / "captures" / arm / f"launch{launch}.manifest.json").read_text())
