"""Settings of AIR, the table ``[air]``: rules by name with weights and bounds. What they mean is `tracing/`'s affair."""

from __future__ import annotations

import re
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from agentlightning.config_base import Table


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
    run: str | None = None
    """A custom rule: ``file.py:name``, called with (step, earlier)."""


class AirConfig(Table):
    """Automatic intermediate rewards: step rewards from what the system sees by itself."""

    counted: bool = True
    """False: the rewards are recorded and measured, and nothing learns from them."""
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
        for setting in ("counted", "user_replies", "error_pattern"):
            if not self.rules and getattr(self, setting) != AirConfig.model_fields[setting].default:
                raise ValueError(f"{setting}: has no effect without rules")
        return self
