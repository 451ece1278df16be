"""Preferences from recorded rollouts: pairs and labels from their rewards, and metrics of how well they hold.

The offline trainer drives it; see `offline.py`. A completion is a whole rollout: all that the model wrote in it, over all
its calls; what the environment wrote is context. The engine computes the losses (engines/preferences.py); the same formulas
stand here once more over plain numbers, for held-out examples, which need no gradient.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from agentlightning.algorithms.offline import Candidate, Example, OfflineAlgorithm, best_first, by_task
from agentlightning.errors import ConfigError
from agentlightning.training_types import PreferenceLoss


@dataclass(frozen=True, kw_only=True)
class PreferenceAlgorithm(OfflineAlgorithm):
    """Base of DPO and KTO."""

    needs_reference: ClassVar[bool] = True

    beta: PositiveFloat = 0.1
    """Strength of the pull towards the weights that the run began with (β)."""

    def loss(self, examples: Sequence[Example]) -> PreferenceLoss:
        """The loss for these examples."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DPO(PreferenceAlgorithm):
    """Direct preference optimisation: of two rollouts of one task, the one with the higher reward is preferred.

    Rafailov et al. (2023), Direct Preference Optimization; over whole trajectories as in Song et al. (2024), Trial and
    Error: Exploration-Based Trajectory Optimization for LLM Agents, equation 5.
    """

    name: ClassVar[str] = "dpo"

    margin: NonNegativeFloat = 0.0
    """A pair's rewards must differ by more than this."""
    pairs_per_task: PositiveInt | None = None
    """Pairs of one task, at most; None: all that it has."""

    def examples(self, candidates: Sequence[Candidate]) -> list[Example]:
        found = [
            Example(wanted=better.rollout_id, unwanted=worse.rollout_id, held_out=self.is_held_out(better.task))
            for group in by_task(candidates)
            for better, worse in pairs(group, self.margin)[: self.pairs_per_task]
        ]
        if candidates and not found:
            raise ConfigError(
                f"algorithm.margin: {len(candidates)} recorded rollouts give no pair: no task has two whose rewards "
                f"differ by more than {self.margin:g}; record more rollouts of each task"
            )
        return found

    def loss(self, examples: Sequence[Example]) -> PreferenceLoss:
        return PreferenceLoss(name="dpo", beta=self.beta)


@dataclass(frozen=True, kw_only=True)
class KTO(PreferenceAlgorithm):
    """Kahneman-Tversky optimisation: each rollout is wanted or not, and needs no counterpart.

    Ethayarajh et al. (2024), KTO: Model Alignment as Prospect Theoretic Optimization.
    """

    name: ClassVar[str] = "kto"

    threshold: float = 0.5
    """Rollouts with at least this reward are wanted, others are not."""
    chosen_weight: PositiveFloat | None = None
    """Weight of wanted rollouts (lambda_D). None: both kinds weigh the same in sum; see `balance`."""
    rejected_weight: PositiveFloat | None = None
    """Weight of unwanted rollouts (lambda_U)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.chosen_weight is None) != (self.rejected_weight is None):
            raise ConfigError("algorithm.chosen_weight: give it together with rejected_weight, or neither")

    def examples(self, candidates: Sequence[Candidate]) -> list[Example]:
        known = [one for one in candidates if one.reward is not None]
        found = [self._labelled(one) for group in by_task(known) for one in group]
        wanted = sum(one.wanted is not None for one in found)
        if candidates and wanted in (0, len(found)):
            which = "none" if wanted == 0 else "each"
            raise ConfigError(
                f"algorithm.threshold: {which} of {len(found)} recorded rollouts with a reward reaches {self.threshold:g}; "
                "kto needs wanted and unwanted ones"
            )
        return found

    def loss(self, examples: Sequence[Example]) -> PreferenceLoss:
        wanted = sum(one.wanted is not None for one in examples)
        chosen, rejected = balance(wanted, len(examples) - wanted)
        return PreferenceLoss(
            name="kto",
            beta=self.beta,
            chosen_weight=chosen if self.chosen_weight is None else self.chosen_weight,
            rejected_weight=rejected if self.rejected_weight is None else self.rejected_weight,
        )

    def _labelled(self, one: Candidate) -> Example:
        held_out = self.is_held_out(one.task)
        if one.reward is not None and one.reward >= self.threshold:
            return Example(wanted=one.rollout_id, held_out=held_out)
        return Example(unwanted=one.rollout_id, held_out=held_out)


def pairs(group: Sequence[Candidate], margin: float) -> list[tuple[Candidate, Candidate]]:
    """(better, worse) of one task: the best with the worst, the second best with the second worst, and so on.

    Each rollout is in one pair at most, so that none weighs more than others, and the widest difference comes first. Two
    rollouts in which the model wrote the same are no pair: the reward's difference is not the model's.
    Rewards 1, .75, .5, 0 and margin 0: (1, 0), (.75, .5); with margin .25 the first alone.
    """
    ranked = best_first(group)
    return [
        (better, worse)
        for better, worse in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False)
        if _reward(better) - _reward(worse) > margin and better.answer != worse.answer
    ]


def balance(wanted: int, unwanted: int) -> tuple[float, float]:
    """(lambda_D, lambda_U) with lambda_D × wanted = lambda_U × unwanted and the smaller of the two 1.

    Ethayarajh et al. (2024), section 4.2, keep the ratio of the two products between 1 and 4/3; here it is 1. 30 wanted and
    10 unwanted: 1 and 3. None of a kind: 1 and 1.
    """
    if not wanted or not unwanted:
        return 1.0, 1.0
    return max(1.0, unwanted / wanted), max(1.0, wanted / unwanted)


def preference_values(
    loss: PreferenceLoss, chosen: Sequence[float], rejected: Sequence[float], mismatched: Sequence[float] = ()
) -> dict[str, float]:
    """Mean loss, margin and accuracy of held-out examples, from log(policy / reference) of each completion.

    The formulas of engines/preferences.py: for dpo chosen[i] and rejected[i] are a pair; for kto they are the wanted and the
    others. accuracy: of dpo the share of pairs with a margin above 0.
    """
    if loss.name == "dpo":
        margins = [loss.beta * (better - worse) for better, worse in zip(chosen, rejected, strict=True)]
        return {
            "loss": statistics.fmean(-_log_sigmoid(margin) for margin in margins),
            "margin": statistics.fmean(margins),
            "accuracy": statistics.fmean(float(margin > 0) for margin in margins),
        }
    baseline = max(0.0, statistics.fmean(mismatched)) if mismatched else 0.0
    losses = [loss.chosen_weight * (1 - _sigmoid(loss.beta * (value - baseline))) for value in chosen]
    losses += [loss.rejected_weight * (1 - _sigmoid(loss.beta * (baseline - value))) for value in rejected]
    values = {"loss": statistics.fmean(losses)}
    if chosen and rejected:
        values["margin"] = loss.beta * (statistics.fmean(chosen) - statistics.fmean(rejected))
    return values


def _reward(candidate: Candidate) -> float:
    assert candidate.reward is not None  # best_first left those out
    return candidate.reward


def _sigmoid(value: float) -> float:
    return math.exp(_log_sigmoid(value))


def _log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value)) if value > 0 else value - math.log1p(math.exp(value))
