"""Credit to the last call alone: for agents whose earlier calls are beyond the reward, and as a limit of `discounted`.

The outcome reward in its place in time (Sutton & Barto 2018, "Reinforcement Learning", equation 3.8 with γ = 0). The earlier
calls are not compared with anything: their advantage is 0, not the negative of a baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.algorithms.credit.rule import Credit, credit_rule
from agentlightning.types import Trajectory


@credit_rule("last", reads_steps=False)
def last(trajectory: Trajectory, group: Sequence[Trajectory]) -> Credit:
    """R for the last transition: a rollout of three calls with reward 0.5 gives [0, 0, 0.5]."""
    earlier = [0.0] * (len(trajectory.transitions) - 1)
    return Credit(values=[*earlier, trajectory.reward], shares=[*earlier, 1.0])
