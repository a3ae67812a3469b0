"""Installed packages: every Debian package, every Python distribution, and who owns a file."""

import base64
import json
import os
import platform
import re
import subprocess
import sys
from functools import cached_property
from importlib.metadata import Distribution, distributions
from pathlib import Path

from kldaudit.digests import text_sha256
from kldaudit.manifest.record import DebianPackage, PythonPackage
from kldaudit.manifest.variables import portable, without_secrets

DPKG_FORMAT = (
    "${binary:Package}\t${Version}\t${Architecture}\t${source:Package}\t${source:Version}\t${db:Status-Status}\n"
)
DPKG_INFO = Path("/var/lib/dpkg/info")
VENDORED = "_vendor"
"""Folder that setuptools puts on the path when it is imported: its own copies, which nobody installed."""
ABSENT = ("not-installed", "config-files")
"""States in which dpkg knows a package of which no file is left but its settings."""

INTERPRETER = tuple(
    f"{os.path.realpath(sys.base_prefix)}/{place}"
    for place in ("bin/python3", "lib/libpython3", f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/")
)
"""Beginnings of the paths of the interpreter's own files."""


def installed() -> list[Distribution]:
    """Every distribution that this interpreter can import; of two with the same name the one that it would import."""
    here = os.getcwd()  # noqa: PTH109 - compared with texts; `python -m` puts it there, nothing is installed in it
    first: dict[str, Distribution] = {}
    folders = [folder for folder in sys.path if folder not in ("", here) and Path(folder).name != VENDORED]
    for one in distributions(path=folders):
        if one.metadata["Name"]:
            first.setdefault(_normal(one.name), one)
    return [first[name] for name in sorted(first)]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def python_packages() -> list[PythonPackage]:
    """Every Python distribution that can be imported, sorted by name."""

    def package(one: Distribution) -> PythonPackage:
        text = one.read_text("RECORD")
        digest = "unknown: the distribution has no RECORD" if text is None else text_sha256(_portable(text))
        installer = (one.read_text("INSTALLER") or "").strip()
        return PythonPackage(
            name=one.name.lower(),
            version=one.version,
            record_sha256=digest,
            installer=installer or "unknown: the distribution has no INSTALLER",
            origin=_origin(one.read_text("direct_url.json")),
        )

    return sorted((package(one) for one in installed()), key=lambda one: (one.name, one.version))


def _portable(record: str) -> str:
    """RECORD lines without what depends on where and how the package was installed."""
    local = re.compile(r"(^\.\./|__pycache__|\.dist-info/(INSTALLER|REQUESTED|direct_url\.json|RECORD),)")
    return "\n".join(sorted(line for line in record.splitlines() if not local.search(line)))


def _origin(direct_url: str | None) -> str | None:
    """Where a distribution came from if not from an index: URL and commit, or archive and hash."""
    if direct_url is None:
        return None
    try:
        content = json.loads(direct_url)
        url = str(content["url"])
    except (ValueError, KeyError, TypeError) as error:
        return f"unknown: direct_url.json is not readable: {error!r}"
    place = "a local file" if url.startswith("file:") else without_secrets(url)
    if commit := content.get("vcs_info", {}).get("commit_id"):
        return f"{place} at commit {commit}"
    hashes = content.get("archive_info", {}).get("hashes") or {}
    if hashes:
        return f"{place}, " + ", ".join(f"{name}:{value}" for name, value in sorted(hashes.items()))
    return "a local folder" if "dir_info" in content else place


def debian_packages() -> list[DebianPackage] | str:
    """Every Debian package of which files are there, sorted by name, or why they cannot be listed."""
    try:
        listing = subprocess.run(
            ["dpkg-query", "-W", f"-f={DPKG_FORMAT}"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown: dpkg-query failed: {error}"
    rows = [line.split("\t") for line in listing.splitlines()]
    return [
        DebianPackage(
            name=row[0], version=row[1], architecture=row[2], source=row[3], source_version=row[4], status=row[5]
        )
        for row in sorted(rows)
        if row[5] not in ABSENT
    ]


class Owners:
    """Which package a file belongs to, and the digest that the package states for it."""

    def __init__(self, info: Path = DPKG_INFO) -> None:
        """Look up Debian's files in ``info``; both indexes are made when they are first asked for."""
        self.info = info

    def of(self, path: Path) -> tuple[str, str | None]:
        """Owner of a real path and the digest it states.

        Returns:
            ``python:NAME==VERSION``, ``debian:NAME=VERSION``, ``interpreter:NAME=VERSION`` for a Python that no package
            brought, or ``none``; and ``sha256:…``, ``md5:…`` or None.
        """
        found = self.python.get(str(path)) or self.debian.get(str(path))
        if found is None and str(path).startswith(INTERPRETER):
            return f"interpreter:{platform.python_implementation()}={platform.python_version()}", None
        return found or ("none", None)

    @cached_property
    def python(self) -> dict[str, tuple[str, str | None]]:
        """Files of the Python distributions: real path to owner and digest, from their RECORDs."""
        found: dict[str, tuple[str, str | None]] = {}
        for one in installed():
            owner = f"python:{one.name.lower()}=={one.version}"
            folder = os.path.realpath(str(one.locate_file("")))
            for file in one.files or []:
                place = os.path.normpath(os.path.join(folder, str(file)))  # noqa: PTH118 - 70,000 of them: Path is slow
                digest = None
                if file.hash is not None and file.hash.mode == "sha256":
                    digest = f"sha256:{base64.urlsafe_b64decode(file.hash.value + '=').hex()}"
                found.setdefault(place, (owner, digest))
        return found

    @cached_property
    def debian(self) -> dict[str, tuple[str, str | None]]:
        """Files of the Debian packages: real path to owner and digest, from dpkg's lists."""
        packages = debian_packages()
        found: dict[str, tuple[str, str | None]] = {}
        folders: dict[str, str] = {}
        for package in packages if isinstance(packages, list) else []:
            owner = f"debian:{package.name}={package.version}"
            digests = self._md5sums(package)
            for line in self._lines(package, "list"):
                head, _, name = line.rpartition("/")
                folder = folders.setdefault(head, os.path.realpath(head or "/"))  # /lib is /usr/lib today
                md5 = digests.get(line)
                found[f"{folder.rstrip('/')}/{name}"] = (owner, f"md5:{md5}" if md5 else None)
        return found

    def _lines(self, package: DebianPackage, suffix: str) -> list[str]:
        name = package.name.partition(":")[0]
        for stem in (f"{name}:{package.architecture}", name):
            path = self.info / f"{stem}.{suffix}"
            if path.exists():
                return path.read_text(encoding="utf-8").splitlines()
        return []

    def _md5sums(self, package: DebianPackage) -> dict[str, str]:
        lines = (line.split("  ", 1) for line in self._lines(package, "md5sums"))
        return {f"/{name}": md5 for md5, name in lines}


def portable_path(path: str) -> str:
    """A path with the environment's own folder written as {environment}, the interpreter's as {python}."""
    for name, prefix in (("environment", sys.prefix), ("python", sys.base_prefix)):
        for folder in (prefix, os.path.realpath(prefix)):
            if folder != "/usr" and path.startswith(f"{folder}/"):
                return f"{{{name}}}{path[len(folder) :]}"
    return portable(path)
