"""Measures the machine for `engines/machine.py`, in a process of its own: prints a `Machine` as one line of JSON."""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import argparse
import sys
import time

import torch
from pydantic import TypeAdapter

from agentlightning.config.engine import EngineConfig
from agentlightning.engines.local.model import check_device, free_memory, settle
from agentlightning.engines.machine import Machine, cores, default_threads
from agentlightning.errors import AgentLightningError

BATCH, CUDA_BATCH = (512, 768), (8192, 2048)
"""Tokens and width of what is computed."""
MEASURED_S, MIN_PASSES = 0.3, 5


def measure(config: EngineConfig, *, turns: bool) -> Machine:
    """ConfigError where torch cannot use the configured device."""
    hardware = settle(config.device, config.dtype)
    check_device(hardware.device)
    torch.set_num_threads(default_threads("learner", turns=turns, tiny=False))
    return Machine(
        device=hardware.device,
        dtype=hardware.dtype,
        sampler_threads=default_threads("sampler", turns=turns, tiny=False),
        learner_threads=torch.get_num_threads(),
        cores=cores(),
        free_bytes=_free_memory(hardware.device),
        cache_bytes=hardware.cache_bytes(),
        flops=_flops(hardware.device, getattr(torch, hardware.dtype)),
    )


def _free_memory(device: str) -> int:
    return int(torch.cuda.mem_get_info(device)[0]) if device.startswith("cuda") else free_memory()


def _flops(device: str, dtype: torch.dtype) -> float:
    """By the best pass forward and backward through two layers of float32 weights, as the learner computes them."""
    tokens, width = CUDA_BATCH if device.startswith("cuda") else BATCH
    layers = torch.nn.Sequential(torch.nn.Linear(width, 3 * width), torch.nn.SiLU(), torch.nn.Linear(3 * width, width))
    layers.to(device)
    given = torch.randn(tokens, width, device=device, requires_grad=True)
    best, passes, started = 0.0, 0, time.perf_counter()
    while passes < MIN_PASSES or time.perf_counter() - started < MEASURED_S:
        passes += 1
        before = time.perf_counter()
        with torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32):
            layers(given).sum().backward()
        assert given.grad is not None
        given.grad[0, 0].item()  # waits for the device
        best = max(best, 6 * tokens * 2 * 3 * width**2 / (time.perf_counter() - before))
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="[engine] as JSON")
    parser.add_argument("--turns", action="store_true", help="sampler and learner take turns")
    given = parser.parse_args()
    try:
        machine = measure(EngineConfig.model_validate_json(given.config), turns=given.turns)
    except AgentLightningError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    print(TypeAdapter(Machine).dump_json(machine).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
