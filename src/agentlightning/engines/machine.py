"""Machine: the device on which a local engine would compute, its memory and speed, found before anything else starts.

The trainer chooses defaults by it, says it first, and estimates a run's memory and time. A child process measures
(`local/measure.py`), since torch is not loaded here.
"""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter

from agentlightning.config.engine import EngineConfig, LocalSampler
from agentlightning.engines.folders import ModelSize
from agentlightning.errors import ConfigError, EngineError
from agentlightning.runtime.children import inheritable

MEASURE_TIMEOUT_S = 120.0
"""For loading torch on a crowded machine and half a second of products."""
RUNTIME_BYTES = 5 * 10**8
"""Of a process that has loaded torch."""
STATE_BYTES, ADAPTER_BYTES, ACTIVATION_NUMBERS = 16, 4, 25
"""Per parameter, of weights, gradient and two moments in float32, and of weights that stay; numbers that a backward pass
keeps per token, layer and state. The last was measured with SmolLM2 (30 layers of 576): 7 GB for 4,096 tokens in float32."""
LEARNER_SHARE = 0.6
"""Of the measured speed, reached by whole updates: of SmolLM2 .5 in prefix trees, .8 padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device, number format and threads that [engine] means here, and their memory and speed."""

    device: str
    dtype: str
    sampler_threads: int
    learner_threads: int
    cores: int
    free_bytes: int
    """Of the device's memory."""
    cache_bytes: int
    """Bound of the sampler's keys and values."""
    flops: float
    """Floating-point operations per second, forward and backward through dense layers, by the learner's threads."""

    @property
    def cpu(self) -> bool:
        return self.device == "cpu"


async def measure_machine(config: EngineConfig, withhold: frozenset[str] = frozenset()) -> Machine | None:
    """None for engines that compute elsewhere. ConfigError where torch cannot use `engine.device`."""
    if config.name != "local" or not isinstance(config.sampler, LocalSampler):
        return None
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentlightning.engines.local.measure", config.model_dump_json()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=inheritable(os.environ, withhold),
    )
    try:
        async with asyncio.timeout(MEASURE_TIMEOUT_S):
            out, err = await child.communicate()
    except TimeoutError:
        raise EngineError(f"torch was not loaded within {MEASURE_TIMEOUT_S:g} s: is the machine too busy?") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        lines = err.decode(errors="replace").strip().splitlines() or [f"code {child.returncode}"]
        raise (ConfigError if child.returncode == ConfigError.exit_code else EngineError)(lines[-1])
    return TypeAdapter(Machine).validate_json(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes, about, that the parts of one policy's local engine need at most."""

    learner: int
    sampler: int

    @property
    def both(self) -> int:
        return self.learner + self.sampler


def estimate_memory(
    folder: Path, size: ModelSize, config: EngineConfig, machine: Machine, *, reference: bool
) -> MemoryEstimate:
    """reference: the learner keeps a copy of the first weights."""
    assert size.parameters is not None
    table: dict[str, Any] = orjson.loads((folder / "config.json").read_bytes())
    table = table.get("text_config") or table
    layers, width = int(table.get("num_hidden_layers") or 0), int(table.get("hidden_size") or 0)
    number = 2 if machine.dtype == "bfloat16" else 4
    state = ADAPTER_BYTES if config.lora_rank is not None else STATE_BYTES + (ADAPTER_BYTES if reference else 0)
    kept = (
        ACTIVATION_NUMBERS * (1 if config.gradient_checkpointing else layers) + config.gradient_checkpointing * layers
    )
    activations = config.max_tokens_per_microbatch * width * kept * number
    heads = int(table.get("num_attention_heads") or 1)
    head = int(table.get("head_dim") or width // heads)
    token = 2 * layers * int(table.get("num_key_value_heads") or heads) * head * number
    cache = min(machine.cache_bytes, config.max_num_seqs * size.context * token)
    # New weights are read while the old ones still sample.
    return MemoryEstimate(
        learner=RUNTIME_BYTES + state * size.parameters + activations,
        sampler=RUNTIME_BYTES + 2 * number * size.parameters + cache,
    )


def update_seconds(tokens: float, size: ModelSize, machine: Machine) -> float:
    """Of forward and backward passes over that many tokens: six operations per parameter and token."""
    assert size.parameters is not None
    return 6 * tokens * size.parameters / (LEARNER_SHARE * machine.flops)
