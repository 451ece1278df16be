"""Settings of prompts, the table ``[prompts]``, and of searches for better ones, ``[optimize]``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from agentlightning.config.base import Table
from agentlightning.config.external import ExternalModelConfig, is_exact
from agentlightning.errors import ConfigError, InputError
from agentlightning.prompts.rollout_prompts import NAME
from agentlightning.prompts.templates import Template
from agentlightning.runtime.code_loader import is_code

CONFIG_SOURCE = "config"
"""Source of the versions that a configuration made."""


class PromptTemplateConfig(Table):
    """One template; a text alone is `text`."""

    text: str | None = None
    """The template, where it is one text."""
    messages: tuple[dict[str, str], ...] | None = None
    """The template, where it is messages: a role and a content each, in the form of fstring."""
    format: Literal["fstring", "jinja"] = "fstring"
    """Language of `text`: ``{field}``, or Jinja."""

    @property
    def template(self) -> Template:
        """The template, parsed. InputError."""
        if self.messages is not None:
            return Template.of(self.messages, source=CONFIG_SOURCE)
        return Template.of(self.text or "", self.format, CONFIG_SOURCE)

    @model_validator(mode="after")
    def _parses(self) -> Self:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give either text or messages")
        if self.messages is not None and self.format != "fstring":
            raise ValueError("format: has no effect on messages, whose contents are of the form fstring")
        try:
            self.template  # noqa: B018  # parsed to be checked
        except InputError as cause:
            raise ValueError(str(cause)) from cause
        return self


class PromptRuleConfig(Table):
    """Replacement of system prompts by a template, without a change to the agents."""

    template: str
    """Name of the template, which is a text. Its placeholders are fields of the task."""
    agents: tuple[str, ...] = ()
    """Names of the agents, as their calls give them (x-agl-agent, baggage, traced frameworks), with * and ? for other text;
    ``*`` is every agent, those without a name among them."""

    @field_validator("agents")
    @classmethod
    def _named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(value):
            raise ValueError('expected names of agents, or "*" for all, got an empty name')
        return value

    @model_validator(mode="after")
    def _names_agents(self) -> Self:
        if not self.agents:
            raise ValueError('agents: expected names of agents, or "*" for all, got none')
        return self

    def applies(self, agent: str | None) -> bool:
        """True where the rule is for calls of this agent."""
        return any(fnmatchcase(agent or "", pattern) for pattern in self.agents)


class PromptsConfig(Table):
    """Prompt templates of the run, and the agents that get them without a change."""

    templates: dict[str, PromptTemplateConfig] = Field({})
    """By name: agents ask for it, or find it in AGL_PROMPT_NAME. The run's first version; ``agl prompts`` makes others."""
    rules: tuple[PromptRuleConfig, ...] = ()
    """The first that names the agent of a call counts."""

    @field_validator("templates", mode="before")
    @classmethod
    def _texts(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: {"text": one} if isinstance(one, str) else one for name, one in value.items()}

    def check_fields(self, fields: Collection[str], in_environment: bool) -> None:
        """ConfigError where a template that is filled from the task alone has a placeholder that tasks have no field for:
        those of rules, and with `in_environment`, where agents are programs, all."""
        filled = list(self.templates) if in_environment else [rule.template for rule in self.rules]
        for name in filled:
            if missing := sorted(set(self.templates[name].template.placeholders) - set(fields)):
                raise ConfigError(
                    f"prompts.templates.{name}: unknown placeholder {missing[0]!r}; the tasks have the fields "
                    f"{', '.join(sorted(fields))}"
                )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for name in self.templates:
            if not NAME.fullmatch(name):
                raise ValueError(f"templates.{name}: expected a name of letters, digits, '_' and '-'")
        for place, rule in enumerate(self.rules):
            template = self.templates.get(rule.template)
            if template is None:
                known = ", ".join(sorted(self.templates)) or "none"
                raise ValueError(f"rules.{place}.template: there is no template {rule.template!r}; known are {known}")
            if template.messages is not None:
                raise ValueError(
                    f"rules.{place}.template: expected one that is a text, and {rule.template!r} is messages"
                )
        return self


POLICY = "policy"
"""The model that the agents use as the one that writes new texts."""


class OptimizeConfig(Table):
    """A search for better prompts."""

    model: str
    """The model that writes new texts: the NAME of a table ``[external.NAME]``, ``policy`` for the model that agents use, or
    ``file.py:name``, a coroutine function of (prompt, purpose, number) that answers the same whenever it is asked again."""
    templates: tuple[str, ...] = ()
    """Names in ``[prompts.templates]`` to search; none: all."""
    max_rollouts: int = Field(500, ge=1)
    """Rollouts of the search, those on validation tasks among them."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens, of prompts and completions, of agents and of the model that writes. None: no bound."""


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
    if POLICY in external:
        raise ValueError(f"external.{POLICY}: the name means something else to optimize.model; choose another")
    if optimize.model != POLICY and not is_code(optimize.model):
        if optimize.model not in external:
            known = ", ".join([*sorted(external), POLICY])
            raise ValueError(f"optimize.model: expected one of {known}, or file.py:name, got {optimize.model!r}")
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
