"""A real Docker engine: the one that answers, or one that is started for these tests and stopped after them."""

import re
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker_engine import BASE_LOCK, ROOT, SMALL, build, started

from kldaudit.image.base import Base, ensure_base
from kldaudit.runtime.docker import docker_client
from kldaudit.runtime.record import Image


@pytest.fixture(scope="session", autouse=True)
def engine() -> Iterator[docker.DockerClient]:
    """The Docker engine."""
    try:
        docker.from_env().ping()
    except (docker.errors.DockerException, OSError):
        with started() as client:
            yield client
    else:
        yield docker_client()


@pytest.fixture(scope="session")
def base(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """The base file system: Debian with Python."""
    folder = tmp_path_factory.mktemp("base")
    return ensure_base(engine, BASE_LOCK, "system", folder, folder / "log")


@pytest.fixture(scope="session")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lock of a few packages, cut from the workflow's."""
    blocks = re.split(r"\n(?=\S)", (ROOT / "envs/workflow.txt").read_text())
    chosen = [block for block in blocks if block.partition("==")[0] in SMALL]
    assert len(chosen) == len(SMALL)
    path = tmp_path_factory.mktemp("lock") / "small.txt"
    path.write_text("\n".join(chosen) + "\n")
    return path


@pytest.fixture(scope="session")
def image(lock: Path, engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """An image built from that lock with the engine's own recipe."""
    return build(lock, tmp_path_factory.mktemp("image") / "work")
