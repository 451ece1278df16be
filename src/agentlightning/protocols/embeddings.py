"""OpenAI Embeddings, which only external models give: what the record needs of a request and of its answer. Pure.

Driven by the gateway. The policy that is trained has no embeddings, so a request that names no configured external model is
refused.
"""

from __future__ import annotations

from agentlightning.protocols import chat, fields
from agentlightning.protocols.base import ApiError, Completion, CompletionReader, CompletionRequest, EventStream
from agentlightning.types import JSON

NAME = "embeddings"


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    """The request in a body, for the record. Raises ApiError where it is for the trained policy."""
    model = fields.text(data, "model")
    if trained:
        raise _no_embeddings()
    return CompletionRequest(model=model, messages=[fields.user_message(data, "input")])


def body(request: CompletionRequest, answer: Completion) -> bytes:
    """Raises ApiError: the trained policy has no answer in this protocol."""
    raise _no_embeddings()


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    """Raises ApiError: the trained policy has no answer in this protocol."""
    raise _no_embeddings()


def error(refusal: ApiError) -> bytes:
    """An error in the protocol's own shape."""
    return chat.error(refusal)


def reader() -> EmbeddingsReader:
    """A reader for one response of an external model with this protocol."""
    return EmbeddingsReader()


class EmbeddingsReader(CompletionReader):
    """Counts the tokens of an answer; the vectors themselves are not recorded."""

    def whole(self, body: JSON) -> None:
        """Take in a complete response."""
        self.prompt_tokens, self.sampled_tokens = chat.read_usage(body, self.prompt_tokens, self.sampled_tokens)

    def event(self, data: JSON) -> None:
        """Take in the data of one event; the protocol has none."""
        self.whole(data)


def _no_embeddings() -> ApiError:
    return ApiError(
        "model: the policy that is trained gives no embeddings; name a model of a configured external model",
        param="model",
        code="unsupported_value",
    )
