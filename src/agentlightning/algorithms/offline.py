"""Offline training: imitation of recorded rollouts, and preferences among them.

Candidates (recorded rollouts, by numbers and names alone) in, examples out. Pure: the same candidates give the same examples
in the same order. A completion is a whole rollout: all that the model wrote in it. Engines compute the losses
(engines/losses.py); the same formulas stand here over plain numbers, for held-out examples.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from agentlightning.algorithms.rewards import alike, without_rounding
from agentlightning.algorithms.selection import SideCalls
from agentlightning.algorithms.settings import Names, check_settings
from agentlightning.errors import ConfigError
from agentlightning.training_types import Loss, PreferenceLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One recorded rollout that can be learned from."""

    rollout_id: str
    task: str
    """Equal for rollouts of equal tasks, whichever run and group they are of."""
    reward: float | None
    answer: str
    """Equal for rollouts of one task in which the model wrote the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The unit of an update, as ids of rollouts."""

    wanted: str | None = None
    """To be imitated, or preferred."""
    unwanted: str | None = None
    """To be avoided: the other half of a pair, or an example of its own."""
    held_out: bool = False
    """Never trained on: its loss measures how well what was learned holds elsewhere."""


@dataclass(frozen=True, kw_only=True)
class OfflineAlgorithm:
    """Settings of every offline algorithm."""

    name: ClassVar[str]
    needs_reference: ClassVar[bool] = False
    """True where it compares with the weights that the run began with."""
    renders: ClassVar[bool] = False
    """True where it renders messages in place of the recorded token ids."""

    held_out: Annotated[float, Field(ge=0, le=0.9)] = 0.05
    """Share of the tasks that is never trained on, and gives the held-out loss; 0: none."""
    agents: Names | None = None
    """Selects the calls that are trained on, as in `selection.selection`; the others are context. None: all."""
    side_calls: SideCalls = "context"
    """Calls beside the task, such as for a title: context or train."""
    reward: Annotated[str, Field(min_length=1)] | None = None
    """Name of the final reward that counts, such as one that `agl rewards rescore` wrote. None: the rollout's own."""

    def __post_init__(self) -> None:
        check_settings(self)

    def examples(self, candidates: Sequence[Candidate]) -> list[Example]:
        """Returns the examples in a fixed order. ConfigError, with the setting to change, where there are none."""
        raise NotImplementedError

    def is_held_out(self, task: str) -> bool:
        """True if this task's examples are held out: decided by its content, so that every run holds out the same."""
        place = int.from_bytes(blake2b(task.encode(), digest_size=6).digest()) / 2**48
        return place < self.held_out


@dataclass(frozen=True, kw_only=True)
class SupervisedAlgorithm(OfflineAlgorithm):
    """Base of SFT, RFT and Distill: the cross-entropy of what the model wrote, a mean over the tokens of a batch."""

    threshold: float | None = None
    """Rollouts with a lower reward, or with none, are left out; None: none is."""

    @property
    def loss(self) -> Loss:
        return Loss(name="sft")

    def examples(self, candidates: Sequence[Candidate]) -> list[Example]:
        good = [one for one in candidates if self.threshold is None or _at_least(one, self.threshold)]
        if candidates and not good:
            known = [one.reward for one in candidates if one.reward is not None]
            highest = f"the highest is {max(known):g}" if known else "none has one"
            raise ConfigError(
                f"algorithm.threshold: none of {len(candidates)} recorded rollouts has a reward of at least "
                f"{self.threshold:g}; {highest}"
            )
        return [Example(wanted=one.rollout_id, held_out=self.is_held_out(one.task)) for one in self.chosen(good)]

    def chosen(self, good: Sequence[Candidate]) -> list[Candidate]:
        """Those that are imitated."""
        return list(good)


@dataclass(frozen=True, kw_only=True)
class SFT(SupervisedAlgorithm):
    """Supervised fine-tuning: imitate every recorded rollout, or with `threshold` every good one."""

    name: ClassVar[str] = "sft"


