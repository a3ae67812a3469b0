import hashlib

import pytest

from kldaudit.manifest.caches import cache_folders, cache_state


@pytest.fixture
def triton(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


def test_a_cache_that_is_not_there_is_cold(triton):
    assert cache_state()["triton"] == {"state": "cold", "entries": 0, "digest": "none: no entries", "keys": []}


def test_a_cache_with_files_is_warm_and_digested_by_name_and_content(triton):
    (triton / "k").mkdir(parents=True)
    (triton / "k" / "a.cubin").write_bytes(b"one")
    (triton / "jit.log").write_text("another line in every run")
    line = f"k/a.cubin\t{hashlib.sha256(b'one').hexdigest()}\n"
    expected = {"state": "warm", "entries": 1, "digest": hashlib.sha256(line.encode()).hexdigest(), "keys": ["k"]}
    assert cache_state()["triton"] == expected


def test_the_libraries_own_variables_say_where_the_caches_are(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/ada")
    for name in ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT",
                 "XDG_CACHE_HOME"):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    found = {name: str(folder) for name, folder in cache_folders().items()}
    assert found["triton"] == "/home/ada/.triton/cache"
    assert found["flashinfer"] == "/home/ada/.cache/flashinfer"
    assert found["vllm"] == "/home/ada/.cache/vllm/torch_compile_cache"
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/x")
    assert str(cache_folders()["vllm"]) == "/x/torch_compile_cache"
