"""Installed packages: every Debian package and every Python distribution."""

import re
import subprocess
import sysconfig
from importlib.metadata import Distribution, distributions

from kldaudit.digests import text_sha256
from kldaudit.manifest.record import DebianPackage, PythonPackage

DPKG_FORMAT = (
    "${binary:Package}\t${Version}\t${Architecture}\t${source:Package}\t${source:Version}\t${db:Status-Status}\n"
)


def python_packages() -> list[PythonPackage]:
    """Every distribution installed in this interpreter's environment, sorted by name."""
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})

    def package(one: Distribution) -> PythonPackage:
        text = one.read_text("RECORD")
        digest = "unknown: the distribution has no RECORD" if text is None else text_sha256(_portable(text))
        return PythonPackage(name=one.name.lower(), version=one.version, record_sha256=digest)

    return sorted((package(one) for one in distributions(path=folders)), key=lambda one: (one.name, one.version))


def _portable(record: str) -> str:
    """RECORD lines without what depends on where and how the package was installed."""
    local = re.compile(r"(^\.\./|__pycache__|\.dist-info/(INSTALLER|REQUESTED|direct_url\.json|RECORD),)")
    return "\n".join(sorted(line for line in record.splitlines() if not local.search(line)))


def debian_packages() -> list[DebianPackage] | str:
    """Every installed Debian package, sorted by name, or why they cannot be listed."""
    try:
        listing = subprocess.run(
            ["dpkg-query", "-W", f"-f={DPKG_FORMAT}"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown: dpkg-query failed: {error}"
    rows = [line.split("\t") for line in listing.splitlines()]
    return [
        DebianPackage(name=row[0], version=row[1], architecture=row[2], source=row[3], source_version=row[4])
        for row in sorted(rows)
        if row[5] == "installed"
    ]
