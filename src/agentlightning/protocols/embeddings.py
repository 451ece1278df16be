"""OpenAI Embeddings, which only external models give: what the record needs of a request and of its response. Pure.

Driven by the gateway. The policy that is trained has no embeddings, so a request that names no configured external model is
refused.
"""

from __future__ import annotations

from agentlightning.protocols import chat, fields
from agentlightning.protocols.base import ApiError, Completion, CompletionReader, CompletionRequest, EventStream
from agentlightning.records import JSON

NAME = "embeddings"


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    """The request in a body, for the record. Raises ApiError where it is for the trained policy."""
    if trained:
        raise _no_embeddings()
    asked = fields.read(fields.ExternalRequest, {**data, "tools": None, "stream": None})
    return CompletionRequest(model=asked.model or "", messages=[fields.user_message(data, "input")])


def body(request: CompletionRequest, completion: Completion) -> bytes:
    """Raises ApiError: the trained policy has no response in this protocol."""
    raise _no_embeddings()


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    """Raises ApiError: the trained policy has no response in this protocol."""
    raise _no_embeddings()


error = chat.error


class EmbeddingsReader(CompletionReader):
    """Counts the tokens of a response; the vectors themselves are not recorded."""

    def whole(self, body: JSON) -> None:
        self.read_usage(body)

    def event(self, data: JSON) -> None:
        """The protocol has none."""


reader = EmbeddingsReader


def _no_embeddings() -> ApiError:
    return fields.refused(
        "model", "the policy that is trained gives no embeddings; name a model of a configured external model"
    )
