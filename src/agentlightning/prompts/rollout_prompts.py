"""RolloutPrompts: the templates of one rollout, filled in from its task.

Driven by the workers, for the agents that ask for a prompt or find it in their environment, and by the gateway. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentlightning.errors import InputError
from agentlightning.prompts.templates import Message, Template

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
"""Names of templates: each is the end of a variable's name, too."""


@dataclass(frozen=True, slots=True)
class RolloutPrompts:
    """The versions that a rollout keeps, by name."""

    task: Mapping[str, Any] = field(default_factory=dict)
    templates: Mapping[str, Template] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)

    def render(self, name: str, /, **fields: object) -> str | list[Message]:
        """The text of a template, or its messages. Placeholders are the task's fields, unless `fields` has them.

        InputError where the run has no such template, and where a placeholder is neither's.
        """
        template = self.templates.get(name)
        if template is None:
            known = ", ".join(sorted(self.templates)) or "none"
            raise InputError(f"prompt {name!r}: expected the name of a prompt template of the run, which has {known}")
        try:
            return template.render(**{**self.task, **fields})
        except InputError as cause:
            raise InputError(f"prompt {name!r}, version {self.versions[name]}: {cause}") from None

    def text(self, name: str) -> str:
        """The same as one text; InputError where it is messages."""
        rendered = self.render(name)
        if not isinstance(rendered, str):
            raise InputError(f"prompt {name!r}: expected a template that is a text, got messages")
        return rendered

    def environment(self) -> dict[str, str]:
        """``AGL_PROMPT_NAME`` for each template; messages are JSON. InputError as above, and where two names meet in one
        variable, or a text has a NUL, which no variable holds."""
        found: dict[str, str] = {}
        for name in self.templates:
            rendered, variable = self.render(name), variable_name(name)
            text = rendered if isinstance(rendered, str) else json.dumps(rendered, ensure_ascii=False)
            if variable in found:
                raise InputError(
                    f"prompt {name!r}: expected a name of its own in the environment, and {variable} is another's"
                )
            if "\0" in text:
                raise InputError(f"prompt {name!r}: expected a text without NUL, which {variable} cannot hold")
            found[variable] = text
        return found


def variable_name(name: str) -> str:
    """The variable in which a program finds the prompt of this name.

    >>> variable_name("system"), variable_name("sub-agent")
    ('AGL_PROMPT_SYSTEM', 'AGL_PROMPT_SUB_AGENT')
    """
    return f"AGL_PROMPT_{name.upper().replace('-', '_')}"
