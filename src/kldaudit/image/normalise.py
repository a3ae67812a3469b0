"""Make an image's bits depend on its content alone: times clamped, owners numeric, creation times fixed.

The classic builder stamps the time of building into files and configuration. Here every layer's tar and the
configuration are written again, so that the same files give the same layer digests (diffIDs) and the same image ID, on
any engine.
"""

import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import docker

BLOCK = 2**20


class _Hashing:
    """A file for writing that hashes what passes."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.sha256 = hashlib.sha256()

    def tell(self) -> int:
        return self.file.tell()

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        return self.file.write(data)


def normalise_tar(source: IO[bytes], target: Path, epoch: int) -> str:
    """Copy a tar in its order, with times clamped to ``epoch`` (seconds) and numeric owners only.

    Returns:
        SHA-256 of the written tar: its diffID as a layer.
    """
    with target.open("wb") as file:
        hashing = _Hashing(file)
        sink: Any = hashing
        with (
            tarfile.TarFile(fileobj=source, copybufsize=BLOCK) as old,
            tarfile.TarFile(fileobj=sink, mode="w", format=tarfile.PAX_FORMAT, copybufsize=BLOCK) as new,
        ):
            for member in old:
                member.mtime = min(int(member.mtime), epoch)
                member.uname = member.gname = ""
                times = ("mtime", "atime", "ctime", "LIBARCHIVE.creationtime")
                member.pax_headers = {key: value for key, value in member.pax_headers.items() if key not in times}
                new.addfile(member, old.extractfile(member) if member.isreg() else None)
    return hashing.sha256.hexdigest()


def load_layers(client: "docker.DockerClient", layers: list[Path], config: dict[str, Any]) -> str:
    """Load an image from its layers' tars and its configuration; returns its ID."""
    content = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
    image = hashlib.sha256(content).hexdigest()
    manifest = [
        {"Config": f"{image}.json", "RepoTags": None, "Layers": [f"{number}.tar" for number in range(len(layers))]}
    ]
    with _piped(layers, {f"{image}.json": content, "manifest.json": json.dumps(manifest).encode()}) as archive:
        client.images.load(archive)
    return f"sha256:{image}"


@contextmanager
def _piped(layers: list[Path], texts: dict[str, bytes]) -> Iterator[IO[bytes]]:
    """An archive as ``docker load`` reads it, made while it is read: it is never on the disk."""
    read, write = os.pipe()

    def fill() -> None:
        try:
            with os.fdopen(write, "wb") as file, tarfile.open(fileobj=file, mode="w|") as archive:
                for number, layer in enumerate(layers):
                    archive.add(layer, f"{number}.tar")
                for name, content in texts.items():
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        except BrokenPipeError:
            return  # the engine stopped reading: it says why itself

    filling = threading.Thread(target=fill, daemon=True)
    filling.start()
    try:
        with os.fdopen(read, "rb") as file:
            yield file
    finally:
        filling.join()


def timestamp(epoch: int) -> str:
    """Seconds since 1970 as an image's configuration writes them."""
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def normalise_image(client: "docker.DockerClient", image: str, epoch: int, keep: list[str], folder: Path) -> str:
    """Write an image again with its times fixed, and load it.

    Args:
        client: the Docker engine.
        image: ID of the image as it was built.
        epoch: seconds since 1970 that times are clamped to.
        keep: diffIDs (``sha256:…``) of the base's layers, which stay as they are.
        folder: an empty folder with room for twice the image.

    Returns:
        ID of the normalised image.
    """
    saved = folder / "saved.tar"
    with saved.open("wb") as file:
        for chunk in client.images.get(image).save(chunk_size=BLOCK):
            file.write(chunk)
    layers, digests = [], []
    with tarfile.open(saved) as archive:
        manifest = json.load(_member(archive, "manifest.json"))[0]
        config = json.load(_member(archive, manifest["Config"]))
        for number, (name, digest) in enumerate(zip(manifest["Layers"], config["rootfs"]["diff_ids"], strict=True)):
            layer = folder / f"layer{number}.tar"
            if digest in keep:
                with layer.open("wb") as file:
                    shutil.copyfileobj(_member(archive, name), file, BLOCK)
                digests.append(digest)
            else:
                digests.append(f"sha256:{normalise_tar(_member(archive, name), layer, epoch)}")
            layers.append(layer)
    saved.unlink()
    return load_layers(client, layers, _fixed(config, digests, epoch))


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    found = archive.extractfile(name)
    assert found is not None
    return found


def _fixed(config: dict[str, Any], digests: list[str], epoch: int) -> dict[str, Any]:
    """The configuration without what names the build: times, containers, the builder's own host name."""
    kept = {key: config["config"].get(key) for key in ("Env", "Cmd", "Entrypoint", "WorkingDir", "User", "Labels")}
    history = [
        {"created": timestamp(epoch), "created_by": one.get("created_by", ""), "empty_layer": True}
        if one.get("empty_layer")
        else {"created": timestamp(epoch), "created_by": one.get("created_by", "")}
        for one in config.get("history", [])
    ]
    return {
        "architecture": config["architecture"],
        "os": config["os"],
        "created": timestamp(epoch),
        "config": {key: value for key, value in kept.items() if value},
        "rootfs": {"type": "layers", "diff_ids": digests},
        "history": history,
    }