@dataclass(frozen=True, kw_only=True)
class RFT(SupervisedAlgorithm):
    """Rejection-sampling fine-tuning: imitate the best rollouts of each task, each way of solving it once.

    Yuan et al. (2023), Scaling Relationship on Learning Mathematical Reasoning with LLMs, section 3.3 (correct samples,
    distinct ones); with per_task = 1 RAFT (Dong et al., 2023, section 3).
    """

    name: ClassVar[str] = "rft"

    threshold: float = 0.5
    per_task: PositiveInt | None = 4
    """Rollouts of one task, at most, so that easy tasks do not crowd out the others; None: all."""

    def chosen(self, good: Sequence[Candidate]) -> list[Candidate]:
        return [one for group in by_task(good) for one in best(group, self.per_task)]


@dataclass(frozen=True, kw_only=True)
class Distill(SupervisedAlgorithm):
    """Distillation: imitate what a stronger model answered, rendered as this model's template writes it.

    Kim and Rush (2016), Sequence-Level Knowledge Distillation, equation 6, with the teacher's samples.
    """

    name: ClassVar[str] = "distill"
    renders: ClassVar[bool] = True

    models: Names | None = None
    """The teacher: model names as agents asked for them, in which * and ? stand for other text; None: every model that
    is not the run's own."""

    def teaches(self, policy: str, model: str) -> bool:
        """True where a call is the teacher's; `policy` is empty where an external model answered."""
        if self.models is None:
            return not policy
        return any(fnmatchcase(model, pattern) for pattern in self.models)


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

    def examples(self, candidates: Sequence[Candidate]) -> list[Example]:
        found = [
            Example(wanted=better.rollout_id, unwanted=worse.rollout_id, held_out=self.is_held_out(better.task))
            for group in by_task(candidates)
            for better, worse in pairs(group, self.margin)
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
    """Kahneman-Tversky optimisation: each rollout is wanted or not, and needs no counterpart; both kinds weigh the same in
    sum, see `balance`.

    Ethayarajh et al. (2024), KTO: Model Alignment as Prospect Theoretic Optimization.
    """

    name: ClassVar[str] = "kto"

    threshold: float = 0.5
    """Rollouts with at least this reward are wanted, others are not."""

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
        return PreferenceLoss(name="kto", beta=self.beta, chosen_weight=chosen, rejected_weight=rejected)

    def _labelled(self, one: Candidate) -> Example:
        held_out = self.is_held_out(one.task)
        if _at_least(one, self.threshold):
            return Example(wanted=one.rollout_id, held_out=held_out)
        return Example(unwanted=one.rollout_id, held_out=held_out)


def by_task(candidates: Iterable[Candidate]) -> list[list[Candidate]]:
    """The candidates of each task, tasks in the order of their first one."""
    found: defaultdict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        found[candidate.task].append(candidate)
    return list(found.values())


def best_first(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sorts by reward, the highest first; those that are equal up to rounding in the order of their ids. Those without a
    reward are left out."""
    known = [candidate for candidate in candidates if candidate.reward is not None]
    rewards = without_rounding([_reward(candidate) for candidate in known])
    ranked = sorted(zip(rewards, known, strict=True), key=lambda pair: (-pair[0], pair[1].rollout_id))
    return [candidate for _, candidate in ranked]


def best(group: Sequence[Candidate], count: int | None) -> list[Candidate]:
    """The `count` best rollouts of one task (None: all), of those in which the model wrote the same the first.

    Rewards and completions (1, a), (1, a), (.5, b): (1, a) and (.5, b).
    """
    kept: dict[str, Candidate] = {}
    for one in best_first(group):
        kept.setdefault(one.answer, one)
    return list(kept.values())[:count]


def _at_least(candidate: Candidate, threshold: float) -> bool:
    reward = candidate.reward
    return reward is not None and (reward >= threshold or alike(reward, threshold))


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
        if _reward(better) > _reward(worse) + margin
        and not alike(_reward(better), _reward(worse) + margin)
        and better.answer != worse.answer
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

    The formulas of engines/losses.py: for dpo chosen[i] and rejected[i] are a pair; for kto they are the wanted and the
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
