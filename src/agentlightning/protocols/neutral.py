"""What every wire format is translated to and from: one request, one answer, one refusal.

The gateway speaks only these; a file per protocol (chat.py, …) knows how they look on the wire. Pure data: knows nothing of
tokens, templates, HTTP or rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentlightning.types import JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One model call as the agent asked for it. Messages are as received; only their shape has been checked."""

    model: str
    messages: list[JSON]
    tools: list[JSON] | None = None
    parse_tools: bool = False
    """True where the answer may contain tool calls: tools were given and the agent did not choose `none`."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """Streaming: a chunk with the token counts before the end."""
    logprobs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call of an answer; `arguments` is a JSON text, as agents expect it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One sampled token as text, with its natural log-probability."""

    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said, parsed."""

    call_id: str
    model: str
    created_s: int
    content: str | None
    finish_reason: str
    """stop, length or tool_calls."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a stream adds: text for the content, or for the reasoning."""

    content: str = ""
    reasoning: str = ""


class Refusal(Exception):
    """A request that is not served, in terms that each protocol can put into its own error shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
