"""Settings of external models, which are not trained: the tables ``[external.NAME]``; and the variables that hold keys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from agentlightning.config.base import Table, checked_base_url

EXTERNAL = "external:"
"""Beginning of a model.path that names an external model."""
TRACKER_KEYS: Mapping[str, tuple[str, ...]] = {
    "wandb": ("WANDB_API_KEY",),
    "mlflow": ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
}
"""Variables with the keys of trackers."""


class ExternalModelConfig(Table):
    """A model that is not trained: where calls for it go. The gateway reads the same table from a run's resources."""

    url: str
    """Everything before the route: ``https://api.openai.com/v1``, ``https://api.anthropic.com/v1``."""
    protocol: Literal["openai", "anthropic", "google"] = "openai"
    models: tuple[str, ...] = Field(min_length=1)
    """Names that agents ask for; ``*`` stands for any text, ``?`` for one character."""
    key_env: str | None = None
    """Name of the environment variable of the server that holds the key; None: no key is sent."""
    rename: str | None = Field(None, min_length=1)
    """Model name to send; None: the one that was asked for."""
    timeout_s: float = Field(600.0, gt=0)
    max_retries: int = Field(2, ge=0, le=10)

    @model_validator(mode="after")
    def _sendable(self) -> Self:
        # What was given is repeated nowhere here: somebody may have pasted a key.
        if self.key_env is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env):
            raise ValueError(
                "key_env: expected the name of an environment variable, such as OPENAI_API_KEY, not the key"
            )
        if self.key_env is not None and self.key_env.startswith("AGL_"):
            raise ValueError("key_env: a variable of Agent Lightning's own (AGL_…) is not sent anywhere")
        try:
            checked_base_url(self.url)
        except ValueError:
            raise ValueError(
                "url: expected http(s)://HOST/PATH without user, query or fragment; a key goes by key_env"
            ) from None
        if self.protocol == "anthropic" and not self.url.rstrip("/").endswith("/v1"):
            raise ValueError("url: expected the URL of an Anthropic endpoint with its /v1, as in …anthropic.com/v1")
        if self.protocol == "google" and not self.url.rstrip("/").endswith(("/v1beta", "/v1")):
            raise ValueError(
                "url: expected the URL of a Google endpoint with its version, as in …googleapis.com/v1beta"
            )
        if not all(self.models) or any("[" in name for name in self.models):
            raise ValueError("models: expected model names, in which * and ? may stand for other text")
        return self


def check_external_models(models: Mapping[str, ExternalModelConfig], policies: Sequence[str]) -> None:
    """ValueError if a model name would mean two external models, or one of them and a policy."""
    for name, external in models.items():
        if name in policies:
            raise ValueError(f"external.{name}: is the name of the policy that is trained; choose another")
        for pattern in external.models:
            if hidden := [policy for policy in policies if fnmatchcase(policy, pattern)]:
                raise ValueError(
                    f"external.{name}.models: {pattern!r} would take the calls of the policy {hidden[0]!r}"
                )
    for (one, first), (other, second) in combinations(models.items(), 2):
        if both := set(first.models) & set(second.models):
            raise ValueError(f"external.{other}.models: {min(both)!r} is a name of external.{one}, too")


def external_name(path: str) -> str | None:
    """NAME of a model.path ``external:NAME``; None where it is another."""
    return path.removeprefix(EXTERNAL) if path.startswith(EXTERNAL) else None


def agent_model(name: str, models: Mapping[str, ExternalModelConfig]) -> str:
    """The model that agents ask for where model.path is ``external:NAME``: the first of its names that is no pattern.

    ValueError where there is none.
    """
    if name not in models:
        raise ValueError(
            f"model.path: there is no table [external.{name}]; expected one of {', '.join(sorted(models)) or 'them'}"
        )
    found = next(filter(is_exact, models[name].models), None)
    if found is None:
        raise ValueError(
            f"external.{name}.models: expected a name without * and ? among them, since agents get one as llm.model "
            "(model.path)"
        )
    return found


def is_exact(pattern: str) -> bool:
    """True where a model pattern is a name."""
    return "*" not in pattern and "?" not in pattern


def secret_variables(table: Mapping[str, Any]) -> set[str]:
    """Names of the environment's variables that hold secrets by a run's configuration: keys of models (`key_env`, wherever
    it stands), of its trackers and of `alerts.webhook_env`. Agents do not inherit them.

    >>> sorted(secret_variables({"external": {"judge": {"key_env": "A_KEY"}}, "trainer": {"trackers": ["wandb"]}}))
    ['A_KEY', 'WANDB_API_KEY']
    """
    found: set[str] = set()
    waiting: list[Any] = [table]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            found |= {each["key_env"]} if isinstance(each.get("key_env"), str) else set()
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
    alerts = table.get("alerts")
    if isinstance(alerts, Mapping) and isinstance(alerts.get("webhook_env"), str):
        found.add(alerts["webhook_env"])
    trainer = table.get("trainer")
    for name, keys in TRACKER_KEYS.items():
        if isinstance(trainer, Mapping) and name in trainer.get("trackers", ()):
            found.update(keys)
    return found
