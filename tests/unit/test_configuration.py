import enum
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kldaudit.manifest.configuration import MADE_UP, plain
from kldaudit.manifest.variables import WITHHELD


class Level(enum.Enum):
    NONE = 0


@dataclass
class Inner:
    level: Level = Level.NONE
    names: frozenset[str] = frozenset({"b", "a"})
    action: Any = field(default_factory=lambda: functools.partial(len))


@dataclass
class Outer:
    model: str = "/data/model"
    cache: Path = Path("/data/model/cache")
    inner: Inner = field(default_factory=Inner)
    kind: type = dict
    share: float = 0.5
    instance_id: str = "8f2c"
    nccl_port: int = 41234
    hf_token: str | None = "swordfish"
    image_token: int = 7
    where: str = "<object at 0x7f33aa20>"


def test_a_configuration_becomes_plain_values_in_full():
    assert plain(Outer(), {"/data/model": "{checkpoint}"}) == {
        "cache": "{checkpoint}/cache",
        "hf_token": WITHHELD,
        "image_token": 7,
        "inner": {"action": "builtins.len", "level": "NONE", "names": ["a", "b"]},
        "instance_id": MADE_UP,
        "kind": "builtins.dict",
        "model": "{checkpoint}",
        "nccl_port": MADE_UP,
        "share": 0.5,
        "where": "<object at {address}>",
    }


def test_a_secret_that_is_not_set_is_not_withheld():
    assert plain(Outer(hf_token=None), {})["hf_token"] is None


def test_a_secret_in_a_value_is_withheld_wherever_it_is():
    assert plain({"url": ["https://me:pw@example.org"]}, {}) == {"url": [WITHHELD]}


@pytest.mark.parametrize(
    ("value", "expected"), [(float("inf"), "inf"), (float("nan"), "nan"), (1.5, 1.5), (True, True)]
)
def test_numbers_that_json_has_none_for_are_texts(value, expected):
    assert plain(value, {}) == expected


def test_objects_that_hold_each_other_end():
    outer: dict[str, Any] = {}
    outer["self"] = outer
    found = plain(outer, {})
    while isinstance(found, dict):
        found = found["self"]
    assert found == "unknown: nested too deep"


def test_a_layer_that_the_configuration_holds_is_named_by_its_class():
    class Attention:
        def named_modules(self):
            return []

        def __str__(self):
            return "Attention(backend=A)"

    assert plain({"layers.0": Attention()}, {})["layers.0"].endswith("Attention")
