"""What a module gets in a container, and how containers end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kldaudit
from kldaudit.audit import Container
from kldaudit.errors import EngineError
from kldaudit.runtime.docker import LABEL
from kldaudit.runtime.record import Image
from kldaudit.runtime.run import container_facts, run_in_engine

pytestmark = pytest.mark.container

PROBE = """
import json, os, socket, sys, time
from pathlib import Path
what, *paths = sys.argv[1:]

def error(action):
    try:
        action()
    except OSError as failure:
        return failure.strerror
    return None

if what == "facts":
    reads, writes = map(Path, paths)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    facts = {
        "root": error(lambda: Path("/etc/planted").write_text("x")),
        "reads": error(lambda: (reads / "planted").write_text("x")),
        "input": (reads / "input").read_text(),
        "tmp": error(lambda: Path("/tmp/planted").write_text("x")),
        "interfaces": sorted(name for _, name in socket.if_nameindex()),
        "uid": os.getuid(), "gid": os.getgid(),
        "capabilities": status["CapEff"].strip(), "no_new_privileges": status["NoNewPrivs"].strip(),
        "shm": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
        "environment": sorted(os.environ), "devices": sorted(os.listdir("/dev")),
    }
    (writes / "facts.json").write_text(json.dumps(facts))
    print("printed")
    print("complained", file=sys.stderr)
elif what == "read":
    print(Path(paths[0]).read_text())
elif what == "exit":
    sys.exit(int(paths[0]))
elif what == "signal":
    os.kill(os.getpid(), int(paths[0]))
elif what == "sleep":
    Path(paths[0], "started").write_text("x")
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def image(base, tmp_path_factory) -> Image:
    """The base as an adopted image: kldaudit and the probe lie beside it."""
    overlay = tmp_path_factory.mktemp("overlay")
    (overlay / "probe.py").write_text(PROBE)
    (overlay / "kldaudit").symlink_to(Path(kldaudit.__file__).parent)
    return Image(
        runtime="docker", why="the tests say so", engine="none", python="3.11", architecture="x86_64",
        location=base.image, interpreter="/usr/bin/python3", overlay=str(overlay), locks={}, packages=0,
        base=base.words, digest=base.image.removeprefix("sha256:"), built_with="the tests",
    )  # fmt: skip


def ours(engine) -> list[str]:
    return [one.id for one in engine.containers.list(all=True, filters={"label": LABEL})]


@pytest.fixture
def places(tmp_path):
    for name in ("reads", "writes"):
        (tmp_path / name).mkdir()
    (tmp_path / "reads" / "input").write_text("given")
    return tmp_path / "reads", tmp_path / "writes"


@pytest.fixture
def facts(image, places, tmp_path, monkeypatch):
    monkeypatch.setenv("PLANTED_SECRET", "swordfish")
    reads, writes = places
    status = run_in_engine(
        image, "probe", ["facts", str(reads), str(writes)], log=tmp_path / "log", reads=[reads], writes=[writes],
        env={"OMP_NUM_THREADS": "2"}, container=Container(shm_gib=3),
    )  # fmt: skip
    assert status == 0, (tmp_path / "log").read_text()
    return json.loads((writes / "facts.json").read_text())


def test_only_what_is_mounted_for_writing_can_be_written(facts):
    assert facts["root"] == facts["reads"] == "Read-only file system"
    assert facts["tmp"] is None
    assert facts["input"] == "given"


def test_there_is_no_network(facts):
    assert facts["interfaces"] == ["lo"]


def test_the_caller_is_the_user_and_owns_what_is_written(facts, places):
    assert (facts["uid"], facts["gid"]) == (os.getuid(), os.getgid())
    written = (places[1] / "facts.json").stat()
    assert (written.st_uid, written.st_gid) == (os.getuid(), os.getgid())


def test_there_are_no_privileges_and_no_devices_of_the_host(facts):
    assert int(facts["capabilities"], 16) == 0
    assert facts["no_new_privileges"] == "1"
    assert not [name for name in facts["devices"] if name.startswith(("vd", "sd", "nvme", "kvm", "nvidia"))]


def test_shared_memory_has_the_size_that_was_asked_for(facts):
    assert facts["shm"] == 3 * 2**30


