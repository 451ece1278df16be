"""OpenAI Embeddings, which only outside models give: what the record needs of a request and of its answer. Pure.

Driven by the gateway. The policy that is trained has no embeddings, so a request that names no configured upstream is
refused.
"""

from __future__ import annotations

from agentlightning.protocols import chat, fields
from agentlightning.protocols.neutral import Answer, EventStream, Refusal, Request
from agentlightning.types import JSON

NAME = "embeddings"


def parse(data: JSON, trained: bool = True) -> Request:
    """The request in a body, for the record. Raises Refusal where it is for the trained policy."""
    model = fields.text(data, "model")
    if trained:
        raise _no_embeddings()
    return Request(model=model, messages=[fields.user_message(data, "input")])


def body(request: Request, answer: Answer) -> bytes:
    """Raises Refusal: the trained policy has no answer in this protocol."""
    raise _no_embeddings()


def stream(request: Request, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    """Raises Refusal: the trained policy has no answer in this protocol."""
    raise _no_embeddings()


def error(refusal: Refusal) -> bytes:
    """An error in the protocol's own shape."""
    return chat.error(refusal)


def reader() -> Reader:
    """For one answer of an outside model that speaks this protocol."""
    return Reader()


class Reader:
    """Counts the tokens of an answer; the vectors themselves are not recorded."""

    def __init__(self) -> None:
        self.message: JSON = {"role": "assistant", "content": None}
        self.finish_reason = "stop"
        self.prompt_tokens = 0
        self.sampled_tokens = 0

    def whole(self, body: JSON) -> None:
        """Take in a complete response."""
        self.prompt_tokens, self.sampled_tokens = chat.read_usage(body, self.prompt_tokens, self.sampled_tokens)

    def event(self, data: JSON) -> None:
        """Take in the data of one event; the protocol has none."""
        self.whole(data)


def _no_embeddings() -> Refusal:
    return Refusal(
        "model: the policy that is trained gives no embeddings; name a model of a configured upstream",
        param="model",
        code="unsupported_value",
    )
