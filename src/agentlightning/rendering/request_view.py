"""RequestView: the messages and tools of one request as the call graph compares them, normalised and hashed once.

Made by the gateway for each request and read by conversation.py. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentlightning.prefill import prefill_of
from agentlightning.records import JSON
from agentlightning.rendering.graph import Digest, chain, digest, hash_before, letters, link, normal, root, verbatim

EXTERNAL = b"external"
"""Keeps the hashes of calls to external models apart: the same question to a judge is another call."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """The messages and tools of one request, normalised and hashed once."""

    messages: list[JSON]
    """As the agent sent them."""
    tools: list[JSON] | None
    normal: list[JSON]
    roles: str
    digests: list[Digest]
    hashes: list[Digest]
    """Running hashes over the tools, the template's variables and the messages: entry i covers the first i messages."""
    cleared: bool = False
    """The gateway cleared a part of the messages, as the request told it to."""
    expansions: Mapping[str, list[int]] = field(default_factory=dict)
    """The ids that stand for each image, by its hash."""
    template_kwargs: JSON = field(default_factory=dict)
    """Further variables of the chat template, all of which it reads (`chat_template_kwargs`)."""

    @classmethod
    def of(
        cls,
        messages: list[JSON],
        tools: list[JSON] | None,
        cleared: bool = False,
        expansions: Mapping[str, list[int]] | None = None,
        template_kwargs: JSON | None = None,
    ) -> RequestView:
        """For a policy: only what its chat template reads counts."""
        view = [normal(message) for message in messages]
        digests = [digest(message) for message in view]
        hashes = chain(root(tools, template_kwargs), digests)
        if prefill_of(view) is not None:
            hashes[-1] = hash_before(hashes[-2], view[-1])
        return cls(
            messages, tools, view, letters(view), digests, hashes, cleared, expansions or {}, template_kwargs or {}
        )

    def with_messages(self, messages: list[JSON], cleared: bool = False) -> RequestView:
        """The view of the same request with other messages."""
        return RequestView.of(messages, self.tools, cleared, self.expansions, self.template_kwargs)

    @classmethod
    def of_external(cls, messages: list[JSON], tools: list[JSON] | None) -> RequestView:
        """For an external model: whatever `normal` does not understand counts as it stands."""
        digests = [verbatim(message) for message in messages]
        return cls(messages, tools, messages, letters(messages), digests, chain(external_root(tools), digests))

    @property
    def request_hash(self) -> Digest:
        """The hash of the whole request."""
        return self.hashes[-1]

    @property
    def prefill(self) -> JSON | None:
        """The last message, where the completion continues it."""
        return prefill_of(self.normal)

    @property
    def history(self) -> int:
        """Number of messages before the completion, without its prefill."""
        return len(self.roles) - (self.prefill is not None)


def external_root(tools: list[JSON] | None) -> Digest:
    return link(EXTERNAL, root(tools))
