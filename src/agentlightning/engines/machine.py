"""Machine: the device on which a local engine would compute, its memory and speed, found before anything else starts.

The trainer chooses defaults by it, says it first, and estimates a run's memory and time. A child process measures
(`local/measure.py`), since torch is not loaded here.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import TypeAdapter

from agentlightning.config.engine import EngineConfig, LocalLearner, LocalSampler
from agentlightning.engines.base import LearnerSetup
from agentlightning.engines.folders import ModelSize
from agentlightning.errors import ConfigError, EngineError
from agentlightning.runtime.children import inheritable

MEASURE_TIMEOUT_S = 120.0
"""For loading torch on a crowded machine and half a second of products."""
RUNTIME_BYTES = 5 * 10**8
"""A process that has loaded torch takes as much."""
STATE_BYTES, FROZEN_BYTES = 16, 4
"""Memory of a trained parameter (weight, gradient and two moments in float32), and of one that is not trained."""
ACTIVATION_NUMBERS = 25
"""Numbers that a backward pass keeps per token, layer and hidden state: 22 were measured with SmolLM2-135M."""
CPU_SHARE = 24
"""On a CPU the sampler's keys and values may take one part in so many of the free memory."""
ACTIVATION_SHARE = 12
"""And the activations of a backward pass: an update of 64 short rollouts of SmolLM2-135M takes 7.4, 6.3 and 5.0 s in
micro-batches of 512, 1,024 and 2,048 tokens, and 3.9, 4.3 and 4.6 GB."""
MIN_MICROBATCH_TOKENS = 256
LEARNER_SHARE = 0.6
"""Whole updates reach this share of the measured speed: with SmolLM2 .5 in prefix trees and .8 padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The device, number format and threads that [engine] means here, and their memory and speed."""

    device: str
    dtype: str
    sampler_threads: int
    learner_threads: int
    cores: int
    free_bytes: int
    """Free memory of the device; 0 where it does not say."""
    cache_bytes: int
    """Bound of the sampler's keys and values."""
    flops: float
    """Floating-point operations per second, forward and backward through dense layers, by the learner's threads."""

    @property
    def cpu(self) -> bool:
        return self.device == "cpu"


async def measure_machine(
    config: EngineConfig, withhold: frozenset[str] = frozenset(), *, turns: bool
) -> Machine | None:
    """None for engines that compute elsewhere. turns: sampler and learner take turns. ConfigError where torch cannot use
    `engine.device`."""
    if config.name != "local" or not isinstance(config.sampler, LocalSampler):
        return None
    given = [config.model_dump_json(), *(["--turns"] if turns else [])]
    return TypeAdapter(Machine).validate_json(await _measured("measure", given, withhold))


async def longest_row(folder: Path, setup: LearnerSetup, withhold: frozenset[str] = frozenset()) -> int | None:
    """Tokens of the longest row that the local engine's learner can train on its device, measured by a learner of its own;
    None for engines that compute elsewhere or on several devices, and where the device does not say its memory."""
    if setup.config.name != "local" or not isinstance(setup.config.learner, LocalLearner):
        return None
    given = ["--model", str(folder), "--setup", setup.to_json()]
    return TypeAdapter(int | None).validate_json(await _measured("longest_row", given, withhold))


async def _measured(program: str, arguments: Sequence[str], withhold: frozenset[str]) -> bytes:
    """Standard output of a program of the local engine, in a process of its own."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"agentlightning.engines.local.{program}", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=inheritable(os.environ, withhold),
    )
    try:
        async with asyncio.timeout(MEASURE_TIMEOUT_S):
            out, err = await child.communicate()
    except TimeoutError:
        raise EngineError(f"torch measured nothing within {MEASURE_TIMEOUT_S:g} s: is the machine too busy?") from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        lines = err.decode(errors="replace").strip().splitlines() or [f"code {child.returncode}"]
        raise (ConfigError if child.returncode == ConfigError.exit_code else EngineError)(lines[-1])
    return out


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
    state = FROZEN_BYTES if config.lora_rank is not None else STATE_BYTES + (FROZEN_BYTES if reference else 0)
    kept = (
        ACTIVATION_NUMBERS * (1 if config.gradient_checkpointing else layers) + config.gradient_checkpointing * layers
    )
    tokens = config.max_tokens_per_microbatch
    if machine.cpu and machine.free_bytes:
        tokens = microbatch_tokens(tokens, ACTIVATION_NUMBERS * layers * width * number, machine.free_bytes)
    activations = tokens * width * kept * number
    heads = int(table.get("num_attention_heads") or 1)
    head = int(table.get("head_dim") or width // heads)
    token = 2 * layers * int(table.get("num_key_value_heads") or heads) * head * number
    cache = min(machine.cache_bytes, config.max_num_seqs * size.context * token)
    # New weights are read while the old ones still sample.
    return MemoryEstimate(
        learner=RUNTIME_BYTES + state * size.parameters + activations,
        sampler=RUNTIME_BYTES + 2 * number * size.parameters + cache,
    )


def microbatch_tokens(most: int, token_bytes: int, free_bytes: int) -> int:
    """Tokens of one backward pass on a CPU, at most `most`: a power of two, at least MIN_MICROBATCH_TOKENS, whose
    activations take the share of free memory that ACTIVATION_SHARE gives them."""
    fitting = max(MIN_MICROBATCH_TOKENS, free_bytes // ACTIVATION_SHARE // max(1, token_bytes))
    return min(most, 1 << (fitting.bit_length() - 1))


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads(part: Literal["sampler", "learner"], *, turns: bool, tiny: bool) -> int:
    """Threads of a part: OMP_NUM_THREADS; every core if the parts take turns, but not for a tiny model, which is slower on
    several; else one for the sampler and half of the cores for the learner."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal():
        return int(given)
    if turns and not tiny:
        return cores()
    return 1 if part == "sampler" else max(1, cores() // 2)


def update_seconds(tokens: float, size: ModelSize, machine: Machine) -> float:
    """Seconds of forward and backward passes over so many tokens: six operations per parameter and token."""
    assert size.parameters is not None
    return 6 * tokens * size.parameters / (LEARNER_SHARE * machine.flops)
