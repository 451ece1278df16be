"""Settings of AIR, the table ``[air]``: rules by name with weights and bounds. What they mean is `tracing/`'s affair."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentlightning.config.base import Table


class AirRuleConfig(Table):
    """One rule of AIR."""

    weight: float
    """Reward of a call that scores 1; below 0 for what should not happen."""
    cap: float = Field(1.0, gt=0)
    """The rule's rewards of one rollout, summed, stay within ± this, whatever the number of calls."""
    agents: tuple[str, ...] | None = Field(None, min_length=1)
    """Only calls of these agents; None: of all."""
    budget: float | None = Field(None, gt=0)
    """Latency, tokens or calls that cost nothing."""
    form: Literal["potential", "reward"] | None = None
    """None: that of the table."""
    run: str | None = None
    """A custom rule: ``file.py:name``, called with (step, earlier)."""


class AirConfig(Table):
    """Automatic intermediate rewards: step rewards from what the system sees by itself."""

    counted: bool = True
    """False: the rewards are recorded and measured, and nothing learns from them."""
    form: Literal["potential", "reward"] = "potential"
    """Of the rewards that are learned from: differences of a potential, which leave the best policy what it is, or as the
    rules gave them, which are earned like any other reward."""
    decay_steps: int | None = Field(None, ge=1)
    """Training steps over which the rewards fall to 0, linearly; None: they do not."""
    user_replies: bool = False
    """A user message that follows an answer is the reply of a tool that the agent calls in text."""
    error_pattern: str | None = Field(None, min_length=1)
    """Regular expression: what the text of a failed tool's result matches somewhere. None: it begins as errors do."""
    rules: dict[str, AirRuleConfig] = Field({})
    """By name; a number is a weight alone."""

    @field_validator("error_pattern")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as cause:
            raise ValueError(f"expected a regular expression: {cause}") from cause
        return value

    @field_validator("rules", mode="before")
    @classmethod
    def _weights(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, one in value.items():
            if isinstance(one, bool) or not isinstance(one, int | float | dict | AirRuleConfig):
                raise ValueError(f"{name}: expected a weight, or a table with weight, got {one!r}")
        return {name: {"weight": one} if isinstance(one, int | float) else one for name, one in value.items()}

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        for name in self.rules:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(f"rules.{name}: expected a name of small letters, digits and '_'")
        for setting in ("counted", "form", "decay_steps", "user_replies", "error_pattern"):
            if not self.rules and getattr(self, setting) != AirConfig.model_fields[setting].default:
                raise ValueError(f"{setting}: has no effect without rules")
        return self

    def is_potential(self, rule: str) -> bool:
        """True where the rule's rewards are differences of a potential."""
        form = self.rules[rule].form if rule in self.rules else None
        return (form or self.form) == "potential"

    def weight(self, step: int) -> float:
        """Returns the factor of the rewards in this training step, the first of which is 1.

        >>> fading = AirConfig(rules={"retry": -0.1}, decay_steps=4)
        >>> fading.weight(1), fading.weight(3), fading.weight(9)
        (1.0, 0.5, 0.0)
        """
        return 1.0 if self.decay_steps is None else max(0.0, 1.0 - (step - 1) / self.decay_steps)
