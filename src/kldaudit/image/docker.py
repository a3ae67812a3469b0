"""A Docker image from locks alone: base file system, hash-locked wheels, kldaudit itself; built without a network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kldaudit.digests import file_sha256
from kldaudit.errors import EngineError
from kldaudit.image.base import Base, Mirror, ensure_base
from kldaudit.image.listing import packages_digest, script
from kldaudit.image.normalise import normalise_image
from kldaudit.image.workspace import workspace
from kldaudit.records import digests_of
from kldaudit.runtime.docker import docker_client
from kldaudit.runtime.record import Image
from kldaudit.runtime.run import last_lines

if TYPE_CHECKING:
    import docker

INTERPRETER = "/opt/engine/bin/python"
LABEL = "kldaudit.build"


def build_docker(
    engine: str, locks: list[Path], recipe: Path, base_lock: Path, mirror: Mirror, source: Path, work: Path, log: Path,
    why: str,
) -> Image:  # fmt: skip
    """Build an image, normalise it, and say what is in it.

    Args:
        engine: name of the engine's lock.
        locks: requirement files with hashes; together they are complete.
        recipe: the Dockerfile.
        base_lock: the base's lock.
        mirror: where the base's packages come from.
        source: folder of kldaudit's own source.
        work: folder for temporary files, with room for three times the image.
        log: takes the tools' output.
        why: why this runtime.

    Raises:
        EngineError: no engine, a lock that does not hold, or a build that fails; nothing half-made is left behind.
    """
    client = docker_client()
    import docker.errors

    if not recipe.is_file():
        raise EngineError(
            "there is no recipe for this engine's image",
            where=str(recipe),
            expected="a Dockerfile",
            found="no such file",
            do="name an engine that has one under containers/",
        )
    log.write_text("", encoding="utf-8")
    with workspace(work) as folder:
        try:
            image, base = _made(client, locks, recipe, base_lock, mirror, source, folder, log)
        except docker.errors.DockerException as error:
            raise EngineError(
                "the Docker engine did not take the image",
                where=f"the Docker engine, log {log}",
                expected="room for the base and for the finished image",
                found=" ".join(str(error).split())[-300:],
                do="free some space where the engine keeps its images, then run it again",
            ) from error
    # a name, so that the engine's own clean-up does not take it for a left-over
    client.images.get(image).tag(f"kldaudit/{engine}", image.removeprefix("sha256:")[:12])
    return describe(client, image, engine, locks, base.words, why)


def _made(
    client: "docker.DockerClient", locks: list[Path], recipe: Path, base_lock: Path, mirror: Mirror, source: Path,
    folder: Path, log: Path,
) -> tuple[str, Base]:  # fmt: skip
    """Bring everything together, build, normalise; returns the image's ID and its base."""
    context = folder / "context"
    (context / "wheels").mkdir(parents=True)
    (context / "locks").mkdir()
    for lock in locks:
        download(lock, context / "wheels", log)
        (context / "locks" / lock.name).write_text(without_index(lock), encoding="utf-8")
    base = ensure_base(client, base_lock, mirror, folder, log)
    own_wheel(source, context / "kldaudit", base.epoch, log)
    shutil.copy(recipe, context / "Dockerfile")
    built = _build(client, context, base.image, base.epoch, log)
    shutil.rmtree(context)
    try:
        keep = client.images.get(base.image).attrs["RootFS"]["Layers"]
        return normalise_image(client, built, base.epoch, keep, folder), base
    finally:
        if not client.images.get(built).tags:
            client.images.remove(built, noprune=True)


def download(lock: Path, wheels: Path, log: Path) -> None:
    """Fetch every wheel of a lock, by hash; a lock that names an index of its own is fetched by itself."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--require-hashes",
               "--no-deps", "--only-binary", ":all:", "-d", str(wheels), "-r", str(lock)]  # fmt: skip
    run_pip(command, log, f"a wheel for every line of {lock.name}, with one of its hashes")


def without_index(lock: Path) -> str:
    """A lock's requirements and hashes, without the indexes that it names."""
    lines = lock.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(("--extra-index-url", "--index-url")))


