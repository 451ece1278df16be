"""Learning: what makes optimizer updates of a step's rollouts.

`lessons.py` drives it, first `plan`, then `update`. The same rollouts, step and weights give the same updates, so a
step can be executed again after a crash. It neither collects nor publishes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentlightning.adapters.sequences import by_call, merge, unmerged
from agentlightning.algorithms.critic import Values
from agentlightning.algorithms.lightning_rl import LightningRL, Plan
from agentlightning.algorithms.rewards import without_air
from agentlightning.algorithms.selection import own_groups
from agentlightning.config import Config
from agentlightning.engines.base import DEFAULT_POLICY, Engine, Metrics
from agentlightning.engines.support import check_loss
from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStore
from agentlightning.trainer.air import air_effect
from agentlightning.trainer.evidence import Witness
from agentlightning.trainer.processes import engine_support
from agentlightning.trainer.progress import Progress
from agentlightning.types import Sequence, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """How one policy learns."""

    config: Config
    algorithm: LightningRL
    run_id: str
    folder: Path
    store: LightningStore
    engine: Engine
    progress: Progress
    policy: str = DEFAULT_POLICY

    async def plan(self, step: int, groups: Seq[Seq[Trajectory]]) -> tuple[Plan, Metrics]:
        """What to do with these groups, and what finding it out has cost."""
        air = air_effect(self.algorithm, groups) if self.config.air.rules else {}
        if not self.config.air.counted:
            groups = without_air(groups)
        witness = Witness(algorithm=self.algorithm, store=self.store, run_id=self.run_id, folder=self.folder / "judge")
        evidence, cost = await witness.gather(step, groups)
        if not self.config.air.counted:
            evidence = replace(evidence, history=without_air(evidence.history))
        values = await self.values(own_groups(groups))
        seed = self.config.trainer.seed * 1_000_003 + step
        return self.algorithm.plan(groups, seed=seed, evidence=evidence, values=values), cost | air

    async def update(self, plan: Plan, learning_rate: float) -> Metrics:
        """Execute the plan; means over its updates."""
        updates: list[Metrics] = []
        minibatches = await self._with_logprobs(plan.minibatches)
        for number, minibatch in enumerate(minibatches):
            self.progress.phase("learn", number, len(minibatches))
            update = await self.engine.forward_backward(minibatch, plan.loss, self.policy)
            clip = self.config.trainer.grad_clip
            updates.append(update | await self.engine.optim_step(learning_rate, clip, self.policy))
        return _over_updates(updates)

    async def values(self, groups: Seq[Seq[Trajectory]]) -> Values | None:
        """What the critic says of every sampled token, before the step's first update; None where there is none."""
        if self.algorithm.critic is None:
            return None
        found: dict[str, list[float]] = {}
        make = merge if self.algorithm.merge else unmerged
        for group in groups:
            rows = []
            for trajectory in group:
                count = len(trajectory.transitions)
                rows.append(make(trajectory.rollout_id, trajectory.transitions, range(count), [0.0] * count))
            values = iter(await self.engine.values([row for ofone in rows for row in ofone], self.policy))
            for trajectory, ofone in zip(group, rows, strict=True):
                said = by_call(ofone, [next(values) for _ in ofone])
                found |= zip((call.call_id for call in trajectory.transitions), said, strict=True)
        return found

    async def _with_logprobs(self, minibatches: list[list[Sequence]]) -> list[list[Sequence]]:
        """With what the trainer and the reference say of each token before the first update, where the loss asks."""
        verbs = {}
        if self.algorithm.ratio == "trainer":
            verbs["old_logprobs"] = self.engine.logprobs
        if self.algorithm.needs_reference:
            verbs["ref_logprobs"] = self.engine.reference_logprobs
        if not verbs:
            return minibatches
        known: dict[tuple[str, int], dict[str, Any]] = {}
        named = [_named(minibatch) for minibatch in minibatches]
        for minibatch in named:  # of one epoch alone: the next ones hold the same rows
            rows = {name: row for name, row in minibatch.items() if name not in known}
            for field, verb in verbs.items():
                numbers = await verb(list(rows.values()), self.policy) if rows else []
                for name, ofrow in zip(rows, numbers, strict=True):
                    known.setdefault(name, {})[field] = ofrow
        return [[replace(row, **known[name]) for name, row in minibatch.items()] for minibatch in named]


def check_fit(algorithm: LightningRL, config: Config) -> None:
    """ConfigError where the configured engine cannot do what the algorithm asks for, or where a setting has no effect."""
    support = engine_support(
        config, reference=algorithm.needs_reference, critic_learning_rate=algorithm.critic_learning_rate
    )
    try:
        check_loss(support, algorithm.loss_terms, old_logprobs=algorithm.ratio == "trainer")
    except ConfigError as error:
        raise ConfigError(f"algorithm: {error}") from error
    if config.trainer.max_staleness and algorithm.loss == "reinforce" and algorithm.importance is None:
        raise ConfigError(
            "algorithm.importance: expected 'token' or 'call' with loss = 'reinforce' and trainer.max_staleness above 0, "
            "whose rollouts an older policy sampled, got none"
        )


def _named(rows: Seq[Sequence]) -> dict[tuple[str, int], Sequence]:
    """Rows by rollout and place among its rows: the same in every epoch, since a rollout is never split."""
    counts: defaultdict[str, int] = defaultdict(int)
    named = {}
    for row in rows:
        named[row.rollout_id, counts[row.rollout_id]] = row
        counts[row.rollout_id] += 1
    return named


def _over_updates(updates: Seq[Metrics]) -> Metrics:
    """Means over the optimizer updates of a step; the largest ratio.

    sampler_gap is the divergence from the sampler before the first update, when only their arithmetic and stale weights
    set them apart.
    """
    merged: Metrics = {}
    for name in {name for update in updates for name in update}:
        values = [update[name] for update in updates if name in update]
        if name == "ratio_max":
            merged[name] = max(values)
        elif name != "tokens":
            merged[name] = sum(values) / len(values)
    merged["updates"] = float(len(updates))
    if updates and "kl" in updates[0]:
        merged["sampler_gap"] = updates[0]["kl"]
    return merged
