"""Settings of prompt searches, the table ``[optimize]``: what is searched, the model that writes new texts, and the budget.

``agl optimize`` reads it; the search's own settings are those of ``[algorithm]``. Knows nothing of what they do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Self

from pydantic import Field, model_validator

from agentlightning.config.base import Table
from agentlightning.config.external import ExternalModelConfig, is_exact

POLICY = "policy"
"""The model that the agents use as the one that writes new texts."""
SCRIPTED = "scripted"
"""No model: edits of a grammar."""


class OptimizeConfig(Table):
    """A search for better prompts."""

    model: str
    """The model that writes new texts: the NAME of a table ``[external.NAME]``, ``policy`` for the model that agents use, or
    ``scripted``, which is for tests and demos: edits of `grammar`, and no model."""
    grammar: str | None = None
    """JSON file with the edits of ``scripted``."""
    templates: tuple[str, ...] = ()
    """Names in ``[prompts.templates]`` to search; none: all."""
    max_rollouts: int = Field(500, ge=1)
    """Rollouts of the search, those on validation tasks among them."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens, of prompts and completions, of agents and of the model that writes. None: no bound."""

    @model_validator(mode="after")
    def _nothing_ignored(self) -> Self:
        if (self.model == SCRIPTED) != (self.grammar is not None):
            wanted = "is required with" if self.grammar is None else "has no effect without"
            raise ValueError(f'grammar: {wanted} model = "{SCRIPTED}"')
        return self


def check_optimize(
    optimize: OptimizeConfig, templates: Collection[str], external: Mapping[str, ExternalModelConfig]
) -> None:
    """ValueError where it names a template or a model that the configuration does not have."""
    for name in optimize.templates:
        if name not in templates:
            known = ", ".join(sorted(templates)) or "none"
            raise ValueError(
                f"optimize.templates: there is no template {name!r} in [prompts.templates]; known are {known}"
            )
    if not templates:
        raise ValueError("optimize: expected a template to search in [prompts.templates], got none")
    if taken := [name for name in (POLICY, SCRIPTED) if name in external]:
        raise ValueError(f"external.{taken[0]}: the name means something else to optimize.model; choose another")
    if optimize.model not in (POLICY, SCRIPTED):
        if optimize.model not in external:
            known = ", ".join([*sorted(external), POLICY, SCRIPTED])
            raise ValueError(f"optimize.model: expected one of {known}, got {optimize.model!r}")
        model_name(optimize.model, external[optimize.model])


def model_name(name: str, external: ExternalModelConfig) -> str:
    """The model name that requests to an external model have. ValueError where it has patterns alone, and for a protocol in
    which nothing is asked here."""
    exact = [each for each in external.models if is_exact(each)]
    if not exact:
        raise ValueError(f"external.{name}.models: expected one name without * and ?, since optimize.model asks for it")
    if external.protocol == "google":
        raise ValueError(f"external.{name}.protocol: expected openai or anthropic for optimize.model, got 'google'")
    return exact[0]
