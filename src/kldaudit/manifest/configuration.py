"""The engine's configuration as it resolved it, in full, as plain JSON that is the same in every launch."""

import dataclasses
import enum
import functools
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kldaudit.manifest.variables import WITHHELD, is_secret, portable

VOLATILE = re.compile(r"(?:^|_)(?:instance_id|engine_id|uuid|port|ports|master_port|rpc_port|timestamp)$")
"""Fields that a process makes up for itself."""

MADE_UP = "{made up by the process}"
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
SECRET_FIELD = re.compile(r"(?:^|_)(?:api_key|token|password|secret|credentials?)$", re.IGNORECASE)
"""Fields that hold secrets; narrower than for variables, because token is also a model's word."""

DEEPEST = 30


def plain(value: Any, places: dict[str, str], name: str = "", depth: int = 0) -> Any:
    """A configuration as JSON values.

    Args:
        value: dataclasses, models, mappings, lists, enumerations, dtypes and so on, nested.
        places: absolute paths and what is written in their stead, such as ``{checkpoint}``.
        name: the field's name.
        depth: how deep it lies.

    Returns:
        dict, list, str, int, float, bool or None. Sets are sorted, classes and functions named; what a process makes up
        for itself (ports, identifiers, addresses) is left out by name, secrets are withheld.
    """
    if depth > DEEPEST:
        return "unknown: nested too deep"
    if value is not None and VOLATILE.search(name):
        return MADE_UP
    if isinstance(value, str):
        if (value and SECRET_FIELD.search(name)) or is_secret("", value):
            return WITHHELD
        return _text(value, places)
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float):
        return value if not isinstance(value, float) or (value == value and abs(value) != float("inf")) else str(value)

    def inner(one: Any, key: str = "") -> Any:
        return plain(one, places, key, depth + 1)

    if isinstance(value, Path):
        return _text(str(value), places)
    if isinstance(value, Mapping):
        return {_text(str(key), places): inner(one, str(key)) for key, one in sorted(value.items(), key=_by_text)}
    if isinstance(value, list | tuple):
        return [inner(one, name) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((inner(one) for one in value), key=str)
    if callable(getattr(value, "named_modules", None)):
        return f"{type(value).__module__}.{type(value).__qualname__}"  # a layer that the configuration keeps by name
    fields = _fields(value)
    if fields is not None:
        return {key: inner(one, key) for key, one in sorted(fields.items())}
    if inspect.isclass(value) or inspect.isroutine(value):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, functools.partial):
        return inner(value.func)
    return _text(str(value), places)


def _by_text(item: tuple[Any, Any]) -> str:
    return str(item[0])


def _fields(value: Any) -> dict[str, Any] | None:
    """Fields of a configuration object; None if it is none."""
    if dataclasses.is_dataclass(value) and not inspect.isclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if inspect.isclass(value):
        return None
    for method in ("to_dict", "model_dump"):
        if callable(found := getattr(value, method, None)):
            return dict(found())
    return None


def _text(text: str, places: dict[str, str]) -> str:
    for path in sorted(places, key=len, reverse=True):
        text = text.replace(path, places[path])
    return ADDRESS.sub("{address}", portable(text))
