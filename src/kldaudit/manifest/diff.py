"""What differs between two environments, as a tree: nothing when they are equal.

``changes`` compares two manifests value by value; ``tree`` groups what it finds by how likely it changes the numbers
and folds equal changes into one line. A path is a tuple of names; a pattern is written with ``/`` between the names,
``*`` and ``?`` inside one name, ``**`` for any number of names, and also covers all that lies below what it matches.
"""

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Literal

from pydantic import Field

from kldaudit.manifest.read import NOT_RECORDED
from kldaudit.records import Frozen

Path = tuple[str, ...]

LEFT_OUT = (
    "schema_version",
    "audit",
    "arm",
    "launch",
    "parents/spec",  # its settings show where they arrive
    "capture",  # results of the run; the verification compares them
    "debian_packages/*/source*",  # follows from the package's version
    "kernels/*/share",  # time, not choice
    "engine/config/**/instance_id",
    "engine/config/**/*_port*",
    "engine/config/**/*compilation_time",
    "gpu/*/*temperature*",
    "gpu/*/*utili?ation*",
    "gpu/*/*power_draw*",
    "gpu/*/*power_usage*",
    "gpu/*/clocks*/**/current*",
    "gpu/*/clocks*/now",
    "gpu/*/clocks*/reasons*",
    "gpu/*/*clock*reasons*",
    "gpu/*/*event_reasons*",
    "gpu/*/*throttle*",
    "gpu/*/*performance_state*",
    "gpu/*/*memory_used*",
    "gpu/*/*memory_free*",
    "gpu/*/ecc/**/*errors*",  # counters since some boot or other: their sum says nothing about this run
    "gpu/*/ecc/**/*corrected*",
    "container/id",
    "container/name",
    "container/hostname",
)
"""What names or times the run and is not the environment: never compared."""

GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "settings",
        (
            "environment", "asked", "parents/checkpoint", "parents/prompt:*", "selected/chunk", "selected/seed",
            "selected/torch_threads", "selected/max_model_len", "selected/max_num_seqs",
        ),
    ),
    ("kernels", ("kernels", "primitives", "caches", "selected/attention", "selected/linear")),
    ("engine", ("engine", "selected", "outcome", "parents/image")),
    (
        "libraries",
        ("libraries", "stack", "torch", "python_packages", "debian_packages", "stray_files", "python", "libc"),
    ),
    ("hardware", ("gpu", "cpu", "container", "kernel", "operating_system")),
    ("rest", ("**",)),
)  # fmt: skip
"""Group of a path: the first of these whose patterns match."""

ORDER = ("engine", "kernels", "libraries", "hardware", "settings", "rest")
"""Groups by how likely they change the numbers."""

KEYS = {
    ("asked",): "setting",
    ("python_packages",): "name",
    ("debian_packages",): "name",
    ("stray_files",): "path",
    ("libraries",): "path",
    ("kernels",): "name",
    ("selected", "attention"): "layer",
    ("selected", "linear"): "layer",
}
"""Lists of things that are compared by a key of theirs."""

SAID = {
    ("asked",): "got",
    ("python_packages",): "version",
    ("debian_packages",): "version",
    ("stray_files",): "sha256",
    ("libraries",): "sha256",
    ("kernels",): "count",
    ("selected", "attention"): "backend",
    ("selected", "linear"): "method",
    ("gpu",): "name",
}
"""What is said of such a thing when only one side has it."""

COLLECTIONS = frozenset({*SAID, ("environment",), ("primitives",)})
"""Places with things of one kind: a thing that one side lacks was added or removed."""

RECORDS = frozenset({(), ("cpu",), ("torch",), ("engine",), ("selected",)})
"""Places with fixed fields: a field that one side lacks was not recorded by the version that made it."""

WHOLE = frozenset({("selected",), ("asked",)})
"""Empty where the engine refused to load: then told in one line."""

LONG = 200
"""Characters of JSON from which on a value that only one side has is told by its number of entries."""

Kind = Literal["added", "removed", "changed"]


