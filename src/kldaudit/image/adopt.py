"""Adopt an existing image by digest: nothing in it is changed, what capturing needs is mounted beside it."""

import json
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kldaudit.digests import file_sha256
from kldaudit.errors import EngineError
from kldaudit.image.base import docker_architecture
from kldaudit.image.docker import ask, own_wheel, run_pip
from kldaudit.image.workspace import workspace
from kldaudit.records import digests_of
from kldaudit.runtime.docker import docker_client
from kldaudit.runtime.record import Image

if TYPE_CHECKING:
    import docker

EPOCH = 315532800
"""1980-01-01, the earliest time that a wheel can carry: an overlay has no time of its own."""

BESIDE = ("h5py", "hdf5plugin")
"""What the capture code imports in the engine besides vLLM's own requirements."""

FIND = """
for python in "$(command -v python3)" /opt/*/bin/python3 "$(command -v python)"; do
  [ -x "$python" ] && "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)' && break
  python=
done
[ -n "$python" ] || { echo "no Python in it finds vllm" >&2; exit 1; }
"$python" -c '
import importlib.util as u, json, sys
print(json.dumps({"interpreter": sys.executable, "python": "%d.%d" % sys.version_info[:2],
                  "missing": [name for name in sys.argv[1:] if u.find_spec(name) is None]}))' "$@"
"""
"""Finds the Python that has vLLM, and what it lacks of the modules that are named."""


def adopt(reference: str, lock: Path, location: Path, source: Path, log: Path, why: str) -> Image:
    """Take an image by digest and put beside it what capturing needs.

    Args:
        reference: NAME[:TAG]@sha256:DIGEST.
        lock: hash-pinned lock of what may be missing in it.
        location: folder of what is mounted beside it.
        source: folder of kldaudit's own source.
        log: takes the tools' output.
        why: why this runtime.

    Raises:
        EngineError: it is not to be had, its tag has moved, it is for another architecture, or it has no vLLM.
    """
    if not re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", reference):
        raise EngineError(
            "an image is adopted by its digest",
            where=reference,
            expected="NAME[:TAG]@sha256: and the digest's 64 hexadecimal digits",
            found="no such digest",
            do="look the digest up (docker buildx imagetools inspect NAME:TAG) and write it behind the name",
        )
    client = docker_client()
    named, _, digest = reference.partition("@")
    name, tag = _split(named)
    checked = _check_tag(client, name, tag, digest)
    image = _get(client, f"{name}@{digest}")
    architecture = image.attrs["Architecture"]
    if architecture != docker_architecture():
        raise EngineError(
            "the image is for another architecture",
            where=reference,
            expected=docker_architecture(),
            found=str(architecture),
            do="take the digest of this architecture's image, not of another one",
        )
    found = _find(client, image.id, reference)
    with workspace(location.parent) as folder:
        overlay = folder / "overlay"
        overlay.mkdir()
        if found["missing"]:
            _download(lock, found, folder, log)
        own_wheel(source, folder, EPOCH, log)
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(overlay)
        shutil.rmtree(location, ignore_errors=True)
        overlay.rename(location)
    listing = ask(client, image.id, found["interpreter"], "adopted", location)
    return Image(
        parents=digests_of(**{lock.stem: lock}),
        runtime="docker",
        why=why,
        engine=named,
        python=listing["python"],
        architecture=listing["architecture"],
        location=image.id,
        interpreter=found["interpreter"],
        overlay=str(location),
        locks={lock.name: file_sha256(lock)},
        packages=len(listing["packages"]),
        base=f"adopted as it is: {reference}",
        digest=image.id.removeprefix("sha256:"),
        layers=[str(layer) for layer in image.attrs["RootFS"]["Layers"]],
        reference=reference,
        reference_checked=checked,
        built_with=f"somebody else; run by Docker Engine {client.version()['Version']}",
    )


def _split(named: str) -> tuple[str, str | None]:
    """Name and tag; a colon before the last slash belongs to a registry's port."""
    head, slash, last = named.rpartition("/")
    last, _, tag = last.partition(":")
    return f"{head}{slash}{last}", tag or None


def _check_tag(client: "docker.DockerClient", name: str, tag: str | None, digest: str) -> str:
    """Whether the tag still points to the digest; a tag that moved is refused."""
    import docker.errors

    if tag is None:
        return "named by digest alone"
    try:
        found = client.images.get_registry_data(f"{name}:{tag}").id
    except docker.errors.DockerException as error:
        return f"unknown: the registry did not say where the tag points: {' '.join(str(error).split())[:200]}"
    if found != digest:
        raise EngineError(
            "the tag has moved since it was locked",
            where=f"{name}:{tag}",
            expected=digest,
            found=str(found),
            do="decide which image is meant: name it by digest alone, or lock the new digest",
        )
    return f"the tag {tag} points to this digest"


def _get(client: "docker.DockerClient", pinned: str) -> Any:
    """The image, from the engine if it is there, else from the registry."""
    import docker.errors

    try:
        return client.images.get(pinned)
    except docker.errors.ImageNotFound:
        pass  # not here yet
    try:
        return client.images.pull(pinned)
    except docker.errors.DockerException as error:
        raise EngineError(
            "the image cannot be pulled",
            where=pinned,
            expected="an image of this digest in the registry",
            found=" ".join(str(error).split())[:300],
            do="check the name, the digest and the network; registries delete nightly images after some days",
        ) from error


def _find(client: "docker.DockerClient", image: str, reference: str) -> dict[str, Any]:
    import docker.errors

    try:
        output = client.containers.run(
            image, ["-c", FIND, "find", *BESIDE], entrypoint=["/bin/sh"], network_mode="none", remove=True
        )
    except docker.errors.DockerException as error:
        raise EngineError(
            "the image cannot be adopted",
            where=reference,
            expected="an image with a Python that finds vllm",
            found=" ".join(str(error).split())[-300:],
            do="name an image that has vLLM in it",
        ) from error
    return dict(json.loads(output.splitlines()[-1]))


def _download(lock: Path, found: dict[str, Any], folder: Path, log: Path) -> None:
    """Fetch what the image lacks, for its version of Python."""
    wanted = folder / "missing.txt"
    blocks = lock.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    lines = [line for line in blocks if line.partition("==")[0] in found["missing"]]
    wanted.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--require-hashes",
               "--no-deps", "--only-binary", ":all:", "--python-version", found["python"],
               *(f"--platform=manylinux_2_{minor}_{_machine()}" for minor in (17, 28, 34)),
               f"--platform=manylinux2014_{_machine()}", "-d", str(folder), "-r", str(wanted)]  # fmt: skip
    run_pip(command, log, f"{', '.join(found['missing'])} for Python {found['python']}, by hash")


def _machine() -> str:
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(docker_architecture(), docker_architecture())
