"""The device that a process of the engine computes on: sampler and learner look before they load a model."""

from __future__ import annotations

import torch

from agentlightning.errors import ConfigError


def check_device(device: str) -> None:
    """ConfigError where torch cannot use it."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as cause:
        why = str(cause).strip().partition("\n")[0]
        raise ConfigError(f"engine.device: torch cannot use {device!r} on this machine: {why}") from None