class Change(Frozen):
    """One value that differs."""

    path: Path
    kind: Kind
    before: str | None = Field(description="Value in A; null if it was added.")
    after: str | None = Field(description="Value in B; null if it was removed.")
    follows_from: str | None = Field(None, description="Setting that meant it; null if none did or none was given.")


class Detail(Frozen):
    """One field of a line."""

    field: str = Field(description="Path inside the thing that the line is about; empty for the thing itself.")
    before: str | None
    after: str | None


class Line(Frozen):
    """One difference, or several equal ones."""

    place: str = Field(description="Where in the manifest, such as selected/linear or cpu/microcode.")
    things: list[str] = Field(description="Keys of all things there that differ in this way; empty for a plain value.")
    kind: Kind
    details: list[Detail]
    follows_from: str | None = Field(description="Setting that meant it.")


class Group(Frozen):
    """Differences of one kind of cause."""

    name: str
    lines: list[Line]


class Difference(Frozen):
    """What differs between two manifests."""

    compared_with_arms: bool = Field(description="Whether the arms' settings were given, so that lines can be meant.")
    groups: list[Group] = Field(description="Most likely to change the numbers first; empty when equal.")

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.groups)

    def part(self, meant: bool) -> list[Group]:
        """Only the lines that the audit meant, or only the others."""
        found = [
            Group(name=group.name, lines=[line for line in group.lines if (line.follows_from is not None) == meant])
            for group in self.groups
        ]
        return [group for group in found if group.lines]


@cache
def _expression(pattern: str) -> re.Pattern[str]:
    parts = []
    for name in pattern.split("/"):
        words = re.escape(name).replace(r"\*\*", "\0").replace(r"\*", "[^\0]*").replace(r"\?", "[^\0]")
        parts.append("(?:[^\0]*\0)*" if name == "**" else f"{words}\0")
    return re.compile("".join(parts))


def matches(path: Path, patterns: Iterable[str]) -> bool:
    """Whether a path, or something above it, matches one of the patterns."""
    text = "".join(f"{name}\0" for name in path)
    return any(_expression(pattern).match(text) for pattern in patterns)


def changes(a: dict[str, Any], b: dict[str, Any]) -> list[Change]:
    """Every value that differs from manifest ``a`` to manifest ``b``, in the order of their paths."""
    return list(_compare((), _keyed(a, ()), _keyed(b, ())))


def diff(a: dict[str, Any], b: dict[str, Any]) -> Difference:
    """What differs from manifest ``a`` to manifest ``b``."""
    return tree(changes(a, b), compared_with_arms=False)


def tree(found: Iterable[Change], *, compared_with_arms: bool) -> Difference:
    """Group changes and fold equal ones into one line.

    Args:
        found: the changes, each with the setting that it follows from, if that was looked up.
        compared_with_arms: whether it was.
    """
    groups: dict[str, list[Line]] = {name: [] for name in ORDER}
    for line in _folded(_lines(found)):
        groups[_group(line)].append(line)
    return Difference(
        compared_with_arms=compared_with_arms,
        groups=[Group(name=name, lines=lines) for name, lines in groups.items() if lines],
    )


def _group(line: Line) -> str:
    path = tuple(line.place.split("/"))
    return next(name for name, patterns in GROUPS if matches(path, patterns))


