"""A real Docker engine: the one that answers, or one that is started for these tests and stopped after them."""

from collections.abc import Iterator

import docker
import pytest
from docker_engine import BASE_LOCK, started

from kldaudit.image.base import Base, ensure_base
from kldaudit.runtime.docker import docker_client


@pytest.fixture(scope="session", autouse=True)
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[docker.DockerClient]:
    """The Docker engine."""
    try:
        docker.from_env().ping()
    except (docker.errors.DockerException, OSError):
        yield from started(tmp_path_factory.mktemp("dockerd"))
    else:
        yield docker_client()


@pytest.fixture(scope="session")
def base(engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory) -> Base:
    """The base file system: Debian with Python."""
    folder = tmp_path_factory.mktemp("base")
    return ensure_base(engine, BASE_LOCK, "system", folder, folder / "log")
