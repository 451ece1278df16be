"""Credit of the outcome reward to a rollout's calls: uniform, discounted with the distance from the end, or to the last.

Sutton & Barto 2018, "Reinforcement Learning", equation 3.8: G_t = γ^(T-1-t) R for a reward that comes with the last of T
calls, with γ = 1 (uniform), γ < 1 (discounted) and γ = 0 (last).
"""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.algorithms.credit.rule import Credit, credit_rule
from agentlightning.algorithms.settings import UnitInterval
from agentlightning.training_types import Trajectory


@credit_rule("uniform", reads_steps=False)
def uniform(trajectory: Trajectory, group: Sequence[Trajectory]) -> list[float]:
    """R for each transition: a rollout of three calls with reward 0.5 gives [0.5, 0.5, 0.5].

    Luo et al. 2025, "Agent Lightning: Train ANY AI Agents with Reinforcement Learning" (arXiv 2508.03680): the credit
    assignment module of LightningRL in its simplest form, "identical" credit for each call of a trajectory.
    """
    return [trajectory.reward] * len(trajectory.transitions)


@credit_rule("discounted", reads_steps=False)
def discounted(trajectory: Trajectory, group: Sequence[Trajectory], *, gamma: UnitInterval = 0.95) -> Credit:
    """γ^(T-1-t) R: three calls with reward 1 and γ = 0.5 give [0.25, 0.5, 1].

    The baseline is discounted alike, so that an early call of an average rollout has advantage 0 and not less.
    """
    calls = len(trajectory.transitions)
    shares = [gamma ** (calls - 1 - place) for place in range(calls)]
    return Credit(values=[share * trajectory.reward for share in shares], shares=shares)


@credit_rule("last", reads_steps=False)
def last(trajectory: Trajectory, group: Sequence[Trajectory]) -> Credit:
    """R for the last transition: a rollout of three calls with reward 0.5 gives [0, 0, 0.5].

    For agents whose earlier calls are beyond the reward. Those are not compared with anything: their advantage is 0, not
    the negative of a baseline.
    """
    earlier = [0.0] * (len(trajectory.transitions) - 1)
    return Credit(values=[*earlier, trajectory.reward], shares=[*earlier, 1.0])
