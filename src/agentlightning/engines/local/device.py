"""The device and the number format that a process of the engine computes with; settled before it loads a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from agentlightning.errors import ConfigError

CPU_CACHE_GB = 4.0
GPU_CACHE_SHARE = 0.2
"""The learner's weights, optimizer and activations are in the same memory."""


def torch_has(what: str) -> bool:
    """True where torch has `cuda`, `mps`, or native `bfloat16` on CUDA."""
    match what:
        case "cuda":
            return torch.cuda.is_available()
        case "mps":
            return torch.backends.mps.is_available()
        case _:
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def cuda_memory(device: str) -> int:
    """Bytes of memory that a CUDA device has."""
    return int(torch.cuda.get_device_properties(device).total_memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Device and number format, both settled."""

    device: str
    dtype: str

    def cache_bytes(self, limit_gb: float | None, memory: Callable[[str], int] = cuda_memory) -> int:
        """Bound of the sampler's keys and values; without a limit 4 GB, on CUDA a fifth of the device's memory."""
        if limit_gb is None and self.device.startswith("cuda"):
            return int(memory(self.device) * GPU_CACHE_SHARE)
        return int((CPU_CACHE_GB if limit_gb is None else limit_gb) * 1e9)


def settle(device: str, dtype: str, has: Callable[[str], bool] = torch_has) -> Hardware:
    """`auto` is the best that `has` says torch has here: cuda, mps, cpu; bfloat16 on CUDA, float32 elsewhere."""
    if device == "auto":
        device = next((kind for kind in ("cuda", "mps") if has(kind)), "cpu")
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") and has("bfloat16") else "float32"
    return Hardware(device=device, dtype=dtype)


def check_device(device: str) -> None:
    """ConfigError where torch cannot use it."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as cause:
        why = str(cause).strip().partition("\n")[0]
        raise ConfigError(f"engine.device: torch cannot use {device!r} on this machine: {why}") from None
