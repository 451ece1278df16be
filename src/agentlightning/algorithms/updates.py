"""Minibatches: which rollouts share an optimizer update, and how strongly each of their tokens is trained by it.

LightningRL drives it once every rollout has its advantages. Every normalisation ends up in per-token weights, so that an
engine computes one SUM. Knows nothing of rewards, nor of what made the advantages.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentlightning.adapters.sequences import Aggregation, PerToken, merge, token_weights
from agentlightning.types import TrainingSequence, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """The training signal of one rollout; every list has one entry per transition."""

    advantages: Sequence[PerToken]
    others: Mapping[str, Sequence[PerToken]] = field(default_factory=dict)
    """Further columns of `types.TrainingSequence`, such as a critic's returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """Splits a step's rollouts into optimizer updates."""

    epochs: int = 1
    minibatches: int = 1
    merged: bool = True
    aggregation: Aggregation = "token_mean"
    kl_aggregation: Aggregation | None = None
    """Aggregation of the KL term where it is not the loss's own; likewise the next one."""
    entropy_aggregation: Aggregation | None = None
    fixed_length: int | None = None

    def plan(
        self, trajectories: Sequence[Trajectory], signals: Mapping[str, Signal], seed: int
    ) -> list[list[TrainingSequence]]:
        """One minibatch an update; every rollout is in one minibatch of each epoch, whole.

        Fewer minibatches where there are fewer rollouts. Epochs follow each other, each in an order of its own.
        """
        order = list(trajectories)
        dice = random.Random(seed)
        parts = min(self.minibatches, len(order))
        found = []
        for _ in range(self.epochs):
            dice.shuffle(order)
            found += [self._minibatch(order[part::parts], signals) for part in range(parts)]
        return found

    def _minibatch(self, trajectories: Sequence[Trajectory], signals: Mapping[str, Signal]) -> list[TrainingSequence]:
        weights = token_weights(trajectories, self.aggregation, self.fixed_length)
        terms = {
            name: token_weights(trajectories, aggregation, self.fixed_length)
            for name, aggregation in (
                ("kl_weights", self.kl_aggregation),
                ("entropy_weights", self.entropy_aggregation),
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
                apart=not self.merged,
            )
        return found
