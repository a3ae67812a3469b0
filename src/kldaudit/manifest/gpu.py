"""GPUs, as NVML and torch see them."""

from typing import Any


def gpus() -> list[dict[str, Any]] | str:
    """Name, SM and memory of each GPU that torch sees, or why there is none."""
    import torch

    if not torch.cuda.is_available():
        return "none: torch sees no CUDA device"
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        {"name": one.name, "sm": f"{one.major}.{one.minor}", "memory_bytes": one.total_memory} for one in properties
    ]
