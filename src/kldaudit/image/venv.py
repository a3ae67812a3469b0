"""A virtual environment made from the lock."""

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from kldaudit.digests import file_sha256
from kldaudit.errors import EngineError
from kldaudit.image.listing import packages_digest, script
from kldaudit.records import digests_of, read_json, write_json
from kldaudit.runtime.record import Image
from kldaudit.runtime.run import last_lines

MARKER = "kldaudit-locks.json"


def make_venv(engine: str, locks: list[Path], location: Path, source: Path, log: Path, why: str) -> Image:
    """Make a virtual environment from hash-locked requirements, with kldaudit's capture code in it.

    Args:
        engine: name of the engine's lock.
        locks: requirement files with hashes; together they are complete (installed without resolving).
        location: folder of the environment; kept as it is if it was made from the same locks.
        source: folder of kldaudit's own source, installed last.
        log: takes pip's output.
        why: why this runtime.

    Raises:
        EngineError: pip failed, or an installed package does not match.
    """
    wanted = {
        "python": sys.version,
        "libc": sysconfig.get_config_var("SOABI"),
        "locks": {lock.name: file_sha256(lock) for lock in locks},
    }
    marker = location / MARKER
    if location.exists() and any(location.iterdir()) and not (location / "pyvenv.cfg").exists():
        raise EngineError(
            "the engine's environment cannot be made there",
            where=str(location),
            expected="an empty or missing folder, or an environment to replace",
            found="a folder with other things in it",
            do="give another --location",
        )
    with log.open("w", encoding="utf-8") as output:
        if not marker.exists() or read_json(marker) != wanted:
            shutil.rmtree(location, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(location)], output, log)
            for lock in locks:
                _run(_pip(location, "--require-hashes", "--only-binary", ":all:", "-r", str(lock)), output, log)
            write_json(marker, wanted)
        with tempfile.TemporaryDirectory() as folder:
            build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder]
            _run([*build, str(source)], output, log)
            wheel = next(Path(folder).glob("kldaudit-*.whl"))
            _run(_pip(location, "--force-reinstall", str(wheel)), output, log)
    return _describe(engine, locks, location, why)


def _pip(location: Path, *arguments: str) -> list[str]:
    python = str(location / "bin" / "python")
    return [python, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check", *arguments]


def _run(command: list[str], output: object, log: Path) -> None:
    finished = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)  # type: ignore[call-overload]
    if finished.returncode:
        raise EngineError(
            "the engine's environment cannot be made",
            where=f"{' '.join(command[:4])} …, log {log}",
            expected="pip installs every locked file",
            found=last_lines(log),
            do="check the network and the disk (about 4 GB), then run it again",
        )


def _describe(engine: str, locks: list[Path], location: Path, why: str) -> Image:
    python = location / "bin" / "python"
    listed = subprocess.run([str(python), "-c", script(engine)], capture_output=True, text=True, check=False)
    if listed.returncode:
        raise EngineError(
            "the engine's environment is not usable",
            where=str(location),
            expected="kldaudit and the system's libnuma.so.1 load in it",
            found=listed.stderr.strip().splitlines()[-1] if listed.stderr.strip() else "no output",
            do=f"install libnuma1 (Debian) if it is missing, else remove {location}; then run it again",
        )
    listing = json.loads(listed.stdout)
    return Image(
        parents=digests_of(**{lock.stem: lock for lock in locks}),
        runtime="venv",
        why=why,
        engine=engine,
        python=listing["python"],
        architecture=listing["architecture"],
        location=str(location),
        interpreter="bin/python",
        base="none: the host's system",
        locks={lock.name: file_sha256(lock) for lock in locks},
        packages=len(listing["packages"]),
        digest=packages_digest(listing),
        built_with="pip",
    )
