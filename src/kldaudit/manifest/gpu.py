"""GPUs: what torch sees, and what NVML says of each."""

import hashlib
from collections.abc import Callable
from typing import Any

NONE = "none: torch sees no CUDA device"


def gpus() -> list[dict[str, Any]] | str:
    """Each device that torch sees, in its order, with what NVML says of it; or why there is none.

    Clocks in MHz, power in mW, temperature in °C, memory in bytes; UUIDs as SHA-256 only, no serial numbers.
    """
    import torch

    if not torch.cuda.is_available():
        return NONE
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    seen = [
        {"name": one.name, "sm": f"{one.major}.{one.minor}", "memory_bytes": one.total_memory} for one in properties
    ]
    try:
        import pynvml
    except ImportError as error:
        return _without_nvml(seen, f"unknown: NVML cannot be asked: {error}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return _without_nvml(seen, f"unknown: NVML says {error}")
    uuids = [_uuid(one) for one in properties]
    handles = [_handle(pynvml, uuid) for uuid in uuids]
    return [
        {
            **one,
            "uuid_sha256": hashlib.sha256(uuid.encode()).hexdigest(),
            **{name: _asked(pynvml, read, handle) for name, read in FIELDS.items()},
            "topology": _asked(pynvml, _topology(handles), handle),
        }
        for one, uuid, handle in zip(seen, uuids, handles, strict=True)
    ]


def _without_nvml(seen: list[dict[str, Any]], reason: str) -> list[dict[str, Any]]:
    return [{**one, **dict.fromkeys(FIELDS, reason)} for one in seen]


def _uuid(properties: Any) -> str:
    uuid = str(properties.uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _handle(nvml: Any, uuid: str) -> Any:
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        return error


def _asked(nvml: Any, read: Callable[[Any, Any], Any], handle: Any) -> Any:
    """One reading; what NVML cannot say of this device is unknown, with its reason."""
    if isinstance(handle, Exception):
        return f"unknown: NVML says {handle}"
    try:
        return read(nvml, handle)
    except nvml.NVMLError as error:
        return f"unknown: NVML says {error}"


def _each(**reads: Callable[[Any, Any], Any]) -> Callable[[Any, Any], dict[str, Any]]:
    return lambda nvml, handle: {name: _asked(nvml, read, handle) for name, read in reads.items()}


def _on(value: Any) -> str:
    return {0: "off", 1: "on"}.get(int(value), str(value))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _inforom(kind: str) -> Callable[[Any, Any], str]:
    return lambda nvml, handle: _text(nvml.nvmlDeviceGetInforomVersion(handle, getattr(nvml, f"NVML_INFOROM_{kind}")))


def _errors(counter: str) -> Callable[[Any, Any], int]:
    return lambda nvml, handle: int(
        nvml.nvmlDeviceGetTotalEccErrors(
            handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, getattr(nvml, f"NVML_{counter}_ECC")
        )
    )


def _clock(kind: str) -> Callable[[Any, Any], dict[str, Any]]:
    return _each(
        current=lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, getattr(nvml, f"NVML_CLOCK_{kind}")),
        max=lambda nvml, handle: nvml.nvmlDeviceGetMaxClockInfo(handle, getattr(nvml, f"NVML_CLOCK_{kind}")),
    )


def _reasons(nvml: Any, handle: Any) -> list[str]:
    """Names of the reasons why clocks are below their maximum."""
    mask = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    prefix = "nvmlClocksEventReason"
    bits = {name.removeprefix(prefix): getattr(nvml, name) for name in dir(nvml) if name.startswith(prefix)}
    return sorted(name for name, bit in bits.items() if name != "All" and bit and mask & bit == bit) or ["None"]


def _limits(nvml: Any, handle: Any) -> dict[str, Any]:
    low, high = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    return {"min": low, "max": high}


def _cuda_driver(nvml: Any, _: Any) -> str:
    version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{version // 1000}.{version % 1000 // 10}"


def _nvlinks(nvml: Any, handle: Any) -> int:
    active = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += int(nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED)
        except nvml.NVMLError:
            break  # the device has no further links
    return active


def _topology(handles: list[Any]) -> Callable[[Any, Any], list[str]]:
    """How far each other device is, as NVML's names of the levels."""

    def read(nvml: Any, handle: Any) -> list[str]:
        levels = {
            getattr(nvml, name): name.removeprefix("NVML_TOPOLOGY_").lower()
            for name in dir(nvml)
            if name.startswith("NVML_TOPOLOGY_")
        }
        others = [one for one in handles if one is not handle]
        return [str(levels.get(nvml.nvmlDeviceGetTopologyCommonAncestor(handle, one))) for one in others]

    return read


FIELDS: dict[str, Callable[[Any, Any], Any]] = {
    "driver": lambda nvml, _: _text(nvml.nvmlSystemGetDriverVersion()),
    "cuda_driver": _cuda_driver,
    "vbios": lambda nvml, handle: _text(nvml.nvmlDeviceGetVbiosVersion(handle)),
    "gsp_firmware": lambda nvml, handle: _text(nvml.nvmlDeviceGetGspFirmwareVersion(handle)),
    "inforom": _each(
        image=lambda nvml, handle: _text(nvml.nvmlDeviceGetInforomImageVersion(handle)),
        oem=_inforom("OEM"),
        ecc=_inforom("ECC"),
        power=_inforom("POWER"),
    ),
    "ecc": _each(
        current=lambda nvml, handle: _on(nvml.nvmlDeviceGetEccMode(handle)[0]),
        pending=lambda nvml, handle: _on(nvml.nvmlDeviceGetEccMode(handle)[1]),
        volatile_uncorrected_errors=_errors("VOLATILE"),
        aggregate_uncorrected_errors=_errors("AGGREGATE"),
    ),
    "mig": _each(
        current=lambda nvml, handle: _on(nvml.nvmlDeviceGetMigMode(handle)[0]),
        pending=lambda nvml, handle: _on(nvml.nvmlDeviceGetMigMode(handle)[1]),
    ),
    "clocks": _each(graphics=_clock("GRAPHICS"), sm=_clock("SM"), memory=_clock("MEM"), video=_clock("VIDEO")),
    "clock_event_reasons": _reasons,
    "performance_state": lambda nvml, handle: f"P{nvml.nvmlDeviceGetPerformanceState(handle)}",
    "power_limit_mw": _each(
        enforced=lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle),
        default=lambda nvml, handle: nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle),
        range=_limits,
    ),
    "temperature_c": lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    "persistence_mode": lambda nvml, handle: _on(nvml.nvmlDeviceGetPersistenceMode(handle)),
    "compute_mode": lambda nvml, handle: nvml.nvmlDeviceGetComputeMode(handle),
    "pcie": _each(
        generation=lambda nvml, handle: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        width=lambda nvml, handle: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
    ),
    "nvlink_active": _nvlinks,
}
"""What NVML is asked of each device."""
