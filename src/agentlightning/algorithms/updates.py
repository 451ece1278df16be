"""Minibatches: which rollouts share an optimizer update, and how strongly each of their tokens is trained by it.

LightningRL drives it once every rollout has its advantages. Every normalisation ends up in per-token weights, so that an
engine computes one SUM. Knows nothing of rewards, nor of what made the advantages.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast, get_args

from agentlightning.adapters.sequences import Aggregation, PerToken, merge, token_weights, until_last_signal
from agentlightning.algorithms.credit.rule import Credit
from agentlightning.algorithms.credit.tree import trees_of
from agentlightning.algorithms.plugins import plugin_weights
from agentlightning.training_types import TrainingSequence, Trajectory, Transition

if TYPE_CHECKING:
    from agentlightning.algorithms.lightning_rl import LightningRL


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """The training signal of one rollout; every list has one entry per transition."""

    advantages: Sequence[PerToken]
    credit: Credit
    """The credit that the advantages were made of."""
    others: Mapping[str, Sequence[PerToken]] = field(default_factory=dict)
    """Further columns of `training_types.TrainingSequence`, such as a critic's returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSignal:
    """The training signal of one call of a usable rollout."""

    rollout_id: str
    reward: float
    """The rollout's."""
    call: Transition
    credit: float
    advantages: PerToken
    share: float = 1.0
    """The share of the group's baseline that the credit was compared with."""
    bonus: float = 0.0
    """The part of the advantages that the credit rule added as it is."""
    score: float | None = None
    """The number by which the rollout was compared with the others of its group. None: its reward."""
    returns: PerToken | None = None
    """The critic's targets."""


def call_signals(trajectories: Sequence[Trajectory], signals: Mapping[str, Signal]) -> list[CallSignal]:
    """The signals of all calls of these rollouts."""
    return [
        CallSignal(
            rollout_id=one.rollout_id,
            reward=one.reward,
            call=call,
            credit=credit,
            advantages=advantages,
            share=share,
            bonus=bonus,
            score=signal.credit.score,
            returns=returns,
        )
        for one in trajectories
        if (signal := signals[one.rollout_id])
        for call, credit, share, bonus, advantages, returns in zip(
            one.transitions,
            signal.credit.values,
            signal.credit.shares or [1.0] * len(one.transitions),
            signal.credit.bonus or [0.0] * len(one.transitions),
            signal.advantages,
            signal.others.get("returns", [None] * len(one.transitions)),
            strict=True,
        )
    ]


def minibatches(
    settings: LightningRL,
    trajectories: Sequence[Trajectory],
    signals: Mapping[str, Signal],
    trained: Collection[str],
    seed: int,
) -> list[list[TrainingSequence]]:
    """One minibatch per update, at most `settings.minibatches` an epoch; a rollout is never split.

    Minibatches have the same number of rollouts whatever is learned from: those `trained` (ids) fill as few as they need,
    are joined there by others, which count in the weights and have no gradient, and the rest is left out. Of 32 rollouts,
    10 of them trained, in four minibatches: one of 8 of these, one of 2 and 6 others, and no third update. With dynamic
    sampling those trained are what the step wanted, and make all minibatches. A KL or entropy term has a gradient in every
    rollout: all minibatches are then made, of all rollouts that count.
    """
    counted = [one for one in trajectories if any(call.trained_tokens for call in one.transitions)]
    parts = min(settings.minibatches, len(counted))
    if settings.counts_informative_only:
        informative = [one for one in counted if one.rollout_id in trained]
        if settings.dynamic_sampling:  # the others were replaced: a step has as many updates however many they were
            parts = min(parts, len(informative))
        elif counted:
            parts = -(-len(informative) * parts // len(counted))
        counted = informative
    everywhere = bool(settings.loss_terms.kl or settings.entropy or settings.critic)
    whole = everywhere or settings.loss_terms.is_plugin  # which may have a gradient where the advantage is 0
    dice = random.Random(seed)
    trees = trees_of(counted) if settings.tree is not None else {}
    found = []
    for _ in range(settings.epochs):
        dice.shuffle(counted)
        if trees:  # side by side, since an engine may compute once what those of one minibatch begin with
            places = {
                number: place for place, number in enumerate(dict.fromkeys(trees[one.rollout_id] for one in counted))
            }
            counted.sort(key=lambda one: places[trees[one.rollout_id]])
        if not everywhere:  # a stable sort: both kinds stay in random order
            counted.sort(key=lambda one: one.rollout_id not in trained)
        for part in range(parts):
            share = counted[part * len(counted) // parts : (part + 1) * len(counted) // parts]
            if rows := _minibatch(settings, share, signals, None if everywhere else trained):
                rows = rows if whole else [*filter(None, map(until_last_signal, rows))]
                found.append(rows)
    return found


def _weights(settings: LightningRL, trajectories: Sequence[Trajectory]) -> Sequence[Sequence[PerToken]]:
    if settings.loss_aggregation in get_args(Aggregation):
        return token_weights(trajectories, cast(Aggregation, settings.loss_aggregation), settings.fixed_length)
    return plugin_weights(settings.loss_aggregation, settings.aggregation_settings, trajectories)


def _minibatch(
    settings: LightningRL,
    trajectories: Sequence[Trajectory],
    signals: Mapping[str, Signal],
    only: Collection[str] | None,
) -> list[TrainingSequence]:
    """The rows of the rollouts `only` (None: of all), with weights that count all."""
    weights = _weights(settings, trajectories)
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
        if only is not None and trajectory.rollout_id not in only:
            continue
        signal = signals[trajectory.rollout_id]
        rows = merge(
            trajectory.rollout_id,
            trajectory.transitions,
            signal.advantages,
            weights[place],
            {name: of_batch[place] for name, of_batch in terms.items()} | dict(signal.others),
            apart=not settings.merge,
        )
        found += [row for row in rows if any(row.mask)]
    return found
