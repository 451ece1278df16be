"""Settings of AIR, the table ``[air]``: rules by name with weights and bounds. What they mean is `tracing/`'s affair."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, field_validator

from agentlightning.config.base import Table


class AirRuleConfig(Table):
    """One rule of AIR."""

    weight: float
    """Reward of a call that scores 1; below 0 for what should not happen."""
    budget: float | None = Field(None, gt=0)
    """Latency, tokens or calls that cost nothing."""
    run: str | None = None
    """A custom rule: ``file.py:name``, called with (step, earlier)."""


class AirConfig(Table):
    """Automatic intermediate rewards: step rewards from what the system sees by itself."""

    text_tool_error: str | None = Field(None, min_length=1)
    """For agents that call tools in text: a user message that follows a completion is a tool's result, and one that this
    regular expression matches somewhere is the result of a tool that failed."""
    rules: dict[str, AirRuleConfig] = Field({})
    """By name; a number is a weight alone."""

    @field_validator("text_tool_error")
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

    @field_validator("rules")
    @classmethod
    def _names(cls, value: dict[str, AirRuleConfig]) -> dict[str, AirRuleConfig]:
        for name in value:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise ValueError(f"{name}: expected a name of small letters, digits and '_'")
        return value
