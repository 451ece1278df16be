"""Minibatches: which rollouts share an optimizer update, and how strongly each of their tokens is trained by it.

LightningRL drives it once every rollout has its advantages. Every normalisation ends up in per-token weights, so that an
engine computes one SUM. Knows nothing of rewards, nor of what made the advantages.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agentlightning.adapters.sequences import PerToken, merge, token_weights
from agentlightning.types import TrainingSequence, Trajectory

if TYPE_CHECKING:
    from agentlightning.algorithms.lightning_rl import LightningRL


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """The training signal of one rollout; every list has one entry per transition."""

    advantages: Sequence[PerToken]
    others: Mapping[str, Sequence[PerToken]] = field(default_factory=dict)
    """Further columns of `types.TrainingSequence`, such as a critic's returns."""


def minibatches(
    settings: LightningRL, trajectories: Sequence[Trajectory], signals: Mapping[str, Signal], seed: int
) -> list[list[TrainingSequence]]:
    """One minibatch per update; every rollout is in one minibatch of each epoch, whole.

    Fewer minibatches where there are fewer rollouts. Epochs follow each other, each in an order of its own.
    """
    order = list(trajectories)
    dice = random.Random(seed)
    parts = min(settings.minibatches, len(order))
    found = []
    for _ in range(settings.epochs):
        dice.shuffle(order)
        found += [_minibatch(settings, order[part::parts], signals) for part in range(parts)]
    return found


def _minibatch(
    settings: LightningRL, trajectories: Sequence[Trajectory], signals: Mapping[str, Signal]
) -> list[TrainingSequence]:
    weights = token_weights(trajectories, settings.aggregation, settings.fixed_length)
    terms = {
        name: token_weights(trajectories, aggregation, settings.fixed_length)
        for name, aggregation in (
            ("kl_weights", settings.kl_aggregation),
            ("entropy_weights", settings.entropy_aggregation),
        )
        if aggregation is not None
    }
    found: list[TrainingSequence] = []
    for place, trajectory in enumerate(trajectories):
        signal = signals[trajectory.rollout_id]
        found += merge(
            trajectory.rollout_id,
            trajectory.transitions,
            signal.advantages,
            weights[place],
            {name: of_batch[place] for name, of_batch in terms.items()} | dict(signal.others),
            apart=not settings.merge,
        )
    return found
