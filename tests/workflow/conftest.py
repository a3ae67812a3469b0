"""The tiny audit, run once through the real engine; the tests look at what it left."""

import json
from pathlib import Path

import pytest
from tiny_run import ROOT, snakemake


@pytest.fixture(scope="session")
def results() -> Path:
    """Results folder of the tiny audit; what is up to date is not run again."""
    snakemake("report")
    return ROOT / "results" / "tiny"


@pytest.fixture(scope="session")
def disclosure(results: Path) -> dict:
    return json.loads((results / "disclosure.json").read_text())
