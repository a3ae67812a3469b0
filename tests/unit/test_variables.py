import sys

import pytest

from kldaudit.manifest.variables import WITHHELD, numeric_environment, portable, without_secrets


def test_only_variables_that_can_change_the_numbers_are_recorded(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    monkeypatch.setenv("EDITOR", "vi")
    found = numeric_environment()
    assert (found["OMP_NUM_THREADS"], found["VLLM_CPU_INT4_W4A8"]) == ("3", "0")
    assert "EDITOR" not in found


@pytest.mark.parametrize("name", ["VLLM_DIST_IDENT", "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "TORCHINDUCTOR_CACHE_DIR"])
def test_names_that_the_engine_makes_up_are_not_recorded(monkeypatch, name):
    monkeypatch.setenv(name, "/tmp/8036e61d")
    assert name not in numeric_environment()


def test_the_environments_own_folder_is_not_recorded(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", f"{sys.prefix}/lib/libgomp.so")
    assert numeric_environment()["LD_PRELOAD"] == "{environment}/lib/libgomp.so"


@pytest.mark.parametrize(
    "name",
    ["VLLM_API_KEY", "VLLM_TOKEN", "NCCL_AUTH_X", "CUDA_SECRET", "TORCH_PASSWORD", "MKL_PRIVATE_PATH", "VLLM_KEY"],
)
def test_a_variable_named_like_a_secret_is_withheld(monkeypatch, name):
    monkeypatch.setenv(name, "swordfish")
    assert numeric_environment()[name] == WITHHELD


@pytest.mark.parametrize("name", ["OMP_MONKEY", "VLLM_TOKENIZER_MODE", "TORCH_KEYBOARD", "VLLM_MAX_TOKENS_X"])
def test_a_word_that_only_contains_one_is_no_secret(monkeypatch, name):
    monkeypatch.setenv(name, "7")
    assert numeric_environment()[name] == "7"


@pytest.mark.parametrize(
    "value",
    [
        "https://me:swordfish@example.org/simple",
        "hf_abcdefghijklmnopqrstuvwxyz",
        "sk-abcdefghijklmnopqrstuvwxyz0123",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----",
    ],
)
def test_a_value_that_looks_like_a_secret_is_withheld(monkeypatch, value):
    monkeypatch.setenv("VLLM_SOMETHING", value)
    assert numeric_environment()["VLLM_SOMETHING"] == WITHHELD
    assert without_secrets(f"from {value}") == WITHHELD


@pytest.mark.parametrize("value", ["https://example.org/simple", "2", "risk-free", "/opt/sk-learn", "compact,1,0"])
def test_an_ordinary_value_is_recorded(monkeypatch, value):
    monkeypatch.setenv("VLLM_SOMETHING", value)
    assert numeric_environment()["VLLM_SOMETHING"] == value


def test_the_home_folder_is_not_recorded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    assert portable("/home/ada/.cache/vllm") == "{home}/.cache/vllm"
    assert portable(f"{sys.prefix}/lib") == "{environment}/lib"
