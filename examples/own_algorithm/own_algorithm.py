"""A plug-in of each kind, for docs/extend.md: credit, advantage, loss, aggregation, and a whole algorithm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from agentlightning.algorithms import LightningRL, UpdatePlan
from agentlightning.algorithms.credit import Credit, credit_rule
from agentlightning.records import Outcome
from agentlightning.training_types import Trajectory

if TYPE_CHECKING:
    import torch

    from agentlightning.engines.losses import Tokens

Share = Annotated[float, Field(ge=0, le=1)]


@credit_rule("first")
def first(trajectory: Trajectory, group: Sequence[Trajectory], *, others: Share = 0.5) -> list[float]:
    """The reward for the first call, a share of it for the others."""
    return [trajectory.reward] + [others * trajectory.reward] * (len(trajectory.transitions) - 1)


def median(
    groups: Sequence[Sequence[Trajectory]], credits: Sequence[Sequence[Credit]], *, scale: float = 1.0
) -> list[list[list[float]]]:
    """Each call's credit minus its share of the group's median reward, which one outlier does not move."""
    found = []
    for group, of_group in zip(groups, credits, strict=True):
        pairs = zip(group, of_group, strict=True)
        scores = [one.reward if credit.score is None else credit.score for one, credit in pairs]
        baseline = statistics.median(scores) if scores else 0.0
        rows = []
        for credit in of_group:
            shares = credit.shares or [1.0] * len(credit.values)
            compared = zip(credit.values, shares, strict=True)
            rows.append([scale * (value - share * baseline) for value, share in compared])
        found.append(rows)
    return found


def sapo(
    logprobs: torch.Tensor,
    tokens: Tokens,
    *,
    positive: Annotated[float, Field(gt=0)] = 1.0,
    negative: Annotated[float, Field(gt=0)] = 1.05,
) -> torch.Tensor:
    """-4/τ σ(τ(r - 1)) A: a ratio that is not cut but fades. Gao et al. 2025, "Soft Adaptive Policy Optimization"."""
    ratios = (logprobs - tokens.base_logprobs).exp()
    up = (positive * (ratios - 1.0)).sigmoid() * 4.0 / positive
    down = (negative * (ratios - 1.0)).sigmoid() * 4.0 / negative
    return -up.where(tokens.advantages > 0, down) * tokens.advantages


def root_length(trajectories: Sequence[Trajectory], *, power: Share = 0.5) -> list[list[float]]:
    """1 / (rollouts × tokens of the rollout to the power): between fixed_length (0) and rollout_mean (1)."""
    lengths = [sum(len(call.sampled_ids) for call in trajectory.transitions) for trajectory in trajectories]
    return [
        [1.0 / (len(trajectories) * max(1, length) ** power)] * len(trajectory.transitions)
        for trajectory, length in zip(trajectories, lengths, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class HardTasks(LightningRL):
    """LightningRL that leaves out groups whose mean reward is above a bound."""

    too_easy: Share = 0.9
    """Groups with a higher mean reward are not learned from."""

    def plan(self, groups: Sequence[Sequence[Trajectory]], seed: int, *inputs: Any, **named: Any) -> UpdatePlan:
        easy = [group for group in groups if self._is_easy(group)]
        plan = super().plan([group for group in groups if group not in easy], seed, *inputs, **named)
        left_out: dict[str, Outcome] = {one.rollout_id: "zero_variance" for group in easy for one in group}
        again = [group[0].group_id for group in easy] if self.dynamic_sampling else []
        return replace(plan, outcomes=left_out | plan.outcomes, resample=[*plan.resample, *again])

    def _is_easy(self, group: Sequence[Trajectory]) -> bool:
        known = [one.reward for one in group if math.isfinite(one.reward)]  # a missing reward is not a number
        return bool(known) and statistics.fmean(known) > self.too_easy
