"""Policy update: the engine's part of one policy's training step.

`step_planner.py` drives it. The same plan and weights give the same updates, so a step can be executed again after a crash.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from agentlightning.adapters.sequences import by_call, merge
from agentlightning.algorithms.critic import Values
from agentlightning.algorithms.lightning_rl import LightningRL, UpdatePlan
from agentlightning.config.run import Config
from agentlightning.engines.base import Engine, Metrics
from agentlightning.engines.setup import EngineNeeds
from agentlightning.engines.support import check_loss
from agentlightning.errors import ConfigError
from agentlightning.trainer.policies import TrainedPolicy
from agentlightning.trainer.processes import engine_support
from agentlightning.trainer.progress import Progress
from agentlightning.training_types import TokenNumbers, TrainingSequence, Trajectory

RowNumbers = dict[tuple[str, int], TokenNumbers]
"""By `named_rows`: the loss's ratios, and the entropies, in the first update that trained the row."""


async def update_policy(
    engine: Engine,
    policy: str,
    trained: TrainedPolicy,
    plan: UpdatePlan,
    learning_rate: float,
    progress: Progress,
    numbers: RowNumbers | None = None,
) -> Metrics:
    """Executes the plan; returns means over its updates. `numbers`, where given, gets those that the engine reports."""
    updates: list[Metrics] = []
    minibatches = await _with_logprobs(engine, policy, trained.algorithm, plan.minibatches)
    for number, minibatch in enumerate(minibatches):
        progress.phase("learn", number, len(minibatches))
        update = await engine.forward_backward(minibatch, plan.loss, policy)
        rows = named_rows(minibatch)
        if numbers is not None and not rows.keys() <= numbers.keys():  # later epochs train the same rows again
            numbers |= zip(rows, await engine.token_numbers(policy), strict=True)
        updates.append(update | await engine.optim_step(learning_rate, trained.config.trainer.grad_clip, policy))
    return _over_updates(updates)


async def critic_values(
    engine: Engine, policy: str, algorithm: LightningRL, groups: Sequence[Sequence[Trajectory]]
) -> Values | None:
    """The critic's values of every sampled token, before the step's first update; None where there is no critic."""
    return None if algorithm.critic is None else await _by_call(engine.values, policy, algorithm, groups)


async def reference_values(
    engine: Engine, policy: str, algorithm: LightningRL, groups: Sequence[Sequence[Trajectory]]
) -> Values | None:
    """The reference's logprobs of every sampled token; None where no KL is in the reward."""
    return await _by_call(engine.reference_logprobs, policy, algorithm, groups) if algorithm.kl_in_reward else None


async def _by_call(
    forward: Callable[[Sequence[TrainingSequence], str], Awaitable[list[list[float]]]],
    policy: str,
    algorithm: LightningRL,
    groups: Sequence[Sequence[Trajectory]],
) -> Values:
    found: dict[str, list[float]] = {}
    for group in groups:
        rows = []
        for trajectory in group:
            calls, count = trajectory.transitions, len(trajectory.transitions)
            rows.append(merge(trajectory.rollout_id, calls, range(count), [0.0] * count, apart=not algorithm.merge))
        values = iter(await forward([row for of_rollout in rows for row in of_rollout], policy))
        for trajectory, of_rollout in zip(group, rows, strict=True):
            by_transition = by_call(of_rollout, [next(values) for _ in of_rollout])
            found |= zip((call.call_id for call in trajectory.transitions), by_transition, strict=True)
    return found


async def _with_logprobs(
    engine: Engine, policy: str, algorithm: LightningRL, minibatches: list[list[TrainingSequence]]
) -> list[list[TrainingSequence]]:
    """The minibatches with the trainer's own and the reference's logprobs from before the first update, where the loss
    asks for them."""
    passes = {}
    if algorithm.ratio == "old_policy":
        passes["old_logprobs"] = engine.logprobs
    if algorithm.loss_terms.kl:
        passes["ref_logprobs"] = engine.reference_logprobs
    if not passes:
        return minibatches
    known: dict[tuple[str, int], dict[str, Any]] = {}
    named = [named_rows(minibatch) for minibatch in minibatches]
    for minibatch in named:  # of one epoch alone: the next ones hold the same rows
        rows = {name: row for name, row in minibatch.items() if name not in known}
        for field, forward in passes.items():
            numbers = await forward(list(rows.values()), policy) if rows else []
            for name, of_row in zip(rows, numbers, strict=True):
                known.setdefault(name, {})[field] = of_row
    return [[replace(row, **known[name]) for name, row in minibatch.items()] for minibatch in named]


def check_fit(algorithm: LightningRL, config: Config) -> None:
    """ConfigError where the configured engine cannot do what the algorithm asks for, or where a setting has no effect."""
    needs = EngineNeeds(reference=algorithm.needs_reference, critic_learning_rate=algorithm.critic_learning_rate)
    support = engine_support(config, needs)
    try:
        check_loss(support, algorithm.loss_terms, old_logprobs=algorithm.ratio == "old_policy")
    except ConfigError as error:
        raise ConfigError(f"algorithm: {error}") from error
    if algorithm.kl_in_reward and not support.reference:
        raise ConfigError(f"algorithm.kl: the engine {support.engine!r} keeps no reference; expected kl = 0")
    if config.trainer.max_staleness and algorithm.loss == "reinforce" and algorithm.importance is None:
        raise ConfigError(
            "algorithm.importance: expected 'token' or 'call' with loss = 'reinforce' and trainer.max_staleness above 0, "
            "whose rollouts an older policy sampled, got none"
        )


def named_rows(rows: Sequence[TrainingSequence]) -> dict[tuple[str, int], TrainingSequence]:
    """Rows by rollout and place among its rows: the same in every epoch, since a rollout is never split."""
    counts: defaultdict[str, int] = defaultdict(int)
    named = {}
    for row in rows:
        named[row.rollout_id, counts[row.rollout_id]] = row
        counts[row.rollout_id] += 1
    return named


def _over_updates(updates: Sequence[Metrics]) -> Metrics:
    """Means over the optimizer updates of a step; the largest ratio, the sum of the tokens that the learner computed.

    sampler_gap is the divergence from the sampler before the first update, when only their arithmetic and stale weights
    set them apart.
    """
    merged: Metrics = {}
    for name in {name for update in updates for name in update}:
        values = [update[name] for update in updates if name in update]
        if name == "ratio_max":
            merged[name] = max(values)
        elif name == "learner_tokens":
            merged[name] = sum(values)
        elif name != "tokens":
            merged[name] = sum(values) / len(values)
    merged["updates"] = float(len(updates))
    if updates and "kl" in updates[0]:
        merged["sampler_gap"] = updates[0]["kl"]
    return merged
