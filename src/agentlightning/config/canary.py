"""Settings of a canary: the table ``[canary]`` of what is served.

The canary's rule and the command line read them. Knows nothing of sessions.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentlightning.config.base import Table

Measure = Literal["reward", "error", "slow"]

SLOW_MARGIN = 0.05


class CanaryConfig(Table):
    """Rules by which a canary is promoted or rolled back.

    Each measure of a session is a number from 0 to 1, better where it is higher. A canary is rolled back as soon as it is
    shown to be worse than the stable version in one of them, and promoted once it is shown in all of them to be worse by no
    more than the margin.
    """

    reward_margin: float | None = Field(0.05, gt=0, lt=0.5)
    """Of the mean reward, as a share of `reward_range`. None: rewards decide nothing."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward; one beside them counts as the nearer of the two."""
    error_margin: float | None = Field(0.02, gt=0, lt=0.5)
    """Of the share of sessions without a failed call. None: failed calls decide nothing."""
    slow_s: float | None = Field(None, gt=0)
    """Seconds after which a call is slow; a session is slow where one of its calls is. None: time decides nothing."""
    slow_margin: float | None = Field(None, gt=0, lt=0.5)
    """Of the share of sessions that are not slow. None: 0.05, where there is `slow_s`."""
    alpha: float = Field(0.02, gt=0, lt=0.5)
    """Probability at most that a version which is worse in no measure is ever rolled back, and at most that one which is
    worse by more than a margin is ever promoted, though the rule looks after every session."""
    min_sessions: int = Field(50, ge=1)
    """Sessions of the canary, with each measure, before it may be promoted. It is rolled back without waiting for them."""
    max_sessions: int = Field(2000, ge=1)
    """Sessions of the canary, with one measure, after which it is undecided."""
    undecided: Literal["hold", "roll_back"] = "hold"
    """The consequence: it keeps its share of the sessions and is measured on, or is rolled back."""

    @model_validator(mode="after")
    def _check(self) -> CanaryConfig:
        if self.reward_range[0] >= self.reward_range[1]:
            raise ValueError("reward_range: expected the lowest reward, then a higher one")
        if self.slow_s is None and self.slow_margin is not None:
            raise ValueError("slow_margin: has no effect without slow_s")
        if not self.margins:
            raise ValueError("expected at least one of reward_margin, error_margin and slow_s")
        if self.min_sessions > self.max_sessions:
            raise ValueError("min_sessions: expected no more than max_sessions")
        return self

    @property
    def margins(self) -> dict[Measure, float]:
        """By measure, how much worse a canary may be and still be promoted."""
        slow = None if self.slow_s is None else self.slow_margin or SLOW_MARGIN
        found: dict[Measure, float | None] = {"reward": self.reward_margin, "error": self.error_margin, "slow": slow}
        return {name: margin for name, margin in found.items() if margin is not None}
