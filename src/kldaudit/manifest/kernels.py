"""Kernels that ran: the census of a profiled prefill, what their names tell, and oneDNN's own list of primitives."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kldaudit.manifest.record import Kernel

RANGE = "kldaudit:"
"""Begins the name of the profiler's range around each of the model's modules; the module's class follows."""

FAMILIES = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"^nvjet_(sm\d+)", r"GEMM of cuBLASLt, nvjet, \1"),
        (r"[Mm]achete", "GEMM with packed weights, Machete"),
        (r"[Mm]arlin", "GEMM with packed weights, Marlin"),
        (r"FlashAttnFwdSm90", "attention, FlashAttention 3, sm90 (WGMMA)"),
        (r"flash_fwd|FlashAttnFwd|flash::", "attention, FlashAttention 2"),
        (r"BatchPrefillWith|BatchDecodeWith|flashinfer", "attention or helper, FlashInfer"),
        (r"^kernel_unified_attention", "attention, Triton"),
        (r"cutlass.*(?:[Ss]m90|sm90)", "GEMM of CUTLASS 3, sm90 (WGMMA)"),
        (r"cutlass.*(?:[Ss]m1[02]\d|sm1[02]\d)", "GEMM of CUTLASS, Blackwell (tcgen05 or its successors)"),
        (r"(?:ampere|sm80|cutlass_80).*16816", "GEMM, sm80, mma.sync m16n8k16"),
        (r"(?:ampere|sm80|cutlass_80).*1688", "GEMM, sm80, mma.sync m16n8k8"),
        (r"(?:ampere|sm80|cutlass_80).*gemm", "GEMM, sm80"),
        (r"gemv", "matrix-vector product"),
        (r"splitKreduce", "reduction of a split GEMM, cuBLAS"),
        (r"^_C\w*::onednn_|^aten::mkldnn|^mkldnn::", "GEMM of oneDNN"),
        (r"^_C\w*::(?:weight_packed_linear|.*_scaled_mm|.*_gemm)", "GEMM of vLLM's CPU kernels"),
        (r"^_C\w*::.*attention", "attention of vLLM's CPU kernels"),
        (r"^aten::(?:mm|addmm|bmm|baddbmm|_scaled_mm|_int_mm)$", "GEMM of PyTorch"),
        (r"^aten::.*scaled_dot_product", "attention of PyTorch"),
    )
)
"""What a kernel's name tells: the first pattern that fits. Names of NVIDIA's and of the libraries' own making."""

PRIMITIVE = re.compile(r"onednn_verbose,(?:v\d+,)?primitive,create[^,]*,(?P<rest>.*)$")
LIBRARY = re.compile(r"onednn_verbose,(?:v\d+,)?info,(?P<rest>oneDNN v.*|cpu,isa:.*)$")


def family(name: str) -> str | None:
    """What the kernel's name tells: GEMM or attention family and MMA instructions; None if nothing."""
    for pattern, words in FAMILIES:
        found = pattern.search(name)
        if found:
            return found.expand(words)
    return None


@dataclass
class _Tally:
    count: int = 0
    microseconds: float = 0.0
    modules: set[str] = field(default_factory=set)


def census(events: Iterable[Any]) -> list[Kernel]:
    """What ran, from the profiler's events: device kernels where there are any, else CPU operators.

    Args:
        events: ``torch.autograd.profiler_util.FunctionEvent`` of one profiled prefill, with ranges named ``RANGE`` and
            the class of the module around each module's forward.

    Returns:
        One line per name, sorted by name; shares are of self time and add up to 1.
    """
    events = list(events)
    device: dict[str, _Tally] = {}
    operators: dict[str, _Tally] = {}
    for event in events:
        module = _module(event)
        for kernel in event.kernels:
            _add(device, kernel.name, kernel.duration, module)
        if not event.name.startswith(RANGE) and "::" in event.name:
            _add(operators, event.name, event.self_cpu_time_total, module)
    chosen = device or operators
    total = sum(one.microseconds for one in chosen.values()) or 1.0
    return [
        Kernel(
            name=name,
            count=one.count,
            share=round(one.microseconds / total, 4),
            modules=sorted(one.modules),
            family=family(name),
        )
        for name, one in sorted(chosen.items())
    ]


def _add(tallies: dict[str, _Tally], name: str, microseconds: float, module: str | None) -> None:
    one = tallies.setdefault(name, _Tally())
    one.count += 1
    one.microseconds += microseconds
    if module is not None:
        one.modules.add(module)


def _module(event: Any) -> str | None:
    """Class of the innermost module around an event."""
    while event is not None:
        if event.name.startswith(RANGE):
            return str(event.name.removeprefix(RANGE))
        event = event.cpu_parent
    return None


def onednn_primitives(log: str) -> list[str] | str:
    """Versions, ISA and primitives of oneDNN, from the log of a process with ``ONEDNN_VERBOSE=profile_create``.

    Returns:
        Sorted unique lines: version and commit, ISA, then ``engine,kind,implementation,…`` of each primitive that was
        created, without problem sizes and times; or why there are none.

    Source: oneDNN developer guide, "Verbose Mode".
    """
    library, primitives = set(), set()
    for line in log.splitlines():
        if found := PRIMITIVE.search(line):
            engine, kind, implementation, propagation, memory, attributes = (found["rest"].split(",") + [""] * 6)[:6]
            parts = (engine, kind, implementation, propagation, memory, attributes)
            primitives.add(",".join(part for part in parts if part))
        elif found := LIBRARY.search(line):
            library.add(found["rest"])
    return [*sorted(library), *sorted(primitives)] or "none: oneDNN was not used"
