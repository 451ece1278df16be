"""Returns of a trajectory: what was still earned from each call on. Used by the rules that look at step rewards."""

from __future__ import annotations

from agentlightning.types import Trajectory


def returns_to_go(trajectory: Trajectory, gamma: float, final: float = 1.0) -> list[float]:
    """G_t = r_t + γ G_{t+1}, with `final` times the final reward earned by the last call.

    Step rewards [0.5, 0, 0], final reward 1, γ = 0.5: G = [0.75, 0.5, 1]; with final = 0 G = [0.5, 0, 0].
    """
    following, returns = 0.0, []
    for place, transition in enumerate(reversed(trajectory.transitions)):
        following = transition.reward + (final * trajectory.reward if place == 0 else gamma * following)
        returns.append(following)
    return returns[::-1]
