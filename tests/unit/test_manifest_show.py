"""``kldaudit manifest show``: what a manifest holds, in words."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_manifest import PUBLISHED, published, small_manifest

from kldaudit.manifest.read import in_words
from kldaudit.manifest.show import TITLES, sections

COMMAND = str(Path(sys.executable).with_name("kldaudit"))
CRASHED = {
    "schema_version": "1", "parents": {}, "audit": "small", "arm": "int4", "launch": 1,
    "outcome": "refused: the engine crashed with SIGILL: no last words",
}  # fmt: skip


def rows(manifest, name, full=False):
    return next(one.rows for one in sections(manifest, full=full) if one.name == name)


@pytest.fixture
def command(tmp_path):
    def run(content, *options):
        (tmp_path / "m.json").write_text(json.dumps(content), encoding="utf-8")
        line = [COMMAND, "manifest", "show", "m.json", *options]
        done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path)
        return done.returncode, done.stdout, done.stderr

    return run


def test_packages_are_counted_by_kind():
    assert rows(small_manifest(), "packages")[0] == ("", "4 packages (2 Debian, 2 Python)")


def test_packages_without_dpkg_say_why():
    manifest = small_manifest() | {"debian_packages": "unknown: dpkg-query failed: no such file"}
    expected = "2 Python packages; Debian packages unknown: dpkg-query failed: no such file"
    assert rows(manifest, "packages")[0] == ("", expected)


def test_loaded_libraries_that_are_not_as_packaged_are_named():
    assert rows(small_manifest(), "libraries") == [
        ("", "3 shared objects, 1 not as packaged, 1 of no package"),
        ("NOT AS PACKAGED", "/usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0 (debian:libgomp1:amd64=1:14.2-3)"),
        ("of no package", "/opt/extra/libextra.so"),
    ]


def test_stray_files_are_listed():
    assert rows(small_manifest(), "stray") == [("/opt/extra/libextra.so", "3" * 64)]


def test_only_settings_that_do_not_run_as_asked_are_shown():
    manifest = small_manifest()
    assert rows(manifest, "asked") == [("chunk", "asked 2048, ran 1024")]
    manifest["asked"].pop()
    assert rows(manifest, "asked") == [("", "all 2 settings that were compared run as asked")]


def test_kernels_have_count_share_and_family_and_the_others_are_counted():
    assert rows(small_manifest(), "kernels") == [
        ("nvjet_tst_128x256", "× 8, 70.0%, GEMM of cuBLAS"),
        ("flash_fwd_kernel", "× 2, 25.0%, FlashAttention 3"),
        ("", "and 1 others"),
        ("oneDNN", "none: oneDNN was not used"),
    ]


def test_a_gpu_is_told_field_by_field():
    found = dict(rows(small_manifest(), "gpu"))
    assert (found["0 name"], found["0 sm"], found["0 ecc"]) == (
        "NVIDIA H200", "9.0", "current enabled, pending enabled"
    )  # fmt: skip


def test_layers_are_counted_by_backend_and_by_kernel():
    found = dict(rows(small_manifest(), "engine"))
    assert (found["attention"], found["linear"]) == ("FLASH_ATTN × 2", "UnquantizedLinearMethod × 2")


def test_in_full_every_package_library_and_setting_is_listed():
    manifest = small_manifest()
    assert ("libc6:amd64", "2.41-12") in rows(manifest, "packages", full=True)
    assert ("chunk", "asked 2048, ran 1024") in rows(manifest, "asked", full=True)
    assert len(rows(manifest, "asked", full=True)) == 3
    assert len(rows(manifest, "libraries", full=True)) == 3 + 3


def test_what_an_earlier_version_did_not_record_says_so():
    manifest = published("smollm2-cpu-amx/captures/reference")
    for name in ("stray", "libraries", "stack", "container", "caches"):
        assert rows(manifest, name) == [("", "not recorded")]
    assert rows(manifest, "packages")[0] == ("", "593 packages (439 Debian, 154 Python)")
    assert ("_C::onednn_mm", "count not recorded") in rows(manifest, "kernels")


@pytest.mark.parametrize("full", [False, True])
def test_the_manifest_of_a_crashed_engine_can_be_shown(full):
    assert [one.name for one in sections(CRASHED, full=full)] == list(TITLES)
    assert rows(CRASHED, "packages", full)[0] == ("", "not recorded")
    assert ("outcome", CRASHED["outcome"]) in rows(CRASHED, "run", full)


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*/captures/*/launch*.manifest.json")), ids=str)
def test_every_published_manifest_can_be_shown(path):
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for full in (False, True):
        assert all(one.rows for one in sections(manifest, full=full))


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "none"), (True, "yes"), (0, "0"), (1, "1"), ([], "none"), ({}, "none"), ({"a": [1, None]}, "a 1, none")],
    ids=repr,
)
def test_values_are_put_into_words(value, words):
    assert in_words(value) == words


def test_show_prints_every_section(command):
    code, out, err = command(small_manifest())
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if not line.startswith(" ")] == list(TITLES.values())
    assert "  4 packages (2 Debian, 2 Python)\n" in out


def test_show_prints_one_section_in_full(command):
    code, out, _ = command(small_manifest(), "--section", "packages")
    assert code == 0
    assert out.splitlines() == [
        "Packages",
        "  4 packages (2 Debian, 2 Python)",
        "  interpreter: CPython 3.11.7",
        "  libc6:amd64: 2.41-12",
        "  libgomp1:amd64: 1:14.2-3",
        "  torch: 2.13.0+cu130",
        "  vllm: 0.32.0",
    ]


def test_a_section_that_there_is_not_is_bad_input(command):
    code, out, err = command(small_manifest(), "--section", "weather")
    assert (code, out) == (2, "")
    assert "weather is none of" in err


def test_what_is_no_manifest_is_bad_input(command):
    code, out, err = command({"arm": "x"})
    assert (code, out) == (2, "")
    assert err.startswith("kldaudit: m.json is no manifest\n")
