"""The base file system of an image: pulled by digest, or bootstrapped from Debian's packages at a fixed time.

The lock (``containers/base/*.json``) says which. A bootstrapped base is identified by the SHA-256 of its normalised
tar; that of the lock was made from the snapshot service's archive.
"""

import json
import platform
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from kldaudit.errors import EngineError
from kldaudit.image.normalise import load_layers, normalise_tar, timestamp
from kldaudit.records import Frozen, read_json
from kldaudit.runtime.run import last_lines

if TYPE_CHECKING:
    import docker

SNAPSHOT = "http://snapshot.debian.org/archive"
SYSTEM_SOURCES = (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list"))
PATH = "PATH=/opt/engine/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Mirror = Literal["snapshot", "system", "auto"]


class Bootstrap(Frozen):
    """A base made from Debian packages."""

    suite: str
    snapshot: str = Field(pattern=r"^\d{8}T\d{6}Z$", description="State of the archive, UTC: YYYYMMDDTHHMMSSZ.")
    include: list[str] = Field(description="Packages beside the minimal system.")
    packages: dict[str, str] = Field(default_factory=dict, description="Version of every package, as locked.")
    sha256: str | None = Field(None, description="SHA-256 of the normalised tar, as locked.")

    @property
    def epoch(self) -> int:
        """The snapshot's time in seconds since 1970: what file times are clamped to."""
        return int(datetime.strptime(self.snapshot, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp())


class BaseLock(Frozen):
    """Which base: ``pull`` or ``bootstrap``."""

    pull: str | None = Field(None, pattern=r"^[^@\s]+@sha256:[0-9a-f]{64}$", description="NAME@sha256:DIGEST.")
    bootstrap: Bootstrap | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.pull is None) == (self.bootstrap is None):
            raise ValueError("give either pull or bootstrap")
        return self


@dataclass(frozen=True)
class Base:
    """A base image in the Docker engine."""

    image: str
    words: str
    epoch: int


def read_lock(path: Path) -> BaseLock:
    """Read a base's lock."""
    try:
        return BaseLock.model_validate(read_json(path))
    except ValueError as error:
        raise EngineError(
            "the base's lock is not valid",
            where=str(path),
            expected='{"pull": "NAME@sha256:DIGEST"} or {"bootstrap": {suite, snapshot, include, packages, sha256}}',
            found=" ".join(str(error).split())[:300],
            do="correct it, or make it again with `kldaudit image lock`",
        ) from error


def ensure_base(client: "docker.DockerClient", lock_path: Path, mirror: Mirror, folder: Path, log: Path) -> Base:
    """The base in the Docker engine, pulled or bootstrapped.

    Args:
        client: the Docker engine.
        lock_path: the base's lock.
        mirror: where Debian's packages come from; ``auto`` is the snapshot service if it answers, else the system's.
        folder: a temporary folder.
        log: takes the tools' output.

    Raises:
        EngineError: it cannot be had, or the snapshot's packages do not give the locked digest.
    """
    lock = read_lock(lock_path)
    if lock.pull is not None:
        return _pulled(client, lock.pull)
    assert lock.bootstrap is not None
    made = bootstrap(lock.bootstrap, mirror, folder, log)
    config = {
        "architecture": docker_architecture(),
        "os": "linux",
        "created": timestamp(lock.bootstrap.epoch),
        "config": {"Env": [PATH], "Cmd": ["/bin/sh"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{made.sha256}"]},
        "history": [{"created": timestamp(lock.bootstrap.epoch), "created_by": made.words}],
    }
    return Base(load_layers(client, [made.tar], config), made.words, lock.bootstrap.epoch)


def docker_architecture() -> str:
    """This machine's architecture as images name it."""
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def _pulled(client: "docker.DockerClient", reference: str) -> Base:
    import docker.errors

    try:
        image = client.images.pull(reference)
    except docker.errors.DockerException as error:
        raise EngineError(
            "the base cannot be pulled",
            where=reference,
            expected="an image of this digest in the registry",
            found=" ".join(str(error).split())[:300],
            do="check the name, the digest and the network",
        ) from error
    created = datetime.fromisoformat(str(image.attrs["Created"])[:19]).replace(tzinfo=UTC)
    return Base(str(image.id), f"pulled: {reference}", int(created.timestamp()))


@dataclass(frozen=True)
class Bootstrapped:
    """A bootstrapped root file system."""

    tar: Path
    sha256: str
    packages: dict[str, str]
    words: str


def bootstrap(wanted: Bootstrap, mirror: Mirror, folder: Path, log: Path) -> Bootstrapped:
    """Make a root file system with mmdebstrap and compare it with the lock."""
    program = shutil.which("mmdebstrap")
    if program is None:
        raise EngineError(
            "the base cannot be bootstrapped",
            where="PATH",
            expected="the program mmdebstrap",
            found="no such program",
            do="install it (Debian: apt-get install mmdebstrap), or lock a base to pull",
        )
    source = _chosen(wanted, mirror)
    raw, tar = folder / "raw.tar", folder / "base.tar"
    command = [
        program, "--variant=minbase", "--format=tar",
        '--aptopt=APT::Sandbox::User "root"',  # else owners in it depend on where the temporary folder lies
         f"--include={','.join(wanted.include)}",
        *(f"--customize-hook={line}" for line in _clean_up(wanted)),
        wanted.suite, str(raw), *_sources(wanted, source),
    ]  # fmt: skip
    with log.open("a", encoding="utf-8") as output:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                "SOURCE_DATE_EPOCH": str(wanted.epoch),
                "TMPDIR": str(folder),
            },
            check=False,
        )
    if done.returncode:
        raise EngineError(
            "the base cannot be bootstrapped",
            where=f"mmdebstrap, log {log}",
            expected="a root file system",
            found=last_lines(log),
            do="read the log: the disk may be full, or the archive not reachable (--mirror system takes the host's)",
        )
    with raw.open("rb") as file:
        sha256 = normalise_tar(file, tar, wanted.epoch)
    raw.unlink()
    with tarfile.open(tar) as archive:
        packages = _versions(archive.extractfile("./var/lib/dpkg/status"))
    return Bootstrapped(tar, sha256, packages, _compare(wanted, source, sha256, packages))


def _chosen(wanted: Bootstrap, mirror: Mirror) -> Literal["snapshot", "system"]:
    if mirror != "auto":
        return mirror
    url = f"{SNAPSHOT}/debian/{wanted.snapshot}/dists/{wanted.suite}/Release"
    try:
        with urllib.request.urlopen(url, timeout=15):  # noqa: S310 - the address is ours
            return "snapshot"
    except (urllib.error.URLError, OSError):
        return "system"


def _sources(wanted: Bootstrap, source: Literal["snapshot", "system"]) -> list[str]:
    if source == "snapshot":
        return _snapshot_lines(wanted)
    found = [str(path) for path in SYSTEM_SOURCES if path.exists() and path.stat().st_size]
    if not found:
        raise EngineError(
            "the system has no Debian sources to bootstrap from",
            where=" or ".join(str(path) for path in SYSTEM_SOURCES),
            expected="Debian's archive in apt's sources",
            found="neither file",
            do="use --mirror snapshot, or lock a base to pull",
        )
    return found[:1]


def _snapshot_lines(wanted: Bootstrap) -> list[str]:
    return [
        f"deb [check-valid-until=no] {SNAPSHOT}/{archive}/{wanted.snapshot} {suite} main"
        for archive, suite in (
            ("debian", wanted.suite),
            ("debian", f"{wanted.suite}-updates"),
            ("debian-security", f"{wanted.suite}-security"),
        )
    ]


def _clean_up(wanted: Bootstrap) -> list[str]:
    """Commands that leave nothing of the host and of the moment in the root file system ``$1``."""
    lines = "\\n".join(_snapshot_lines(wanted))
    return [
        'rm -rf "$1"/etc/apt/sources.list.d/* "$1"/etc/resolv.conf "$1"/etc/hostname "$1"/var/log/* '
        '"$1"/var/cache/* "$1"/var/lib/apt/lists/*',
        f'printf "{lines}\\n" > "$1"/etc/apt/sources.list',
        ': > "$1"/etc/machine-id',
    ]


def _versions(status: IO[bytes] | None) -> dict[str, str]:
    assert status is not None
    versions, name = {}, ""
    for line in status.read().decode().splitlines():
        key, _, value = line.partition(": ")
        if key == "Package":
            name = value
        if key == "Version":
            versions[name] = value
    return dict(sorted(versions.items()))


def _compare(wanted: Bootstrap, source: Literal["snapshot", "system"], sha256: str, packages: dict[str, str]) -> str:
    """The base in words; from the snapshot it has to be the locked one, from the system's mirror it may differ."""
    names = sorted({*wanted.packages, *packages})
    differing = [
        f"{name} {packages.get(name, 'missing')} for {wanted.packages.get(name, 'none')}"
        for name in names
        if packages.get(name) != wanted.packages.get(name)
    ]
    origin = f"the snapshot {wanted.snapshot}" if source == "snapshot" else "the system's mirror"
    words = f"Debian {wanted.suite}, bootstrapped from {origin}, {len(packages)} packages, tar sha256:{sha256}"
    if wanted.sha256 == sha256:
        return f"{words}: as locked"
    if wanted.sha256 is None:
        return f"{words}: not locked"
    found = f"{len(differing)} of {len(names)} packages differ: {', '.join(differing[:8])}" if differing else (
        "the same packages, other files"
    )  # fmt: skip
    if source == "snapshot":
        raise EngineError(
            "the base is not the locked one",
            where=f"Debian {wanted.suite}, snapshot {wanted.snapshot}",
            expected=f"sha256:{wanted.sha256}",
            found=f"sha256:{sha256}; {found}",
            do="find out what changed; `kldaudit image lock` writes a new lock",
        )
    return f"{words}: NOT AS LOCKED ({found})"


def lock_base(path: Path, mirror: Mirror, folder: Path, log: Path) -> dict[str, Any]:
    """Bootstrap a base and write its packages and digest into its lock; returns the lock's content."""
    lock = read_lock(path)
    if lock.bootstrap is None:
        raise EngineError(
            "a pulled base needs no lock of its packages",
            where=str(path),
            expected="a base to bootstrap",
            found=f"pull: {lock.pull}",
            do="write the digest that is wanted into the file",
        )
    unlocked = lock.bootstrap.model_copy(update={"packages": {}, "sha256": None})
    made = bootstrap(unlocked, mirror, folder, log)
    locked = unlocked.model_copy(update={"packages": made.packages, "sha256": made.sha256})
    return {"bootstrap": json.loads(locked.model_dump_json())}
