"""Discounted credit: the further a call lies before the end, the less of the outcome it gets.

Sutton & Barto 2018, "Reinforcement Learning", equation 3.8: G_t = γ^(T-1-t) R for a reward that comes with the last
of T calls. The baseline is discounted alike, so that an early call of an average rollout has advantage 0 and not
less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from agentlightning.algorithms.credit.rule import Credit, credit_rule
from agentlightning.types import Trajectory


@credit_rule("discounted", reads_steps=False)
def discounted(
    trajectory: Trajectory, group: Sequence[Trajectory], *, gamma: Annotated[float, Field(ge=0, le=1)] = 0.95
) -> Credit:
    """γ^(T-1-t) R: three calls with reward 1 and γ = 0.5 give [0.25, 0.5, 1]."""
    calls = len(trajectory.transitions)
    shares = [gamma ** (calls - 1 - place) for place in range(calls)]
    return Credit(values=[share * trajectory.reward for share in shares], shares=shares)