def own_wheel(source: Path, folder: Path, epoch: int, log: Path) -> None:
    """Build kldaudit's own wheel; the same source gives the same bytes."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps",
               "--no-build-isolation", "-w", str(folder), str(source)]  # fmt: skip
    run_pip(command, log, "kldaudit's own wheel", SOURCE_DATE_EPOCH=str(epoch))


def run_pip(command: list[str], log: Path, expected: str, **env: str) -> None:
    """Run pip; its output goes to the log, and an error into one message."""
    with log.open("a", encoding="utf-8") as output:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            check=False,
        )
    if done.returncode:
        raise EngineError(
            "the image's wheels cannot be brought together",
            where=f"{' '.join(command[1:4])}, log {log}",
            expected=expected,
            found=last_lines(log),
            do="check the lock, the network and the disk, then run it again",
        )


def _build(client: "docker.DockerClient", context: Path, base: str, epoch: int, log: Path) -> str:
    """Build with the engine's classic builder, without a network; returns the image's ID."""
    import docker.errors

    built = error = None
    try:
        stream = client.api.build(
            path=str(context),
            buildargs={"BASE": base, "SOURCE_DATE_EPOCH": str(epoch)},
            network_mode="none",
            rm=True,
            forcerm=True,
            labels={LABEL: "1"},
            decode=True,
        )
        with log.open("a", encoding="utf-8") as output:
            for line in stream:
                output.write(line.get("stream", ""))
                built = line.get("aux", {}).get("ID", built)
                error = line.get("error", error)
    except (docker.errors.DockerException, OSError) as failure:
        error = str(failure)
    if error is not None or built is None:
        raise EngineError(
            "the image cannot be built",
            where=f"Dockerfile, log {log}",
            expected="an image from the wheels",
            found=" ".join((error or last_lines(log)).split())[-400:],
            do="read the log; free some space if a disk is full (an image needs four times its size while it is built)",
        )
    return str(built)


def describe(client: "docker.DockerClient", image: str, engine: str, locks: list[Path], base: str, why: str) -> Image:
    """What an image of ours holds, asked from the inside."""
    listing = ask(client, image, INTERPRETER, engine)
    facts = client.images.get(image).attrs
    return Image(
        parents=digests_of(**{lock.stem: lock for lock in locks}),
        runtime="docker",
        why=why,
        engine=engine,
        python=listing["python"],
        architecture=listing["architecture"],
        location=image,
        interpreter=INTERPRETER,
        locks={lock.name: file_sha256(lock) for lock in locks},
        packages=len(listing["packages"]),
        base=base,
        digest=image.removeprefix("sha256:"),
        layers=[str(layer) for layer in facts["RootFS"]["Layers"]],
        built_with=f"Docker Engine {client.version()['Version']}, classic builder; packages "
        f"sha256:{packages_digest(listing)}",
    )


def ask(
    client: "docker.DockerClient", image: str, interpreter: str, engine: str, overlay: Path | None = None
) -> dict[str, Any]:
    """What Python in an image says of itself and of its packages."""
    import docker.errors
    import docker.types

    mounts = []
    environment = {"HOME": "/tmp"}  # noqa: S108 - inside the container
    if overlay is not None:
        place = str(overlay.absolute())
        mounts = [docker.types.Mount(target=place, source=place, type="bind", read_only=True)]
        environment["PYTHONPATH"] = place
    try:
        output = client.containers.run(
            image,
            ["-c", script(engine)],
            entrypoint=[interpreter],
            network_mode="none",
            read_only=True,
            tmpfs={"/tmp": "exec"},  # noqa: S108 - inside the container
            mounts=mounts,
            environment=environment,
            remove=True,
        )
    except docker.errors.DockerException as error:
        raise EngineError(
            "the image is not usable",
            where=image,
            expected=f"{interpreter} runs in it and finds kldaudit",
            found=" ".join(str(error).split())[-300:],
            do="read the log of its build; remove the image and build it again",
        ) from error
    found = json.loads(output.splitlines()[-1])
    assert isinstance(found, dict)
    return found
