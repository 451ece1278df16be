"""Settings of what one agent may use: the tables ``[limits.attempt]``, ``[limits.run]`` and ``[limits.keys.NAME]``.

`run.py` and the gateway read them. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from agentlightning.config.base import Table
from agentlightning.config.external import ExternalModelConfig

LIMITS_RESOURCE = "limits:run"
"""Name of the resource of a run that has them, apart from those that people choose."""


class LimitConfig(Table):
    """Bounds of one attempt, of a serving key, or of a whole run. None: none but the server's."""

    max_parallel_requests: int | None = Field(None, ge=1)
    """Requests under way at a time."""
    max_request_bytes: int | None = Field(None, ge=1)
    """Bytes of the requests that are under way at a time."""
    max_calls: int | None = Field(None, ge=1)
    """Model calls, of policies and external models."""
    max_calls_per_minute: int | None = Field(None, ge=1)
    """Model calls that begin within any 60 seconds."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens of all prompts and completions together; the call that reaches the bound is still answered."""
    max_tokens_per_day: int | None = Field(None, ge=1)
    """The same from 00:00 to 24:00 UTC."""
    max_budget: float | None = Field(None, gt=0)
    """US dollars by the prices of external models, and of the policy where it has some; the call that reaches the bound is
    still answered."""
    max_budget_per_day: float | None = Field(None, gt=0)
    """The same from 00:00 to 24:00 UTC."""

    @property
    def has_totals(self) -> bool:
        """True where something adds up over calls."""
        return self.counts_tokens or self.max_calls is not None or self.max_calls_per_minute is not None

    @property
    def counts_tokens(self) -> bool:
        """True where calls count by their tokens."""
        return self.max_tokens is not None or self.max_tokens_per_day is not None or self.counts_spend

    @property
    def counts_spend(self) -> bool:
        """True where calls count by their prices."""
        return self.max_budget is not None or self.max_budget_per_day is not None


class LimitsConfig(Table):
    """Limits of each attempt, of serving keys, and of the run as a whole."""

    attempt: LimitConfig = LimitConfig()
    run: LimitConfig = LimitConfig()
    keys: dict[str, LimitConfig] = Field(default_factory=dict)
    """Of each serving key, by the name that it was made with."""
    input_cost_per_token: float | None = Field(None, ge=0)
    """US dollars that one token of a policy's prompt costs against budgets."""
    output_cost_per_token: float | None = Field(None, ge=0)
    """The same for one token of a completion."""

    @property
    def tables(self) -> dict[str, LimitConfig]:
        """Every table by its name."""
        keys = {f"limits.keys.{name}": limit for name, limit in self.keys.items()}
        return {"limits.attempt": self.attempt, "limits.run": self.run, **keys}

    @property
    def of_agents(self) -> LimitsConfig:
        """The same without what is of serving keys alone."""
        spent = self.attempt.counts_spend or self.run.counts_spend
        prices = {} if spent else {"input_cost_per_token": None, "output_cost_per_token": None}
        return self.model_copy(update={"keys": {}, **prices})

    def cost(self, prompt_tokens: int, sampled_tokens: int) -> float:
        """US dollars for one call of a policy; 0 where it has no price."""
        return prompt_tokens * (self.input_cost_per_token or 0.0) + sampled_tokens * (self.output_cost_per_token or 0.0)


def check_limits(limits: LimitsConfig, models: Mapping[str, ExternalModelConfig], served: bool = False) -> None:
    """ValueError where a setting would have no effect: a budget without a price, a key's limit where nobody is `served`, a
    price without a budget."""
    if limits.keys and not served:
        raise ValueError("limits.keys: have no effect without users; see agl serve --policy")
    priced = limits.input_cost_per_token is not None or limits.output_cost_per_token is not None
    budgets = [f"{name}.max_budget" for name, limit in limits.tables.items() if limit.counts_spend]
    if priced and not budgets:
        raise ValueError("limits.input_cost_per_token, output_cost_per_token: have no effect without max_budget")
    for budget in budgets:
        if not models and not priced:
            what = "limits.input_cost_per_token" if served else "external models ([external.NAME])"
            raise ValueError(f"{budget}: has no effect without {what}")
        for external, settings in models.items():
            if settings.input_cost_per_token is None:
                raise ValueError(
                    f"external.{external}.input_cost_per_token: is required by {budget}; 0 where the model costs nothing"
                )
