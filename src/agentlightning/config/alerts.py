"""Settings of the table ``[alerts]``: bounds of your own beside the health checks, and where a run's alarms are sent."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from agentlightning.config.base import Table


class AlertRuleConfig(Table):
    """A bound on a metric of training steps."""

    metric: str = Field(min_length=1)
    """Its name, as in docs/metrics.md."""
    above: float | None = None
    below: float | None = None
    steps: int = Field(1, ge=1)
    """Steps in a row that have to be beyond the bound."""

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.above is None) == (self.below is None):
            raise ValueError("expected either above or below")
        if self.metric.startswith("eval/"):
            raise ValueError("metric: expected one of training steps, not of evaluations")
        return self


class AlertsConfig(Table):
    """Rules of your own, and where alarms are sent beside the console, the run's output and its alerts.jsonl."""

    webhook_env: str | None = None
    """Variable of the trainer's environment with the URL of a webhook that takes Slack's format; None: none. The URL is a
    secret: it is neither stored nor shown."""
    command: tuple[str, ...] = ()
    """Program and arguments, started for each alarm, which it reads from its standard input:
    ``["mail", "-s", "agl", "me@example.org"]``."""
    rules: dict[str, AlertRuleConfig] = Field({})
    """By a name of your choice."""

    @field_validator("webhook_env")
    @classmethod
    def _a_name(cls, value: str | None) -> str | None:
        # What was given is not repeated: somebody may have pasted the URL.
        if value is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
            raise ValueError("expected the name of an environment variable, such as SLACK_WEBHOOK, not the URL")
        return value

    @field_validator("rules")
    @classmethod
    def _plain_names(cls, value: dict[str, AlertRuleConfig]) -> dict[str, AlertRuleConfig]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
                raise ValueError(f"expected names of letters, digits, _ and -, got {name[:80]!r}")
        return value
