"""A Docker engine of one's own, and where the locks lie."""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker

from kldaudit.image.docker import build_docker
from kldaudit.runtime.docker import docker_client
from kldaudit.runtime.record import Image

ROOT = Path(__file__).parents[2]
BASE_LOCK = ROOT / "containers/base/cpu.json"
RECIPE = ROOT / "containers/vllm-cpu/Dockerfile"

SMALL = ("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection", "numpy")
"""What kldaudit's own inventory needs: the smallest engine that there can be."""


def build(lock: Path, work: Path, recipe: Path = RECIPE, base: Path = BASE_LOCK) -> Image:
    """Build an image from a lock."""
    return build_docker("small", [lock], recipe, base, "system", ROOT, work, work.parent / "log", "the tests say so")


@contextmanager
def started() -> Iterator[docker.DockerClient]:
    """A Docker engine of its own, with nothing in it, for as long as it is needed."""
    folder = Path(tempfile.mkdtemp(prefix="docker-"))  # a short path: its sockets lie deep below
    socket = f"unix://{folder}/socket"
    command = [
        "dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid",
        "--host", socket, "--bridge=none", "--iptables=false",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    before = os.environ.get("DOCKER_HOST")
    os.environ["DOCKER_HOST"] = socket
    try:
        for _ in range(120):
            if process.poll() is not None or _answers(socket):
                break
            time.sleep(0.25)
        yield docker_client()
    finally:
        os.environ.pop("DOCKER_HOST")
        if before is not None:
            os.environ["DOCKER_HOST"] = before
        process.terminate()
        process.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def _answers(socket: str) -> bool:
    try:
        return bool(docker.DockerClient(base_url=socket).ping())
    except (docker.errors.DockerException, OSError):
        return False
