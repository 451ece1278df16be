"""AIR metrics of a step: each rule's rewards, their agreement with the final reward, and their effect on advantages.

The record and the policies' learning drive it; the trainer asks `check_air` before anything starts. The numbers are the same
whether AIR's rewards are counted or not, so that on and off can be compared within a run. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from agentlightning.adapters.trajectories import JUDGE
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.rewards import without_air
from agentlightning.config import Config
from agentlightning.engines.base import Metrics
from agentlightning.errors import ConfigError
from agentlightning.runner.air import load_air
from agentlightning.tracing.air import PREFIX
from agentlightning.trainer.data.air_report import within_groups
from agentlightning.types import Call, Reward, Rollout, Trajectory

SMALL = 1e-9
"""An advantage below it has no sign."""


class AirTally:
    """Sums of the rules' rewards over a step's rollouts, part by part."""

    def __init__(self, rules: Iterable[str]) -> None:
        self._sums = dict.fromkeys(rules, 0.0)
        self._marked = dict.fromkeys(self._sums, 0)
        self._calls = 0
        self._totals: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, rollouts: Sequence[Rollout], calls: Sequence[Call], rewards: Sequence[Reward]) -> None:
        """Some rollouts with the calls of their latest attempts."""
        if not self._sums:
            return
        attempts = {rollout.id: rollout.attempt for rollout in rollouts}
        earned: defaultdict[str, float] = defaultdict(float)
        for reward in rewards:
            name = reward.name.removeprefix(PREFIX)
            if reward.source == "air" and name in self._sums and attempts.get(reward.rollout_id) == reward.attempt:
                self._sums[name] += reward.value
                self._marked[name] += 1
                earned[reward.rollout_id] += reward.value
        self._calls += sum(call.agent != JUDGE for call in calls)
        for rollout in rollouts:
            if rollout.reward is not None and math.isfinite(rollout.reward):
                self._totals[rollout.group_id].append((earned[rollout.id], rollout.reward))

    def metrics(self) -> Metrics:
        """Of each rule its mean reward per call and the share of calls that it rewarded; and agreement, the correlation
        between a rollout's sum and its final reward within groups, where both differ."""
        found = {f"air/{name}/reward_mean": total / max(1, self._calls) for name, total in self._sums.items()}
        found |= {f"air/{name}/share": count / max(1, self._calls) for name, count in self._marked.items()}
        agreement = within_groups(self._totals.values())
        return found if agreement is None else found | {"air/agreement": agreement}


def air_effect(algorithm: LightningRL, groups: Sequence[Sequence[Trajectory]]) -> Metrics:
    """Effect of AIR's rewards on the advantages of the policy's calls: air/turned, the share of calls whose
    advantage gets another sign, or gets one or loses it; air/moved, the mean change over their mean size. Empty where
    advantages take a critic or other evidence."""
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
