"""Learning: what makes optimizer updates of a step's rollouts.

The training loop drives it, first `prepare`, then `update`. The same rollouts, step and weights give the same updates, so a
step can be executed again after a crash. It neither collects nor publishes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

from agentlightning.adapters.trajectories import trajectories
from agentlightning.algorithms.lightning_rl import LightningRL, Plan
from agentlightning.config import Config
from agentlightning.engines.base import Engine, Metrics
from agentlightning.errors import AgentError
from agentlightning.store.base import LightningStore
from agentlightning.trainer.collect import refuse_silence
from agentlightning.trainer.evidence import Witness
from agentlightning.trainer.progress import Progress
from agentlightning.types import Rollout, Trajectory

RECORD_BATCH = 128
"""Rollouts whose calls are read from the store at a time: bounds the size of one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What a step has to teach."""

    plan: Plan
    metrics: Metrics
    """Of the rollouts and of the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """How one run learns."""

    config: Config
    algorithm: LightningRL
    run_id: str
    folder: Path
    store: LightningStore
    engine: Engine
    progress: Progress

    async def prepare(self, step: int, rollouts: Seq[Rollout]) -> Lesson:
        """The plan for these rollouts. AgentError where all of them failed."""
        groups, metrics = await self._trajectories(rollouts)
        witness = Witness(algorithm=self.algorithm, store=self.store, run_id=self.run_id, folder=self.folder / "judge")
        evidence, cost = await witness.gather(step, groups)
        plan = self.algorithm.plan(groups, seed=self.config.trainer.seed * 1_000_003 + step, evidence=evidence)
        return Lesson(plan=plan, metrics=metrics | cost | plan.stats)

    async def update(self, lesson: Lesson, learning_rate: float) -> Metrics:
        """Execute the plan; means over its updates."""
        updates: list[Metrics] = []
        for number, minibatch in enumerate(lesson.plan.minibatches):
            self.progress.phase("learn", number, len(lesson.plan.minibatches))
            update = await self.engine.forward_backward(minibatch, lesson.plan.loss)
            updates.append(update | await self.engine.optim_step(learning_rate, self.config.trainer.grad_clip))
        return _over_updates(updates)

    async def _trajectories(self, rollouts: Seq[Rollout]) -> tuple[list[list[Trajectory]], Metrics]:
        """Groups of trajectories in the order of `rollouts`, and counts of what could not be used."""
        silence = refuse_silence(rollouts)
        if silence is not None:
            self.progress.note(silence)
        failed = [rollout for rollout in rollouts if rollout.state != "succeeded"]
        if failed and len(failed) == len(rollouts):
            raise AgentError(f"all {len(rollouts)} rollouts of the step failed, the first with: {failed[0].error}")
        if self.config.agent.on_failure == "zero":
            rollouts = [
                rollout if rollout.state == "succeeded" else replace(rollout, reward=0.0) for rollout in rollouts
            ]
        groups: defaultdict[str, list[Trajectory]] = defaultdict(list)
        calls = forked = invalid = 0
        for start in range(0, len(rollouts), RECORD_BATCH):  # calls hold all text, too: never those of a whole step
            part = rollouts[start : start + RECORD_BATCH]
            ids = [rollout.id for rollout in part]
            found = await self.store.calls(ids)
            kept, left_out = trajectories(part, found, await self.store.rewards(ids), keep_unrewarded=True)
            for trajectory in kept:
                groups[trajectory.group_id].append(trajectory)
            calls += len(found)
            forked += sum(call.fork_cause is not None for call in found)
            invalid += len(left_out)
        return list(groups.values()), {
            "rollouts": float(len(rollouts)),
            "calls": float(calls),
            "forked_calls": float(forked),
            "failed": float(len(failed)),
            "invalid": float(invalid),
        }


def _over_updates(updates: Seq[Metrics]) -> Metrics:
    """Means over the optimizer updates of a step; the largest ratio and the sum of tokens."""
    merged: Metrics = {}
    for name in {name for update in updates for name in update}:
        values = [update[name] for update in updates if name in update]
        if name == "ratio_max":
            merged[name] = max(values)
        elif name != "tokens":
            merged[name] = sum(values) / len(values)
    return merged
