"""Images built from locks, on the real recipe with a small lock; and what goes wrong while building."""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import docker
import pytest
from docker_engine import BASE_LOCK, RECIPE, ROOT, SMALL, build, started

from kldaudit.errors import EngineError
from kldaudit.image.base import ensure_base, read_lock
from kldaudit.image.docker import INTERPRETER
from kldaudit.image.step import choose
from kldaudit.image.workspace import PREFIX

pytestmark = pytest.mark.container


def leftovers(engine: docker.DockerClient, work: Path) -> list[str]:
    containers = [one.name for one in engine.containers.list(all=True)]
    return [path.name for path in work.glob(f"{PREFIX}*")] + containers


def test_an_image_holds_the_lock_and_kldaudit_and_nothing_else(image):
    assert image.packages == len(SMALL) + 3  # kldaudit; pip and setuptools of the virtual environment
    assert len(image.layers) == 3
    assert image.digest == image.location.removeprefix("sha256:")
    assert image.base.startswith("Debian bookworm, bootstrapped from the system's mirror")


def test_the_engines_own_clean_up_does_not_take_the_image(engine, image):
    engine.images.prune()
    assert engine.images.get(image.location).tags == [f"kldaudit/small:{image.digest[:12]}"]


def test_pip_in_the_image_lists_what_the_lock_names(engine, image, lock):
    command = ["-m", "pip", "list", "--format=json", "--disable-pip-version-check"]
    output = engine.containers.run(
        image.location, command, entrypoint=[INTERPRETER], network_mode="none", remove=True, stderr=False
    )
    found = {one["name"].lower().replace("_", "-"): one["version"] for one in json.loads(output)}
    wanted = dict(re.findall(r"^([\w-]+)==(\S+)", lock.read_text(), flags=re.MULTILINE))
    assert wanted.items() <= found.items()
    assert set(found) - set(wanted) == {"kldaudit", "pip", "setuptools"}


def test_the_manifest_in_the_image_lists_what_dpkg_lists(engine, image):
    script = (
        "import json; from kldaudit.manifest.packages import Owners, debian_packages\n"
        "from kldaudit.manifest.libraries import stray_files\n"
        "print(json.dumps([[p.name, p.version] for p in debian_packages()] + [stray_files('/', Owners())]))"
    )
    run = {"network_mode": "none", "remove": True, "read_only": True, "stderr": False}
    output = engine.containers.run(image.location, ["-c", script], entrypoint=[INTERPRETER], **run)
    *found, stray = json.loads(output)
    command = ["-W", "-f=${binary:Package} ${Version}\\n"]
    shown = engine.containers.run(image.location, command, entrypoint=["dpkg-query"], **run)
    assert sorted(found) == sorted(line.split() for line in shown.decode().splitlines())
    assert stray == "none: packages list every shared object there"


def test_nothing_of_the_host_is_in_the_base(engine, base):
    script = (
        "cat /etc/apt/sources.list; echo; cat /etc/machine-id; "
        "find /var/log /var/lib/apt/lists /etc/apt/sources.list.d -type f"
    )
    output = engine.containers.run(base.image, ["-c", script], entrypoint=["/bin/sh"], network_mode="none", remove=True)
    lines = [line for line in output.decode().splitlines() if line != "/var/lib/apt/lists/lock"]
    snapshot = read_lock(BASE_LOCK).bootstrap.snapshot
    assert len(list(filter(None, lines))) == 3
    assert all(line.startswith("deb ") and f"/{snapshot} " in line for line in filter(None, lines))


def test_the_same_locks_give_the_same_image_on_an_engine_with_nothing_in_it(lock, image, tmp_path):
    with started():
        again = build(lock, tmp_path / "work")
    assert (again.layers, again.location) == (image.layers, image.location)


