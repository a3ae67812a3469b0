"""A manifest of today's version, small enough to read: two layers on one GPU, in a container."""

import copy
import json
from pathlib import Path
from typing import Any

from kldaudit.audit import ArmSpec, CaptureSettings, Container, Settings
from kldaudit.manifest.record import Manifest

PUBLISHED = Path(__file__).parents[2] / "manifests"
"""Real manifests, of the first version that recorded any."""

SITE = "{environment}/lib/python3.11/site-packages"


def layer(number: int) -> dict[str, Any]:
    return {
        "layer": f"model.layers.{number}.attn",
        "backend": "FLASH_ATTN",
        "kv_cache_dtype": "auto",
        "kv_cache_torch_dtype": "torch.bfloat16",
        "kv_scales": {"k": 1.0, "v": 1.0},
    }


def linear(number: int) -> dict[str, Any]:
    return {
        "layer": f"model.layers.{number}.qkv_proj",
        "kind": "QKVParallelLinear",
        "method": "UnquantizedLinearMethod",
        "scheme": None,
        "kernels": [],
        "activations": None,
    }


def python(name: str, version: str, digit: str) -> dict[str, Any]:
    return {"name": name, "version": version, "record_sha256": digit * 64, "installer": "pip", "origin": None}


def debian(name: str, version: str, source: str) -> dict[str, Any]:
    return {
        "name": name, "version": version, "architecture": "amd64", "source": source, "source_version": version,
        "status": "installed",
    }  # fmt: skip


CONTENT: dict[str, Any] = {
    "schema_version": "1",
    "parents": {"spec": "a" * 64, "image": "b" * 64, "checkpoint": "c" * 64, "prompt:words": "d" * 64},
    "audit": "small",
    "arm": "reference",
    "launch": 1,
    "outcome": "captured",
    "asked": [
        {"setting": "attention_backend", "asked": "auto", "got": "FLASH_ATTN", "honoured": True, "unsupported": False},
        {"setting": "kv_cache_dtype", "asked": "auto", "got": "bfloat16", "honoured": True, "unsupported": False},
        {"setting": "chunk", "asked": "2048", "got": "1024", "honoured": False, "unsupported": False},
    ],
    "python": "CPython 3.11.7",
    "python_packages": [python("torch", "2.13.0+cu130", "1"), python("vllm", "0.32.0", "2")],
    "debian_packages": [debian("libc6:amd64", "2.41-12", "glibc"), debian("libgomp1:amd64", "1:14.2-3", "gcc-14")],
    "stray_files": [{"path": "/opt/extra/libextra.so", "sha256": "3" * 64}],
    "libraries": [
        {
            "path": f"{SITE}/torch/lib/libtorch.so", "sha256": "4" * 64, "owner": "python:torch==2.13.0+cu130",
            "as_packaged": True, "soname": "libtorch.so", "version": None, "symbol_versions": [],
        },
        {
            "path": "/usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0", "sha256": "5" * 64,
            "owner": "debian:libgomp1:amd64=1:14.2-3", "as_packaged": False, "soname": "libgomp.so.1",
            "version": "1.0.0", "symbol_versions": ["GOMP_5.0.1", "OMP_5.0.2"],
        },
        {
            "path": "/opt/extra/libextra.so", "sha256": "3" * 64, "owner": "none", "as_packaged": None,
            "soname": None, "version": None, "symbol_versions": [],
        },
    ],
    "stack": {
        "driver": "580.95.05", "CUDA runtime": "13.0", "NCCL": "none: not loaded", "OpenMP": "libgomp GOMP_5.0.1",
    },
    "operating_system": "Debian GNU/Linux 13 (trixie)",
    "kernel": "Linux 6.12.1",
    "libc": "glibc 2.41",
    "cpu": {"model": "EPYC 9555", "microcode": "0xb002116", "isa_flags": "avx2 avx512f fma"},
    "gpu": [
        {
            "name": "NVIDIA H200", "sm": "9.0", "uuid_sha256": "6" * 64, "vbios": "96.00.A0.00.01",
            "ecc": {"current": "enabled", "pending": "enabled"}, "mig": "disabled", "temperature_c": 31,
        }
    ],
    "caches": {
        "before": {"triton": {"state": "cold", "entries": 0, "digest": "none"}},
        "after": {"triton": {"state": "warm", "entries": 4, "digest": "7" * 64}},
    },
    "torch": {"version": "2.13.0+cu130", "cuda": "13.0", "commit": "abc", "cpu_capability": "AVX512"},
    "engine": {
        "name": "vllm",
        "version": "0.32.0",
        "commit": "unknown: vllm._version has no commit",
        "arguments": {"max_num_batched_tokens": 2048, "kv_cache_dtype": "auto", "seed": 0},
        "config": {
            "cache_config": {"cache_dtype": "auto", "num_gpu_blocks": 512}, "scheduler_config": {"policy": "fcfs"},
        },
    },
    "selected": {
        "attention": [layer(0), layer(1)], "linear": [linear(0), linear(1)], "model_class": "llama.LlamaForCausalLM",
        "quantization": None, "chunk": 1024, "dtype": "bfloat16", "kv_cache_dtype": "auto", "torch_threads": 2,
        "max_model_len": 8192, "vocab_size": 49152,
    },
    "kernels": [
        {"name": "flash_fwd_kernel", "count": 2, "share": 0.25, "modules": ["Attention"], "family": "FlashAttention 3"},
        {"name": "nvjet_tst_128x256", "count": 8, "share": 0.7, "modules": ["Linear"], "family": "GEMM of cuBLAS"},
        {"name": "vectorized_elementwise", "count": 4, "share": 0.05, "modules": [], "family": None},
    ],
    "primitives": "none: oneDNN was not used",
    "environment": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2", "VLLM_NO_USAGE_STATS": "1"},
    "capture": {"words": {"pass1": {"positions": 12, "nonfinite": 0, "differing": 0}}},
    "container": {"id": "8f3a", "engine": "Docker 28.1", "shm_bytes": 2147483648},
}  # fmt: skip


def small_manifest() -> dict[str, Any]:
    """A fresh copy, after the record's own check."""
    return json.loads(Manifest.model_validate(copy.deepcopy(CONTENT)).model_dump_json())


def published(name: str) -> dict[str, Any]:
    """A real one of an earlier version, such as smollm2-cpu-amx/captures/reference."""
    return json.loads((PUBLISHED / name / "launch1.manifest.json").read_text(encoding="utf-8"))


def arm(
    name: str = "reference", checkpoint: str = "base", container: dict[str, Any] | None = None, **settings: Any
) -> ArmSpec:
    """The spec of an arm with some settings of its own."""
    return ArmSpec(
        audit="small",
        arm=name,
        reference=name == "reference",
        checkpoint=checkpoint,
        settings=Settings(**settings),
        capture=CaptureSettings(),
        container=Container(**(container or {})),
    )
