"""Manifests and their differences in words, for a terminal."""

import re
from collections import Counter
from typing import Any

from pydantic import Field
from rich.markup import escape
from rich.tree import Tree

from kldaudit.manifest.diff import Detail, Difference, Group, Line
from kldaudit.manifest.read import NOT_RECORDED, in_words
from kldaudit.records import Frozen

WIDE = 160
"""Characters of a value from which on only its differing words or its ends are shown."""

TITLES = {
    "run": "Run",
    "engine": "Engine",
    "asked": "Asked for, and got",
    "kernels": "Kernels that ran",
    "packages": "Packages",
    "stray": "Shared objects of no package",
    "libraries": "Loaded libraries",
    "stack": "What served",
    "machine": "Machine",
    "gpu": "GPU",
    "container": "Container",
    "caches": "Caches",
    "environment": "Environment variables",
}
"""Sections and their titles."""

Row = tuple[str, str]


class Section(Frozen):
    """One part of the summary."""

    name: str
    title: str
    rows: list[Row] = Field(description="Name and value; the name is empty where the value speaks for itself.")


def sections(manifest: dict[str, Any], *, full: bool) -> list[Section]:
    """A manifest in words.

    Args:
        manifest: as ``read_manifest`` returns it.
        full: list every package, library, kernel and layer instead of counting them.
    """
    rows = {
        "run": _run(manifest),
        "engine": _engine(manifest, full),
        "asked": _asked(manifest, full),
        "kernels": _kernels(manifest, full),
        "packages": _packages(manifest, full),
        "stray": _stray(manifest.get("stray_files")),
        "libraries": _libraries(manifest, full),
        "stack": _pairs(manifest.get("stack")),
        "machine": _machine(manifest, full),
        "gpu": _gpu(manifest.get("gpu"), full),
        "container": _pairs(manifest.get("container")),
        "caches": _pairs(manifest.get("caches")),
        "environment": _pairs(manifest.get("environment")),
    }
    return [Section(name=name, title=TITLES[name], rows=found) for name, found in rows.items()]


def packages_in_words(manifest: dict[str, Any]) -> str:
    """Counts as "N packages (D Debian, P Python)"."""
    python, debian = manifest.get("python_packages"), manifest.get("debian_packages", NOT_RECORDED)
    if python is None:
        return NOT_RECORDED
    if not isinstance(debian, list):
        return f"{len(python)} Python packages; Debian packages {debian}"
    return f"{len(python) + len(debian)} packages ({len(debian)} Debian, {len(python)} Python)"


def _field(record: dict[str, Any], name: str) -> str:
    return in_words(record[name]) if name in record else NOT_RECORDED


def _pairs(value: Any) -> list[Row]:
    if not isinstance(value, dict):
        return [("", NOT_RECORDED if value is None else in_words(value))]
    return [(name, in_words(one)) for name, one in value.items()] or [("", "none")]


def _stray(files: Any) -> list[Row]:
    if not isinstance(files, list):
        return [("", NOT_RECORDED if files is None else files)]
    return [(one["path"], one["sha256"]) for one in files] or [("", "none")]


def _run(manifest: dict[str, Any]) -> list[Row]:
    return [
        ("audit, arm, launch", f"{manifest['audit']}, {manifest['arm']}, {manifest['launch']}"),
        ("outcome", manifest["outcome"]),
    ]


def _engine(manifest: dict[str, Any], full: bool) -> list[Row]:
    engine, selected = manifest.get("engine", {}), manifest.get("selected", {})
    rows = [(name, _field(engine, name)) for name in ("name", "version", "commit")]
    rows += [(name, _field(selected, name)) for name in ("model_class", "model_runner", "dtype", "quantization")]
    rows.append(("attention", _counted(layer.get("backend") for layer in selected.get("attention", []))))
    rows.append(("linear", _counted(_linear(layer) for layer in selected.get("linear", []))))
    if full:
        rows += [(name, in_words(value)) for name, value in engine.items() if name not in ("name", "version", "commit")]
        rows += [(layer["layer"], _linear(layer)) for layer in selected.get("linear", [])]
    return rows


def _linear(layer: dict[str, Any]) -> str:
    return "/".join([layer["scheme"] or layer["method"], *layer["kernels"]])


def _counted(values: Any) -> str:
    return ", ".join(f"{value} × {count}" for value, count in Counter(values).items()) or NOT_RECORDED


def _asked(manifest: dict[str, Any], full: bool) -> list[Row]:
    asked = manifest.get("asked")
    if asked is None:
        return [("", NOT_RECORDED)]
    chosen = asked if full else [one for one in asked if not one["honoured"]]
    rows = [(one["setting"], f"asked {one['asked']}, ran {one['got']}") for one in chosen]
    return rows or [("", f"all {len(asked)} settings that were compared run as asked")]


def _kernels(manifest: dict[str, Any], full: bool) -> list[Row]:
    kernels, primitives = manifest.get("kernels"), manifest.get("primitives")
    if not isinstance(kernels, list):
        rows = [("", NOT_RECORDED if kernels is None else kernels)]
    else:
        known = [one if isinstance(one, dict) else {"name": one} for one in kernels]
        chosen = [one for one in known if full or one.get("family") or one["name"].startswith("_C")]
        rows = [(one["name"], _kernel(one)) for one in sorted(chosen, key=lambda one: -one.get("share", 0))]
        rows += [("", f"and {len(known) - len(chosen)} others")] if len(chosen) < len(known) else []
    listed = primitives if isinstance(primitives, list) else [NOT_RECORDED if primitives is None else primitives]
    return rows + [("oneDNN", one) for one in listed]


