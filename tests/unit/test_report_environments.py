"""The report's section on environments, on two manifests made by hand."""

from dataclasses import dataclass
from typing import Any

import pytest
from small_manifest import small_manifest

from kldaudit.audit import parse_audit
from kldaudit.report.environments import environments


@dataclass
class Variant:
    name: str
    manifest: dict[str, Any]
    refused: bool = False


@dataclass
class Evidence:
    """What the section reads of the evidence."""

    audit: Any
    reference: Variant
    ranked: list[Variant]


@pytest.fixture
def evidence():
    audit = parse_audit(
        {
            "name": "small",
            "prompts": {"p": {"file": "p.txt", "about": "a text"}},
            "checkpoints": {"c": {"source": "./c"}},
            "arms": {
                "bf16": {"reference": True, "checkpoint": "c"},
                "one-thread": {"checkpoint": "c", "settings": {"threads": 1}},
            },
        },
        where="here",
    )
    return Evidence(audit, Variant("bf16", small_manifest()), [Variant("one-thread", small_manifest())])


def test_equal_environments_differ_in_nothing(evidence):
    (found,) = environments(evidence)
    assert (found.arm, found.not_meant, found.meant, found.missing) == ("one-thread", [], [], None)


def test_what_follows_from_a_setting_is_meant(evidence):
    evidence.ranked[0].manifest["environment"]["OMP_NUM_THREADS"] = "1"
    (found,) = environments(evidence)
    assert found.not_meant == []
    assert [(row.what, row.after, row.follows_from) for row in found.meant] == [
        ("environment: OMP_NUM_THREADS", "1", "threads")
    ]


def test_anything_else_is_not(evidence):
    evidence.ranked[0].manifest["cpu"]["microcode"] = "0xdead"
    (found,) = environments(evidence)
    assert [(row.group, row.what, row.after) for row in found.not_meant] == [("hardware", "cpu/microcode", "0xdead")]
    assert found.meant == []


def test_a_refused_arm_has_nothing_to_compare(evidence):
    evidence.ranked[0].refused = True
    evidence.ranked[0].manifest = {"outcome": "refused: the engine crashed"}
    (found,) = environments(evidence)
    assert found.missing == "refused: nothing ran that could be compared"
