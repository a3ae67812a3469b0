"""Run in a container, through the Docker SDK: no network, read-only root, the caller's user, only what is mounted."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kldaudit.audit import Container
from kldaudit.errors import EngineError
from kldaudit.runtime.record import Image, Job

if TYPE_CHECKING:
    import docker

LABEL = "kldaudit"
HOME = "/tmp"  # noqa: S108 - a file system of the container's own, in memory
GIB = 2**30


def docker_client() -> "docker.DockerClient":
    """The Docker engine that the environment names (``DOCKER_HOST``), or the local one.

    Raises:
        EngineError: the SDK is missing, no engine answers, or the caller may not use it.
    """
    try:
        import docker
        import docker.errors
    except ImportError as error:
        raise EngineError(
            "the runtime docker needs the Docker SDK",
            where="Python package docker",
            expected="the extra `docker`",
            found=str(error),
            do="pip install 'kldaudit[docker]'",
        ) from error
    try:
        client = docker.from_env(timeout=600)
        client.ping()
    except (docker.errors.DockerException, OSError) as error:
        reason = str(error)
        denied = "ermission denied" in reason
        raise EngineError(
            "the Docker engine may not be used" if denied else "no Docker engine answers",
            where=os.environ.get("DOCKER_HOST", "the local engine's socket"),
            expected="a running Docker engine that this user may use",
            found=" ".join(reason.split())[:300],
            do="join the group docker, or use a rootless engine" if denied else "start it, or set DOCKER_HOST",
        ) from error
    return client


def run_in_docker(image: Image, job: Job, log: Path, watch: Callable[[Any], None] | None) -> int:
    """Run a module in a container of the image; see ``run_in_engine``.

    The container ends when this process does, however it does: its standard input then ends (``leash``), and the
    Docker engine removes it.
    """
    import docker
    import docker.errors

    client = docker_client()
    try:
        created = client.containers.create(**container_options(image, job), user=_user(client))
    except docker.errors.ImageNotFound as error:
        raise EngineError(
            "the engine's image is gone",
            where=image.location,
            expected="an image of this ID in the Docker engine",
            found="no such image",
            do="run the rule image again (snakemake --forcerun image)",
        ) from error
    except docker.errors.APIError as error:
        raise _failed(error) from error
    try:
        return _run(client, created, log, watch)
    except (docker.errors.DockerException, OSError) as error:
        raise _failed(error) from error
    finally:
        _remove(created)


def _failed(error: Exception) -> EngineError:
    return EngineError(
        "the Docker engine did not run the container",
        where="the Docker engine",
        expected="a container that runs to its end",
        found=" ".join(str(error).split())[:300],
        do="look at the Docker engine's own log; if the engine was stopped, start it and run this again",
    )


def container_options(image: Image, job: Job) -> dict[str, Any]:
    """Arguments of the SDK's ``containers.create``, all but the user."""
    import docker.types

    overlay, env = overlay_of(image)
    gpus = job.container.gpus
    requests = []
    if gpus is not None:
        chosen: dict[str, Any] = {"count": -1} if gpus == "all" else {"device_ids": gpus}
        requests = [docker.types.DeviceRequest(capabilities=[["gpu"]], **chosen)]
    return {
        "image": image.location,
        "entrypoint": [image.interpreter, "-m", "kldaudit.runtime.leash"],
        "command": [job.module, *job.arguments],
        "environment": {"HOME": HOME, "LANG": "C.UTF-8", **env, **job.env},
        "mounts": mounts([*job.reads, *overlay], job.writes),
        "tmpfs": {HOME: "exec,mode=1777"},
        "working_dir": HOME,
        "network_mode": "none",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "shm_size": job.container.shm_gib * GIB,
        "device_requests": requests,
        "init": True,
        "stdin_open": True,
        "auto_remove": True,
        "log_config": docker.types.LogConfig(type="none"),
        "labels": {LABEL: job.module},
    }


