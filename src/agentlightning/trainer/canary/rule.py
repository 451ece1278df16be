"""The rule of a canary: pure counts and sequential tests, from which the verdict follows.

Driven by controller.py, by simulations and by nothing else. Knows no store and no clock: the same results in the same order
give the same verdict, so that a controller that was killed counts them again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agentlightning.algorithms.sequential_tests import MeanDifferenceTest
from agentlightning.config.canary import CanaryConfig, Measure
from agentlightning.records import JSON

Verdict = Literal["promote", "roll_back", "undecided"]


@dataclass(slots=True)
class _Arm:
    """Results of one version in one measure."""

    count: int = 0
    total: float = 0.0

    def figures(self) -> JSON:
        return {"sessions": self.count, "mean": self.total / self.count if self.count else None}


@dataclass(slots=True)
class _Measured:
    """One measure of both versions, and what it shows."""

    margin: float
    worse: MeanDifferenceTest
    """Evidence that the stable version is better."""
    not_worse: MeanDifferenceTest
    """Evidence that the canary is worse by less than the margin."""
    arms: tuple[_Arm, _Arm] = field(default_factory=lambda: (_Arm(), _Arm()))
    """Of the stable version, and of the canary."""


class CanaryRule:
    """The measures of a canary's sessions beside those of the stable version, and the verdict so far.

    A measure's result is a number from 0 to 1, better where it is higher. Rolled back at a wealth of k / alpha in one of k
    measures, promoted at 1 / alpha in all of them.
    """

    def __init__(self, config: CanaryConfig) -> None:
        self._config = config
        self._measured = {
            name: _Measured(margin=margin, worse=MeanDifferenceTest(), not_worse=MeanDifferenceTest(-margin))
            for name, margin in config.margins.items()
        }

    def record(self, measure: Measure, result: float, *, canary: bool) -> None:
        """Count a session's result in a measure; one that no rule is about says nothing."""
        measured = self._measured.get(measure)
        if measured is None:
            return
        arm = measured.arms[canary]
        arm.count += 1
        arm.total += result
        if canary:
            measured.worse.record(b=result)
            measured.not_worse.record(a=result)
        else:
            measured.worse.record(a=result)
            measured.not_worse.record(b=result)

    def scaled_reward(self, reward: float) -> float:
        """A reward as a result from 0 to 1."""
        low, high = self._config.reward_range
        return min(1.0, max(0.0, (reward - low) / (high - low)))

    @property
    def verdict(self) -> Verdict | None:
        """None: not decided yet. `undecided`: there will be no more sessions than these to decide by."""
        found, config = self._measured.values(), self._config
        if any(one.worse.wealth >= len(found) / config.alpha for one in found):
            return "roll_back"
        if all(one.not_worse.wealth >= 1 / config.alpha and one.arms[1].count >= config.min_sessions for one in found):
            return "promote"
        if any(one.arms[1].count >= config.max_sessions for one in found):
            return "undecided"
        return None

    def figures(self) -> JSON:
        """The numbers on which the verdict rests, by measure."""
        bound = 1 / self._config.alpha
        return {
            name: {
                "stable": one.arms[0].figures(),
                "canary": one.arms[1].figures(),
                "margin": one.margin,
                "worse": {"wealth": one.worse.wealth, "bound": len(self._measured) * bound},
                "not_worse": {"wealth": one.not_worse.wealth, "bound": bound},
            }
            for name, one in self._measured.items()
        }