def test_an_image_in_which_a_file_was_changed_has_another_digest(engine, image, tmp_path):
    changed = engine.containers.create(image.location, ["true"], entrypoint=[])
    try:
        archive = tmp_path / "x.tar"
        (tmp_path / "planted.so").write_bytes(b"\x7fELF")
        with tarfile.open(archive, "w") as file:
            file.add(tmp_path / "planted.so", "planted.so")
        changed.put_archive("/opt/engine", archive.read_bytes())
        other = changed.commit()
    finally:
        changed.remove()
    assert other.id != image.location
    engine.images.remove(other.id)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: re.sub(r" \\\n\s+--hash=.*", "", text, count=0), "hash"),
        (lambda text: text.replace("annotated-types==", "annotated-types==99."), "annotated-types==99"),
        (lambda text: re.sub(r"sha256:[0-9a-f]{8}", "sha256:00000000", text), "Expected sha256 00000000"),
    ],
    ids=["a missing hash", "a wheel that is not there", "another hash"],
)
def test_a_lock_that_does_not_hold_is_refused(engine, lock, tmp_path, change, message):
    broken = tmp_path / "broken.txt"
    broken.write_text(change(lock.read_text()))
    work = tmp_path / "work"
    with pytest.raises(EngineError, match=rf"(?s)wheels cannot be brought together.*({message})"):
        build(broken, work)
    assert leftovers(engine, work) == []


def test_an_engine_without_a_recipe_is_refused(lock, tmp_path):
    with pytest.raises(EngineError, match="no recipe"):
        build(lock, tmp_path / "work", recipe=tmp_path / "Dockerfile")


def test_a_recipe_that_fails_leaves_nothing_behind(engine, lock, tmp_path):
    recipe = tmp_path / "Dockerfile"
    recipe.write_text("ARG BASE\nFROM ${BASE}\nRUN echo no room >&2; exit 7\n")
    work = tmp_path / "work"
    with pytest.raises(EngineError, match=r"(?s)image cannot be built.*returned a non-zero code: 7"):
        build(lock, work, recipe=recipe)
    assert leftovers(engine, work) == []


def test_a_recipe_has_no_network(engine, lock, tmp_path):
    recipe = tmp_path / "Dockerfile"
    probe = "python3 -c 'import socket; print(*(n for _, n in socket.if_nameindex()))' > /interfaces"
    recipe.write_text(f"ARG BASE\nFROM ${{BASE}}\nRUN {probe}; grep -qx lo /interfaces && exit 9\n")
    with pytest.raises(EngineError, match="non-zero code: 9"):
        build(lock, tmp_path / "work", recipe=recipe)


def test_a_full_disk_ends_in_one_message_and_leaves_nothing_behind(engine, lock, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can mount the small disk")
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m,mode=755", "tmpfs", small], check=True)
    try:
        with pytest.raises((EngineError, OSError), match=r"(?i)no space left|cannot be bootstrapped"):
            build(lock, small / "work")
        assert leftovers(engine, small / "work") == []
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_base_that_is_not_in_the_registry_is_refused(engine, tmp_path):
    pinned = tmp_path / "base.json"
    pinned.write_text(json.dumps({"pull": f"127.0.0.1:9/base@sha256:{'0' * 64}"}))
    with pytest.raises(EngineError, match="base cannot be pulled"):
        ensure_base(engine, pinned, "auto", tmp_path, tmp_path / "log")


def test_a_killed_build_leaves_nothing_that_the_next_one_does_not_sweep(engine, lock, image, tmp_path):
    work = tmp_path / "work"
    command = [
        sys.executable, "-c", "from kldaudit.cli import main; main()", "image", "build", "--runtime", "docker",
        "--engine", "small", "--lock", lock, "--location", work / "engine", "--source", ROOT, "--recipe", RECIPE,
        "--base", BASE_LOCK, "--mirror", "system", "--output", tmp_path / "image.json", "--log", tmp_path / "log",
    ]  # fmt: skip
    process = subprocess.Popen([str(one) for one in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for _ in range(600):
        if "Step 5" in (tmp_path / "log").read_text() if (tmp_path / "log").exists() else False:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "image.json").exists()
    again = build(lock, work)
    assert again.location == image.location
    time.sleep(1)
    assert leftovers(engine, work) == []


def test_auto_takes_the_engine_that_answers_and_says_why():
    runtime, why = choose("auto")
    assert runtime == "docker"
    assert re.fullmatch(r"auto: Docker Engine \S+ answers", why)


def test_auto_takes_a_virtual_environment_where_no_engine_answers(monkeypatch, tmp_path):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    runtime, why = choose("auto")
    assert runtime == "venv"
    assert why.startswith("auto: no Docker engine can be used: no Docker engine answers")