def overlay_of(image: Image) -> tuple[list[Path], dict[str, str]]:
    """Folder that is mounted beside an adopted image's own packages, and the variable that makes Python find it."""
    if image.overlay is None:
        return [], {}
    folder = Path(image.overlay).absolute()
    return [folder], {"PYTHONPATH": str(folder)}


def mounts(reads: list[Path], writes: list[Path]) -> list[Any]:
    """Bind mounts at the same absolute paths as outside; a folder's links out of it bring their targets along."""
    import docker.types

    paths = {str(path.absolute()): True for path in reads}
    for path in reads:
        paths |= {str(target): True for target in _targets(path)}
    paths |= {str(path.absolute()): False for path in writes}
    return [
        docker.types.Mount(target=path, source=os.path.realpath(path), type="bind", read_only=read_only)
        for path, read_only in sorted(paths.items())
    ]


def _targets(path: Path) -> list[Path]:
    """Files outside a folder that links in it lead to."""
    if not path.is_dir():
        return []
    real = path.resolve()
    links = [one for one in real.rglob("*") if one.is_symlink() and one.exists()]
    return sorted({target for one in links if not (target := one.resolve()).is_relative_to(real)})


def _user(client: "docker.DockerClient") -> str:
    """The caller's user and group; in a rootless engine that is root inside."""
    rootless = any("rootless" in option for option in client.info().get("SecurityOptions") or [])
    return "0:0" if rootless else f"{os.getuid()}:{os.getgid()}"


class Running:
    """A started container, to be asked whether it still runs."""

    def __init__(self, client: "docker.DockerClient", name: str) -> None:
        """Wait for the container in a thread of its own; begin before it is started."""
        self.status: int | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._wait, args=(client, name), daemon=True)
        self._thread.start()

    def _wait(self, client: "docker.DockerClient", name: str) -> None:
        try:
            self.status = int(client.api.wait(name, condition="next-exit")["StatusCode"])
        except Exception as error:  # handed on to the thread that asks
            self.error = error

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self.error is not None:
            raise OSError(f"the engine stopped answering: {self.error}")
        if self.status is None:
            return None
        return self.status if self.status <= 128 else 128 - self.status


def _run(client: "docker.DockerClient", created: Any, log: Path, watch: Callable[[Any], None] | None) -> int:
    leash = created.attach_socket(params={"stdin": 1, "stream": 1})
    running = Running(client, created.id)
    output = created.attach(stdout=True, stderr=True, stream=True)
    with log.open("wb", buffering=0) as file:
        copying = threading.Thread(target=lambda: [file.write(chunk) for chunk in output], daemon=True)
        copying.start()
        created.start()
        try:
            if watch is not None:
                watch(running)
            while (status := running.poll()) is None:
                time.sleep(0.05)
            copying.join(timeout=30)
            return status
        finally:
            leash.close()


def _remove(created: Any) -> None:
    """Remove the container if it is still there; an engine that is gone removes it when it comes back."""
    import docker.errors

    try:
        created.remove(force=True)
    except (docker.errors.DockerException, OSError):
        return


def container_facts(image: Image, container: Container) -> dict[str, Any]:
    """What only the host knows of a container (``Manifest.container``)."""
    client = docker_client()
    info, version = client.info(), client.version()
    return {
        "runtime": "docker",
        "engine": f"Docker Engine {version['Version']}",
        "oci_runtime": str(info.get("DefaultRuntime", "unknown: the engine does not say")),
        "storage_driver": str(info.get("Driver", "unknown: the engine does not say")),
        "cgroup_version": str(info.get("CgroupVersion", "unknown: the engine does not say")),
        "security": sorted(str(option) for option in info.get("SecurityOptions") or []),
        "image": image.location,
        "network": "none",
        "root": "read-only",
        "user": "root" if os.getuid() == 0 else "the caller's",
        "capabilities": "none",
        "shm_bytes": container.shm_gib * GIB,
        "gpus": container.gpus if container.gpus is not None else "none",
    }
