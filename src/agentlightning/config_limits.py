"""Settings of what one agent may use: the tables ``[limits.attempt]`` and ``[limits.run]``.

`config.py` and the gateway read them. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from agentlightning.config_base import Table
from agentlightning.config_external import ExternalModelConfig

LIMITS_RESOURCE = "limits:run"
"""Name of the resource of a run that has them, apart from those that people choose."""


class LimitConfig(Table):
    """Bounds of one attempt, or of a whole run. None: none but the server's."""

    max_parallel_requests: int | None = Field(None, ge=1)
    """Requests under way at a time."""
    max_request_bytes: int | None = Field(None, ge=1)
    """Bytes of the requests that are under way at a time."""
    max_calls: int | None = Field(None, ge=1)
    """Model calls, of policies and external models."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens of all prompts and completions together; the call that reaches the bound is still answered."""
    max_budget: float | None = Field(None, gt=0)
    """US dollars spent on external models, by their prices; the call that reaches the bound is still answered."""

    @property
    def has_totals(self) -> bool:
        """True where something adds up over calls."""
        return any(one is not None for one in (self.max_calls, self.max_tokens, self.max_budget))

    @property
    def counts_tokens(self) -> bool:
        """True where calls count by their tokens."""
        return self.max_tokens is not None or self.max_budget is not None


class LimitsConfig(Table):
    """Limits of each attempt, and of the run as a whole."""

    attempt: LimitConfig = LimitConfig()
    run: LimitConfig = LimitConfig()


def check_limits(limits: LimitsConfig, models: Mapping[str, ExternalModelConfig]) -> None:
    """ValueError where a budget would have no effect: without external models, or with one that has no price."""
    for name, limit in (("attempt", limits.attempt), ("run", limits.run)):
        if limit.max_budget is None:
            continue
        if not models:
            raise ValueError(f"limits.{name}.max_budget: has no effect without external models ([external.NAME])")
        for external, settings in models.items():
            if settings.input_cost_per_token is None:
                raise ValueError(
                    f"external.{external}.input_cost_per_token: is required by limits.{name}.max_budget; 0 where the "
                    "model costs nothing"
                )
