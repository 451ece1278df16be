"""Settings of what one agent may use: the tables ``[limits.attempt]``, ``[limits.run]`` and ``[limits.keys.NAME]``.

`run.py` and the gateway read them. Knows nothing of requests.
"""

from __future__ import annotations

from pydantic import Field

from agentlightning.config.base import Table

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
    max_tokens: int | None = Field(None, ge=1)
    """Tokens of all prompts and completions together; the call that reaches the bound is still answered."""

    @property
    def has_totals(self) -> bool:
        """True where something adds up over calls."""
        return self.max_tokens is not None or self.max_calls is not None


class LimitsConfig(Table):
    """Limits of each attempt, of serving keys, and of the run as a whole."""

    attempt: LimitConfig = LimitConfig()
    run: LimitConfig = LimitConfig()
    keys: dict[str, LimitConfig] = Field(default_factory=dict)
    """Of each serving key, by the name that it was made with."""

    @property
    def of_agents(self) -> LimitsConfig:
        """The same without what is of serving keys alone."""
        return self.model_copy(update={"keys": {}})


def check_limits(limits: LimitsConfig, served: bool = False) -> None:
    """ValueError for a key's limit where nobody is `served`."""
    if limits.keys and not served:
        raise ValueError("limits.keys: have no effect without users; see agl serve --policy")
