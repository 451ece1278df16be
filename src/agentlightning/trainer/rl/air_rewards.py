"""AIR rewards as a step learns from them: shaped, weighed by the schedule, or left out.

The step planner and whoever reads steps again ask it. The store keeps what the rules gave. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.rewards import shaped_air, without_air
from agentlightning.config.air import AirConfig
from agentlightning.training_types import Trajectory


def learned_rewards(
    air: AirConfig, algorithm: LightningRL, step: int, groups: Sequence[Sequence[Trajectory]]
) -> list[list[Trajectory]]:
    """The groups with the step rewards that `step` learns from; without AIR's where they are not counted."""
    return weighed_rewards(air, algorithm, step, groups) if air.counted else without_air(groups)


def weighed_rewards(
    air: AirConfig, algorithm: LightningRL, step: int, groups: Sequence[Sequence[Trajectory]]
) -> list[list[Trajectory]]:
    """The groups with AIR's rewards in the form and of the weight that they have in `step`, counted or not."""
    if not air.rules:
        return [[*group] for group in groups]
    return shaped_air(groups, air.is_potential, algorithm.call_gamma, air.weight(step))
