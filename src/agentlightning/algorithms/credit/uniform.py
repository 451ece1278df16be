"""Uniform credit: every transition of a rollout gets the rollout's reward.

Luo et al. 2025, "Agent Lightning: Train ANY AI Agents with Reinforcement Learning" (arXiv 2508.03680): the
credit assignment module of LightningRL in its simplest form, "identical" credit for each call of a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.algorithms.credit.rule import credit_rule
from agentlightning.types import Trajectory


@credit_rule("uniform", reads_steps=False)
def uniform(trajectory: Trajectory, group: Sequence[Trajectory]) -> list[float]:
    """R for each transition: a rollout of three calls with reward 0.5 gives [0.5, 0.5, 0.5]."""
    return [trajectory.reward] * len(trajectory.transitions)
