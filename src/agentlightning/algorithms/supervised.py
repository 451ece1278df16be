"""Imitation of recorded rollouts: all of them, the best ones, or those of a stronger model.

The offline trainer drives these; see `offline.py`. The loss is the cross-entropy of what the model wrote, nothing else: what
the environment, the user and other models wrote is context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from pydantic import PositiveInt

from agentlightning.adapters.sequences import Aggregation
from agentlightning.algorithms.offline import Candidate, Example, OfflineAlgorithm, best_first, by_task
from agentlightning.algorithms.settings import Names
from agentlightning.errors import ConfigError
from agentlightning.training_types import Loss


@dataclass(frozen=True, kw_only=True)
class SupervisedAlgorithm(OfflineAlgorithm):
    """Base of SFT, RFT and Distill."""

    aggregation: Aggregation = "token_mean"
    """Loss aggregation mode; see `adapters.sequences.token_weights`."""
    threshold: float | None = None
    """Rollouts with a lower reward, or with none, are left out; None: none is."""

    @property
    def loss(self) -> Loss:
        return Loss(name="sft")

    def examples(self, candidates: Sequence[Candidate]) -> list[Example]:
        good = [one for one in candidates if self.threshold is None or at_least(one, self.threshold)]
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
    distinct: bool = True
    """Keep one of several rollouts of one task in which the model wrote the same."""

    def chosen(self, good: Sequence[Candidate]) -> list[Candidate]:
        return [one for group in by_task(good) for one in best(group, self.per_task, self.distinct)]


@dataclass(frozen=True, kw_only=True)
class Distill(SupervisedAlgorithm):
    """Distillation: imitate what a stronger model answered, rendered as this model's template writes it.

    Kim and Rush (2016), Sequence-Level Knowledge Distillation, equation 6 (the teacher's samples in place of its
    distribution): its text is enough, so that any model behind any API can be the teacher.
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


def best(group: Sequence[Candidate], most: int | None, distinct: bool) -> list[Candidate]:
    """The best rollouts of one task, `most` of them, with `distinct` only the first of those that say the same.

    Rewards and completions (1, a), (1, a), (.5, b): with distinct (1, a) and (.5, b).
    """
    seen: set[str] = set()
    kept = []
    for one in best_first(group):
        if not (distinct and one.answer in seen):
            kept.append(one)
        seen.add(one.answer)
    return kept[:most]


def at_least(candidate: Candidate, threshold: float) -> bool:
    """True where its reward is known and reaches the threshold."""
    return candidate.reward is not None and candidate.reward >= threshold
