"""Images that somebody else made, from a real registry on loopback."""

import io
import json
import shutil
import socket
import subprocess
import tarfile
import time
from pathlib import Path

import docker
import pytest
from docker_engine import ROOT

from kldaudit.digests import file_sha256
from kldaudit.errors import EngineError
from kldaudit.image.adopt import _split, adopt
from kldaudit.image.base import ensure_base
from kldaudit.image.normalise import load_layers

pytestmark = pytest.mark.container

LOCK = ROOT / "envs/capture.txt"


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """Address of a registry."""
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = folder / "config.yml"
    settings.write_text(
        f"version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {folder}/data\n  delete: {{enabled: true}}\n"
        f"http:\n  addr: 127.0.0.1:{port}\n"
    )
    program = shutil.which("docker-registry") or shutil.which("registry")
    assert program is not None
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "serve", settings], stdout=log, stderr=subprocess.STDOUT)
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"127.0.0.1:{port}"
    process.terminate()
    process.wait()


def made(engine, image, folder: Path, architecture: str = "amd64", vllm: str = "one") -> str:
    """An image with a Python and what vLLM requires, and a package of the name vllm in it."""
    added = folder / "added.tar"
    with tarfile.open(added, "w") as file:
        member = tarfile.TarInfo("opt/engine/lib/python3.11/site-packages/vllm/__init__.py")
        member.size = len(vllm)
        file.addfile(member, io.BytesIO(vllm.encode()))
    saved = folder / "saved.tar"
    with saved.open("wb") as file:
        for chunk in engine.images.get(image.location).save():
            file.write(chunk)
    layers = []
    with tarfile.open(saved) as archive:
        manifest = json.load(archive.extractfile("manifest.json"))[0]
        for number, name in enumerate(manifest["Layers"]):
            layers.append(folder / f"{number}.tar")
            layers[-1].write_bytes(archive.extractfile(name).read())
    saved.unlink()
    layers.append(added)
    digests = [f"sha256:{file_sha256(one)}" for one in layers]
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Env": ["PATH=/opt/engine/bin:/usr/bin:/bin"], "Entrypoint": ["/bin/false"]},
        "rootfs": {"type": "layers", "diff_ids": digests},
        "history": [{"created_by": "a layer"} for _ in layers],
    }
    return load_layers(engine, layers, config)


def pushed(engine, image: str, name: str, tag: str) -> str:
    """Push an image; returns its digest in the registry."""
    engine.images.get(image).tag(name, tag)
    list(engine.images.push(name, tag, stream=True, decode=True))
    return str(engine.images.get_registry_data(f"{name}:{tag}").id)


@pytest.fixture(scope="module")
def published(engine, image, registry, tmp_path_factory):
    vllm = made(engine, image, tmp_path_factory.mktemp("made"))
    name = f"{registry}/lab/vllm"
    return name, vllm, pushed(engine, vllm, name, "nightly")


def take(reference: str, folder: Path):
    return adopt(reference, LOCK, folder / "beside", ROOT, folder / "log", "the tests say so")


@pytest.fixture(scope="module")
def adopted(engine, published, tmp_path_factory):
    name, vllm, digest = published
    engine.images.remove(vllm, force=True)
    return take(f"{name}:nightly@{digest}", tmp_path_factory.mktemp("adopted"))


def test_an_image_is_pulled_by_digest_and_used_as_it_is(adopted, published):
    _, vllm, digest = published
    assert adopted.location == vllm
    assert adopted.reference.endswith(f":nightly@{digest}")
    assert adopted.reference_checked == "the tag nightly points to this digest"


def test_its_python_and_what_it_lacks_are_found(adopted):
    assert adopted.interpreter == "/opt/engine/bin/python3"
    beside = {path.name for path in Path(adopted.overlay).iterdir()}
    assert {"kldaudit", "h5py", "hdf5plugin"} <= beside
    assert "numpy" not in beside  # it is vLLM's own requirement, of whatever version


def test_a_tag_that_has_moved_is_refused_and_the_digest_alone_is_not(
    engine, image, adopted, published, tmp_path, tmp_path_factory
):
    name, _, digest = published
    other = made(engine, image, tmp_path_factory.mktemp("other"), vllm="two")
    moved = pushed(engine, other, name, "nightly")
    with pytest.raises(EngineError, match=rf"(?s)the tag has moved.*expected: {digest}.*found: {moved}"):
        take(f"{name}:nightly@{digest}", tmp_path)
    assert take(f"{name}@{digest}", tmp_path).reference_checked == "named by digest alone"


def test_where_the_registry_cannot_be_asked_the_image_that_is_here_is_used_and_the_sheet_says_so(
    engine, adopted, published, tmp_path, monkeypatch
):
    name, _, digest = published

    def unreachable(*_, **__):
        raise docker.errors.APIError("connection refused")

    monkeypatch.setattr(docker.models.images.ImageCollection, "get_registry_data", unreachable)
    found = take(f"{name}:nightly@{digest}", tmp_path)
    assert found.location == adopted.location
    assert found.reference_checked.startswith("unknown: the registry did not say where the tag points")


@pytest.mark.parametrize(
    "reference", ["vllm:nightly", "vllm@sha256:12", "@sha256:" + "0" * 64, "a b@sha256:" + "0" * 64]
)
def test_an_image_without_its_digest_is_refused(tmp_path, reference):
    with pytest.raises(EngineError, match="an image is adopted by its digest"):
        take(reference, tmp_path)


def test_an_image_that_is_in_no_registry_is_refused(tmp_path):
    with pytest.raises(EngineError, match="the image cannot be pulled"):
        take(f"127.0.0.1:9/lab/vllm:nightly@sha256:{'1' * 64}", tmp_path)


def test_an_image_for_another_architecture_is_refused(engine, image, registry, tmp_path):
    (tmp_path / "made").mkdir()
    other = made(engine, image, tmp_path / "made", architecture="s390x")
    name = f"{registry}/lab/other"
    digest = pushed(engine, other, name, "1")
    with pytest.raises(EngineError, match=r"(?s)another architecture.*expected: amd64.*found: s390x"):
        take(f"{name}:1@{digest}", tmp_path)


def test_an_image_without_vllm_is_refused(engine, base, registry, tmp_path):
    name = f"{registry}/lab/plain"
    digest = pushed(engine, base.image, name, "1")
    with pytest.raises(EngineError, match=r"(?s)cannot be adopted.*no Python in it finds vllm"):
        take(f"{name}:1@{digest}", tmp_path)


def test_a_base_is_pulled_by_digest(engine, base, registry, tmp_path):
    name = f"{registry}/lab/base"
    digest = pushed(engine, base.image, name, "1")
    pinned = tmp_path / "base.json"
    pinned.write_text(json.dumps({"pull": f"{name}@{digest}"}))
    found = ensure_base(engine, pinned, "auto", tmp_path, tmp_path / "log")
    assert found.image == base.image
    assert found.words == f"pulled: {name}@{digest}"
    assert found.epoch == base.epoch


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("vllm/vllm-openai:nightly", ("vllm/vllm-openai", "nightly")),
        ("127.0.0.1:5000/lab/vllm", ("127.0.0.1:5000/lab/vllm", None)),
        ("127.0.0.1:5000/lab/vllm:1", ("127.0.0.1:5000/lab/vllm", "1")),
        ("vllm", ("vllm", None)),
    ],
)
def test_name_and_tag_are_told_apart(named, expected):
    assert _split(named) == expected