def _keyed(value: Any, path: Path) -> Any:
    """The value with lists of things turned into mappings by their keys."""
    if isinstance(value, dict):
        return {name: _keyed(one, (*path, name)) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    if path in SAID or (value and all(isinstance(one, dict) for one in value)):
        return _by_key(value, path)
    return {str(one): {} for one in value} if path == ("primitives",) else value


def _by_key(things: list[Any], path: Path) -> dict[str, Any]:
    key, found = KEYS.get(path), dict[str, Any]()
    for index, thing in enumerate(things):
        if isinstance(thing, dict):
            name = str(index if key is None else thing.get(key, index))
            fields = {field: _keyed(one, (*path, name, field)) for field, one in thing.items() if field != key}
        else:
            name, fields = str(thing), {}  # earlier versions recorded the bare names of kernels
        twins = sum(other == name or other.startswith(f"{name} #") for other in found)
        found[f"{name} #{twins + 1}" if twins else name] = fields
    return found


def _compare(path: Path, a: Any, b: Any) -> Iterator[Change]:
    if a == b or matches(path, LEFT_OUT):
        return
    if not (isinstance(a, dict) and isinstance(b, dict)) or (path in WHOLE and not (a and b)):
        yield Change(path=path, kind="changed", before=_words(a, path), after=_words(b, path))
        return
    if path in KEYS and a and b:
        yield from _unrecorded(path, a, b)
        shared = _fields(a) & _fields(b)
        a, b = ({name: {f: v for f, v in one.items() if f in shared} for name, one in side.items()} for side in (a, b))
    for name in dict.fromkeys([*a, *b]):
        below = (*path, name)
        if name in a and name in b:
            yield from _compare(below, a[name], b[name])
        elif not matches(below, LEFT_OUT):
            yield _one_sided(below, a, b)


def _fields(things: dict[str, Any]) -> set[str]:
    return {field for one in things.values() for field in one}


def _unrecorded(path: Path, a: dict[str, Any], b: dict[str, Any]) -> Iterator[Change]:
    """Fields that no thing has on one side: said once, not for each thing."""
    for field in sorted(_fields(a) ^ _fields(b)):
        place, in_a = (*path, "*", field), field in _fields(a)
        if not matches(place, LEFT_OUT):
            before, after = ("recorded", NOT_RECORDED) if in_a else (NOT_RECORDED, "recorded")
            yield Change(path=place, kind="changed", before=before, after=after)


def _one_sided(path: Path, a: dict[str, Any], b: dict[str, Any]) -> Change:
    above, name = path[:-1], path[-1]
    before = _words(a[name], path) if name in a else None
    after = _words(b[name], path) if name in b else None
    if above in RECORDS or above[:-1] in COLLECTIONS:
        missing = (NOT_RECORDED if before is None else before, NOT_RECORDED if after is None else after)
        return Change(path=path, kind="changed", before=missing[0], after=missing[1])
    return Change(path=path, kind="added" if before is None else "removed", before=before, after=after)


def _words(value: Any, path: Path) -> str:
    """A value in one line: text as it is, things by their number, one thing by what is said of it."""
    if isinstance(value, str):
        return value
    if path in COLLECTIONS | WHOLE and value is not None:
        return f"{len(value)} entries"
    if path[:-1] in COLLECTIONS:
        return str(value.get(SAID.get(path[:-1]), ""))
    words = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return f"{len(value)} entries" if len(words) > LONG else words


def _lines(found: Iterable[Change]) -> list[Line]:
    """One line for each thing and meaning, or for each plain value."""
    things: dict[tuple[str, str | None, Kind, str | None], list[Detail]] = {}
    for change in found:
        above = next((change.path[:n] for n in (1, 2) if change.path[:n] in COLLECTIONS), None)
        inside = above is not None and len(change.path) > len(above)
        place = above if above is not None and inside else change.path
        thing = change.path[len(place)] if inside else None
        detail = Detail(field="/".join(change.path[len(place) + 1 :]), before=change.before, after=change.after)
        kind: Kind = "changed" if detail.field else change.kind
        things.setdefault(("/".join(place), thing, kind, change.follows_from), []).append(detail)
    return [
        Line(
            place=place,
            things=[] if thing is None else [thing],
            kind=kind,
            details=details,
            follows_from=follows_from,
        )
        for (place, thing, kind, follows_from), details in things.items()
    ]


def _folded(lines: Iterable[Line]) -> list[Line]:
    """Lines that say the same of several things become one."""
    alike: dict[str, list[Line]] = {}
    for line in lines:
        key = line.model_dump_json(exclude={"things"}) if line.things else line.model_dump_json()
        alike.setdefault(key, []).append(line)
    return [
        same[0].model_copy(update={"things": [thing for line in same for thing in line.things]})
        for same in alike.values()
    ]
