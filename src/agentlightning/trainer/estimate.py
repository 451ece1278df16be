"""Estimates of a run's memory and time: what a start says first, and `agl check` once it has measured rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentlightning.config.engine import EngineConfig
from agentlightning.config.run import Config
from agentlightning.engines.folders import ModelSize
from agentlightning.engines.machine import Machine, estimate_memory, update_seconds
from agentlightning.records import Call, Rollout
from agentlightning.trainer.progress import duration

GB = 1e9


def machine_notes(
    folder: Path, size: ModelSize, engine: EngineConfig, machine: Machine, *, reference: bool
) -> list[str]:
    """Sentences about the model, the device and the memory."""
    device = f"{machine.device} (auto)" if engine.device == "auto" else machine.device
    dtype = f"{machine.dtype} (auto)" if engine.dtype == "auto" else machine.dtype
    threads = f"threads: sampler {machine.sampler_threads}, learner {machine.learner_threads}, of {machine.cores} cores"
    notes = [f"model: {size}; device {device}, {dtype}" + (f"; {threads}" if machine.cpu else "")]
    if size.parameters is None:
        return notes
    need = estimate_memory(folder, size, engine, machine, reference=reference)
    there = f", {machine.free_bytes / GB:.1f} GB free" if machine.free_bytes else ""
    memory = (
        f"memory: about {need.both / GB:.1f} GB at most (learner {need.learner / GB:.1f}, sampler "
        f"{need.sampler / GB:.1f}){there}"
    )
    if 0 < machine.free_bytes < need.both:
        smaller = (
            "engine.max_tokens_per_microbatch"
            if engine.gradient_checkpointing
            else "engine.gradient_checkpointing = true"
        )
        memory += f": lower it with {smaller} or engine.max_num_seqs" + (
            "" if engine.lora_rank else ", or engine.lora_rank = 16"
        )
    return [*notes, memory]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRoom:
    """Tokens of the longest row: what the device can train, and what the agent made."""

    fits: int
    longest: int

    @property
    def sentence(self) -> str:
        more = (
            ""
            if self.longest <= self.fits
            else ": let the agent take fewer turns, or train an adapter (engine.lora_rank)"
        )
        return f"long rows: {self.fits:,} tokens fit, measured; your longest was {self.longest:,}{more}"

    @property
    def figures(self) -> dict[str, float]:
        """The numbers, by name."""
        return {"tokens_fit": self.fits, "longest_row": self.longest}


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Estimates from rollouts that were measured together."""

    tokens_per_s: float
    """Sampled."""
    step_s: float
    hours: float
    """Of the run with its evaluations."""
    sentence: str

    @property
    def figures(self) -> dict[str, float]:
        """The numbers, by name."""
        return {"tokens_per_s": self.tokens_per_s, "step_s": self.step_s, "hours": self.hours}


def estimate_speed(
    config: Config,
    rollouts: Sequence[Rollout],
    calls: Sequence[Call],
    seconds: float,
    *,
    group_size: int,
    held_out: int,
    learner: tuple[ModelSize, Machine] | None,
) -> Speed:
    """seconds: of these rollouts, executed together. held_out: tasks of an evaluation. learner: None where its speed is not
    known, which leaves the update out."""
    trainer, count = config.trainer, len(rollouts)
    per_s = count / seconds
    sampled = sum(len(call.sampled_ids) for call in calls)
    of_step = trainer.tasks_per_step * group_size
    collect_s = of_step / per_s
    update_s = 0.0
    if learner is not None:
        # What a call adds to the one before; equal prompts of a group count once in prefix trees.
        added = float(sum(len(call.suffix_ids) for call in calls))
        shared = sum(len(call.suffix_ids) for call in calls if call.parent_id is None)
        if config.engine.packing == "prefix_tree" or (config.engine.packing == "auto" and learner[1].cpu):
            added -= shared * (1 - 1 / group_size)
        update_s = update_seconds((added + sampled) * of_step / count, *learner)
    step_s = collect_s + update_s
    evaluations = 2 * (2 if config.eval.sampled else 1) + (
        trainer.steps // config.eval.every if config.eval.every else 0
    )
    hours = (trainer.steps * step_s + evaluations * held_out / per_s) / 3600
    half = f"trainer.tasks_per_step = {trainer.tasks_per_step // 2}"
    if trainer.tasks_per_step < 2:
        half = f"trainer.steps = {max(1, trainer.steps // 2)}"
    of_update = f", update {update_s:.3g} s" if learner is not None else "; the update not counted"
    sentence = (
        f"speed: {sampled / seconds:.3g} tokens/s sampled; a step of {of_step} rollouts takes about {step_s:.3g} s (collect "
        f"{collect_s:.3g} s{of_update}), the run of {trainer.steps} steps about {duration(3600 * hours)}; {half} halves it"
    )
    return Speed(tokens_per_s=sampled / seconds, step_s=step_s, hours=hours, sentence=sentence)
