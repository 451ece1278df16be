"""Settings of the table ``[alerts]``: where a run's alarms are sent."""

from __future__ import annotations

import re

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from agentlightning.config.base import Table


class AlertsConfig(Table):
    """Senders of alarms, in addition to the run's output and the console."""

    webhook_env: str | None = None
    """Environment variable of the trainer that holds the URL of a webhook in Slack's format. The URL is a secret: it is
    neither stored nor shown."""
    command: tuple[str, ...] = ()
    """Program and arguments, started once per alarm with the alarm on standard input:
    ``["mail", "-s", "agl", "me@example.org"]``."""

    @field_validator("webhook_env")
    @classmethod
    def _a_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
            # "secret": the sentence does not repeat the value, which may be the URL.
            told = "expected the name of an environment variable, such as SLACK_WEBHOOK, not the URL"
            raise PydanticCustomError("secret", told)
        return value
