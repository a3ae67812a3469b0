from dataclasses import dataclass, field
from typing import Any

import pytest

from kldaudit.manifest.kernels import census, family, onednn_primitives


@dataclass
class Event:
    """What the census reads of a profiler event."""

    name: str
    self_cpu_time_total: float = 0.0
    kernels: list[Any] = field(default_factory=list)
    cpu_parent: Any = None


@dataclass
class DeviceKernel:
    name: str
    duration: float


def test_operators_are_counted_with_their_share_of_self_time_and_their_module():
    layer = Event("kldaudit:LlamaMLP")
    events = [
        layer,
        Event("aten::mm", 30.0, cpu_parent=layer),
        Event("aten::mm", 30.0, cpu_parent=Event("aten::linear", cpu_parent=layer)),
        Event("aten::add", 40.0),
    ]
    add, mm = census(events)
    assert (add.name, add.count, add.share, add.modules) == ("aten::add", 1, 0.4, [])
    assert (mm.name, mm.count, mm.share, mm.modules) == ("aten::mm", 2, 0.6, ["LlamaMLP"])


def test_the_innermost_module_counts():
    norm = Event("kldaudit:RMSNorm", cpu_parent=Event("kldaudit:LlamaDecoderLayer"))
    assert census([Event("_C::rms_norm", 1.0, cpu_parent=norm)])[0].modules == ["RMSNorm"]


def test_where_device_kernels_ran_they_are_the_census_and_not_the_operators_that_launched_them():
    gemm = DeviceKernel("nvjet_sm90_tst_64x8_64x16_1x4_h_bz_TNT", 3.0)
    launched = Event("aten::mm", 50.0, [gemm], Event("kldaudit:QKVParallelLinear"))
    triton = Event("kldaudit:RMSNorm", 5.0, [DeviceKernel("triton_red_fused_0", 1.0)])
    first, second = census([launched, triton])
    assert (first.name, first.share, first.modules) == (gemm.name, 0.75, ["QKVParallelLinear"])
    assert (second.name, second.share, second.modules) == ("triton_red_fused_0", 0.25, ["RMSNorm"])


def test_ranges_and_unqualified_names_are_no_operators():
    assert census([Event("kldaudit:LlamaModel", 9.0), Event("ProfilerStep*", 9.0)]) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_sm90_tst_128x64_64x8_1x2_h_bz_coopB_TNT", "GEMM of cuBLASLt, nvjet, sm90"),
        ("void flash::FlashAttnFwdSm90<...>", "attention, FlashAttention 3, sm90 (WGMMA)"),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<64>>", "attention, FlashAttention 2"),
        ("void marlin::Marlin<__nv_bfloat16>", "GEMM with packed weights, Marlin"),
        ("void cutlass::device_kernel<vllm::cutlass_3x_gemm_sm90_fp8<...>>", "GEMM of CUTLASS 3, sm90 (WGMMA)"),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_tn", "GEMM, sm80, mma.sync m16n8k16"),
        ("kernel_unified_attention_2d", "attention, Triton"),
        ("_C::onednn_mm", "GEMM of oneDNN"),
        ("_C::cpu_attention_with_kv_cache", "attention of vLLM's CPU kernels"),
        ("aten::mm", "GEMM of PyTorch"),
        ("aten::view", None),
    ],
)
def test_a_name_tells_its_family(name, expected):
    assert family(name) == expected


LOG = """INFO loading
onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71)
onednn_verbose,v1,info,cpu,runtime:OpenMP,nthr:2
onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with Intel DL Boost
onednn_verbose,v1,primitive,info,template:operation,engine,primitive,implementation,prop_kind,exec_time
onednn_verbose,v1,primitive,create:cache_miss,cpu,matmul,brg_matmul:avx512_core_bf16,undef,src:bf16,attr-scratchpad:user,,64x576:576x1536,1.6
onednn_verbose,v1,primitive,create:cache_miss,cpu,matmul,brg_matmul:avx512_core_bf16,undef,src:bf16,attr-scratchpad:user,,3x576:576x1536,0.3
"""


def test_primitives_are_listed_once_without_sizes_and_times_after_version_and_isa():
    assert onednn_primitives(LOG) == [
        "cpu,isa:Intel AVX-512 with Intel DL Boost",
        "oneDNN v3.12.0 (commit 80afa71)",
        "cpu,matmul,brg_matmul:avx512_core_bf16,undef,src:bf16,attr-scratchpad:user",
    ]


def test_a_log_without_onednn_says_so():
    assert onednn_primitives("INFO loading\n") == "none: oneDNN was not used"