def test_the_environment_is_an_explicit_list(facts):
    found = set(facts["environment"])
    assert {"OMP_NUM_THREADS", "HF_HUB_OFFLINE", "PYTHONPATH", "HOME", "LANG"} <= found
    assert not {"PLANTED_SECRET", "USER", "LD_LIBRARY_PATH", "TMPDIR"} & found


def test_the_log_takes_output_and_errors(facts, tmp_path):
    assert {"printed", "complained"} <= set((tmp_path / "log").read_text().split())


def test_links_that_lead_out_of_a_folder_can_be_followed(image, tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").write_text("weights")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model").symlink_to("../blobs/abc")
    (tmp_path / "checkpoint").symlink_to("snapshot")
    path = tmp_path / "checkpoint" / "model"
    status = run_in_engine(image, "probe", ["read", str(path)], log=tmp_path / "log", reads=[tmp_path / "checkpoint"])
    assert (status, (tmp_path / "log").read_text().strip()) == (0, "weights")


@pytest.mark.parametrize(("what", "number", "expected"), [("exit", 3, 3), ("signal", 11, -11), ("signal", 9, -9)])
def test_exit_codes_and_signals_come_back(image, tmp_path, what, number, expected):
    assert run_in_engine(image, "probe", [what, str(number)], log=tmp_path / "log") == expected


def test_no_container_is_left(engine, image, tmp_path):
    run_in_engine(image, "probe", ["exit", "0"], log=tmp_path / "log")
    assert gone(engine)


RUN = """
import sys
from pathlib import Path
from kldaudit.runtime.record import Image
from kldaudit.runtime.run import run_in_engine
image, folder = Image.read(Path(sys.argv[1])), Path(sys.argv[2])
print(run_in_engine(image, "probe", ["sleep", str(folder)], log=folder / "log", writes=[folder]))
"""


@pytest.fixture
def job(image, tmp_path):
    """A process of ours that runs a module which sleeps in a container."""
    image.write(tmp_path / "image.json")
    (tmp_path / "job").mkdir()
    command = [sys.executable, "-c", RUN, str(tmp_path / "image.json"), str(tmp_path / "job")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(300):
        if (tmp_path / "job" / "started").exists():
            break
        time.sleep(0.1)
    yield process
    process.kill()
    process.communicate()


def gone(engine) -> bool:
    for _ in range(100):
        if not ours(engine):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_container_ends_with_the_job_that_started_it(engine, job, number):
    assert len(ours(engine)) == 1
    job.send_signal(number)
    assert gone(engine)


def test_a_container_that_is_killed_from_outside_comes_back_as_a_signal(engine, job):
    engine.containers.get(ours(engine)[0]).kill()
    assert job.communicate(timeout=30)[0].strip() == "-9"
    assert gone(engine)


def test_an_image_that_is_gone_says_what_to_do(image, tmp_path):
    missing = image.model_copy(update={"location": f"sha256:{'0' * 64}"})
    with pytest.raises(EngineError, match=r"(?s)the engine's image is gone.*run the rule image again"):
        run_in_engine(missing, "probe", [], log=tmp_path / "log")


def test_without_an_engine_the_message_says_so(image, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    with pytest.raises(EngineError, match="no Docker engine answers"):
        run_in_engine(image, "probe", [], log=tmp_path / "log")


def test_a_user_who_may_not_use_the_engine_is_told_so():
    if os.geteuid() != 0 or not Path("/var/run/docker.sock").exists():
        pytest.skip("only root can become another user, and only the system's socket has an owner")
    script = (
        "import os, docker\nfrom kldaudit.runtime.docker import docker_client\n"
        "os.environ.pop('DOCKER_HOST', None)\ndocker_client\n"
        "os.setgroups([]); os.setegid(65534); os.seteuid(65534)\n"
        "try:\n    docker_client()\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("EngineError the Docker engine may not be used")
    assert "join the group docker" in done.stdout


def test_the_facts_of_a_container_name_no_host_and_no_path(image):
    found = container_facts(image, Container())
    assert (found["runtime"], found["network"], found["root"], found["gpus"]) == (
        "docker", "none", "read-only", "none",
    )  # fmt: skip
    assert found["image"] == image.location
    assert os.uname().nodename not in str(found)
    assert str(Path.cwd()) not in str(found)