def _kernel(kernel: dict[str, Any]) -> str:
    if "count" not in kernel:
        return f"count {NOT_RECORDED}"
    words = f"× {kernel['count']}, {kernel.get('share', 0):.1%}"
    return f"{words}, {kernel['family']}" if kernel.get("family") else words


def _packages(manifest: dict[str, Any], full: bool) -> list[Row]:
    rows = [("", packages_in_words(manifest)), ("interpreter", _field(manifest, "python"))]
    if full:
        debian = manifest.get("debian_packages")
        rows += [(one["name"], one["version"]) for one in debian] if isinstance(debian, list) else []
        rows += [(one["name"], one["version"]) for one in manifest.get("python_packages", [])]
    return rows


def _libraries(manifest: dict[str, Any], full: bool) -> list[Row]:
    libraries = manifest.get("libraries")
    if not isinstance(libraries, list):
        return [("", NOT_RECORDED if libraries is None else libraries)]
    changed = [one for one in libraries if one.get("as_packaged") is False]
    unowned = [one for one in libraries if one.get("owner") == "none"]
    rows = [("", f"{len(libraries)} shared objects, {len(changed)} not as packaged, {len(unowned)} of no package")]
    rows += [("NOT AS PACKAGED", f"{one['path']} ({one.get('owner')})") for one in changed]
    rows += [("of no package", one["path"]) for one in unowned]
    if full:
        rows += [(one["path"], f"{one.get('owner', NOT_RECORDED)}, {one['sha256']}") for one in libraries]
    return rows


def _machine(manifest: dict[str, Any], full: bool) -> list[Row]:
    cpu = manifest.get("cpu", {})
    rows = [(name.replace("_", " "), _field(manifest, name)) for name in ("operating_system", "kernel", "libc")]
    shown = cpu if full else {name: value for name, value in cpu.items() if len(in_words(value)) < WIDE}
    rows += [(f"CPU {name.replace('_', ' ')}", in_words(value)) for name, value in shown.items()]
    torch = manifest.get("torch", {})
    return rows + [(f"torch {name.replace('_', ' ')}", _field(torch, name)) for name in ("version", "cuda", "commit")]


def _gpu(gpu: Any, full: bool) -> list[Row]:
    if not isinstance(gpu, list):
        return [("", NOT_RECORDED if gpu is None else gpu)]
    return [
        (f"{index} {name}", in_words(value))
        for index, one in enumerate(gpu)
        for name, value in one.items()
        if full or len(in_words(value)) < WIDE
    ]


def difference_tree(difference: Difference, a: str, b: str) -> Tree:
    """A difference as a tree to print; with the arms' settings, what no setting meant comes first and in red."""
    root = Tree(escape(f"{a} → {b}"))
    if not difference.compared_with_arms:
        _add(root, difference.groups, "default")
        return root
    for title, meant, style in (("not meant by the audit", False, "red"), ("meant by the audit", True, "default")):
        groups = difference.part(meant)
        if groups:
            _add(root.add(title, style=style), groups, style)
    return root


def _add(parent: Tree, groups: list[Group], style: str) -> None:
    for group in groups:
        branch = parent.add(group.name, style=style)
        for line in group.lines:
            branch.add(escape(line_in_words(line)), style=style)


def line_in_words(line: Line) -> str:
    """One line of a difference, such as ``cpu/microcode: 0x1 → 0x2``."""
    where = line.place
    if len(line.things) == 1:
        where = f"{line.place} {line.things[0]}"
    elif line.things:
        where = f"{line.place}: {len(line.things)} ({line.things[0]} … {line.things[-1]})"
    said = "; ".join(_detail(line, detail) for detail in line.details)
    return f"{where}: {said}" + (f" [{line.follows_from}]" if line.follows_from else "")


def _detail(line: Line, detail: Detail) -> str:
    if line.kind != "changed":
        value = _shortened(str(detail.after if line.kind == "added" else detail.before))
        return f"{line.kind} {value}".rstrip()
    name = f"{detail.field} " if detail.field else ""
    before, after = (NOT_THERE if value is None else value for value in (detail.before, detail.after))
    if len(before) > WIDE and len(after) > WIDE:
        return f"{name}{_differing_words(before, after)}"
    return f"{name}{_shortened(before)} → {_shortened(after)}"


NOT_THERE = "not there"


def _differing_words(before: str, after: str) -> str:
    gone = [word for word in before.split() if word not in set(after.split())]
    come = [word for word in after.split() if word not in set(before.split())]
    return _shortened(" ".join([*(f"-{word}" for word in gone), *(f"+{word}" for word in come)]) or "order of words")


def _shortened(value: str) -> str:
    """Digests by their beginning, long values by their ends."""
    value = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", value)
    return value if len(value) <= WIDE else f"{value[: WIDE // 2]} … {value[-WIDE // 2 :]}"
