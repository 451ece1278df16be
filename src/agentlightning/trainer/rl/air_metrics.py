"""AIR's effect on a step's advantages; and errors where it is configured wrongly.

The step planner drives it; the trainer asks `check_air` before anything starts. The numbers are the same
whether AIR's rewards are counted or not, so that on and off can be compared within a run. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.rewards import without_air
from agentlightning.config.run import Config
from agentlightning.engines.base import Metrics
from agentlightning.errors import ConfigError
from agentlightning.runner.air import load_air
from agentlightning.training_types import Trajectory

SMALL = 1e-9
"""An advantage below it has no sign."""


def air_effect(algorithm: LightningRL, groups: Sequence[Sequence[Trajectory]]) -> Metrics:
    """Effect of AIR's rewards on the advantages of the policy's calls: air/turned, the share of calls whose
    advantage gets another sign, or gets one or loses it; air/moved, the mean change over their mean size. Empty where
    advantages take a critic or other evidence, or are per token."""
    plain, counted = algorithm.call_advantages(without_air(groups)), algorithm.call_advantages(groups)
    if plain is None or counted is None:
        return {}
    pairs = [
        pair
        for rollout_id in counted.keys() & plain.keys()
        for pair in zip(plain[rollout_id], counted[rollout_id], strict=True)
    ]
    if not pairs:
        return {}
    size = math.fsum(max(abs(before), abs(after)) for before, after in pairs)
    return {
        "air/turned": statistics.fmean(_sign(before) != _sign(after) for before, after in pairs),
        "air/moved": math.fsum(abs(after - before) for before, after in pairs) / size if size else 0.0,
    }


def check_air(config: Config, algorithms: Mapping[str, LightningRL]) -> None:
    """ConfigError, or AgentError from a rule of the user's own, where AIR is configured wrongly or would be ignored."""
    load_air(config.air.model_dump())
    if config.air.rules and config.air.counted and not any(one.reads_steps for one in algorithms.values()):
        credit = next(iter(algorithms.values())).credit
        raise ConfigError(
            f"air: has no effect on learning, since credit = {credit!r} ignores step rewards; take algorithm.credit = "
            "'step_rewards' or 'gigpo', or set air.counted = false to record and measure alone"
        )


def _sign(number: float) -> int:
    return 0 if abs(number) < SMALL else 1 if number > 0 else -1
