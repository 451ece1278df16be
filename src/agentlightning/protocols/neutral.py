"""What every wire format is translated to and from: one request, one answer, one refusal.

The gateway speaks only these; a module per protocol (`WireFormat`: chat, completions, responses, messages, embeddings) knows
how they look on the wire. Messages and tools have one form everywhere, that of Chat Completions, because chat templates and
the record are written in it. Pure data: knows nothing of tokens, templates, HTTP or rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from typing import Protocol as Interface

import orjson

from agentlightning.types import JSON

DEEPEST = 64
"""Levels of nesting that a request may have: what reads it is recursive."""

ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One model call as the agent asked for it."""

    model: str
    messages: list[JSON]
    """In the form of Chat Completions, whatever the protocol; empty where `prompt` is given."""
    prompt: str | list[int] | None = None
    """Completions only: raw text or token ids in place of messages."""
    tools: list[JSON] | None = None
    """In the form of Chat Completions."""
    parse_tools: bool = False
    """True where the answer may contain tool calls: tools were given and the agent did not choose `none`."""
    one_tool_call: bool = False
    """The answer may hold one tool call at most (parallel_tool_calls: false, disable_parallel_tool_use)."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    """How many alternatives to list with each token; 0 to 20."""
    stream: bool = False
    include_usage: bool = False
    """Streaming: a chunk with the token counts before the end."""
    forced: JSON = field(default_factory=dict)
    """`temperature` and `top_p` as the agent gave them: the rollout's own sampling overrides them, and the call says so."""
    unsupported: JSON = field(default_factory=dict)
    """Fields (as the agent named them) that would change what the policy samples and that no trainer could account for:
    top_k, penalties, logit_bias, response_format, a forced tool call, … with their values. The run's sampling policy
    refuses them or leaves them out, and the call says which."""
    previous_id: str | None = None
    """Responses only: the answer that this request continues (previous_response_id)."""
    echo: JSON = field(default_factory=dict)
    """What the protocol's own answer repeats of the request; means nothing to anybody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call of an answer; `arguments` is the text that was sampled, which should be JSON and need not be."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One sampled token as text, with its natural log-probability and the likeliest alternatives, if asked for."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the n samples of an answer."""

    content: str | None
    """None where there are tool calls and no text."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    """stop, length or tool_calls."""
    stop: str | None = None
    """The stop string that ended it."""
    sampled_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model said, parsed."""

    call_id: str
    """Of the recorded call; choice i > 0 is recorded as ``{call_id}.{i}``."""
    model: str
    created_s: int
    prompt_tokens: int
    choices: tuple[Choice, ...]
    cached_tokens: int = 0
    """How many of the prompt's tokens continue an earlier call."""

    @property
    def sampled_tokens(self) -> int:
        """Of all choices."""
        return sum(choice.sampled_tokens for choice in self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDelta:
    """More of the tool call at `index`; `id` and `name` come with its first piece and only then."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a stream adds to one choice: reasoning, then content, then tool calls; each may be empty."""

    content: str = ""
    reasoning: str = ""
    tools: tuple[ToolDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of the tokens since the last delta; None where they were not asked for."""


class EventStream(Interface):
    """The events of one streamed answer: `first`, any number of `delta`, then `last` or `failed`.

    The deltas of a choice, put together, are the choice that `last` is given.
    """

    def first(self) -> bytes:
        """Opens the answer."""
        ...

    def delta(self, index: int, delta: Delta) -> bytes:
        """More of choice `index`."""
        ...

    def last(self, answer: Answer) -> bytes:
        """All that may only be sent once the call is durable: finish reasons, usage, end marks."""
        ...

    def failed(self, refusal: Refusal) -> bytes:
        """Ends a stream that cannot go on; SDKs raise the error that it carries."""
        ...


class AnswerReader(Interface):
    """Reads what an outside model answered, whole or event by event, for the record. Never raises: what it does not know
    it passes over."""

    message: JSON
    """The assistant message so far, in the form of Chat Completions (of choice 0)."""
    finish_reason: str
    prompt_tokens: int
    sampled_tokens: int

    def whole(self, body: JSON) -> None:
        """Take in a complete response."""
        ...

    def event(self, data: JSON) -> None:
        """Take in the data of one event of a stream."""
        ...


class WireFormat(Interface):
    """What a protocol's module offers (a module is one)."""

    @property
    def NAME(self) -> str: ...

    def parse(self, data: JSON, trained: bool = True) -> Request:
        """The request in a body. Raises Refusal, naming the field and what was expected.

        With `trained` False the call goes to an outside model as it is: content that only that model understands (images,
        tools of its own, unknown items) is kept in `messages` as received, and nothing is collected as unsupported.
        """
        ...

    def body(self, request: Request, answer: Answer) -> bytes:
        """The whole response of a call that is not streamed."""
        ...

    def stream(self, request: Request, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
        """The events of a streamed response."""
        ...

    def error(self, refusal: Refusal) -> bytes:
        """An error in the protocol's own shape."""
        ...

    def reader(self) -> AnswerReader:
        """For one answer of an outside model that speaks this protocol."""
        ...


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


def read_object(body: bytes) -> JSON:
    """The JSON object in `body`, nested at most `DEEPEST` levels. Raises Refusal."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as cause:
        raise Refusal(f"the body is not valid JSON: {cause}") from None
    if not isinstance(data, dict):
        raise Refusal(f"the body: expected a JSON object, got {type(data).__name__}")
    if body.count(b"{") + body.count(b"[") > DEEPEST and _deeper(data, DEEPEST):
        raise Refusal(f"the body: expected at most {DEEPEST} levels of nesting")
    return data


def assistant_message(choice: Choice) -> JSON:
    """A choice as the message that is recorded and that later requests repeat."""
    result: JSON = {"role": "assistant", "content": choice.content}
    if choice.reasoning is not None:
        result["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        result["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return result


def call_id(answer_id: str) -> str:
    """The recorded call behind an id that an agent saw, whatever the protocol.

    >>> call_id("chatcmpl-0197"), call_id("msg_0197"), call_id("0197.1")
    ('0197', '0197', '0197.1')
    """
    for prefix in ID_PREFIXES:
        if answer_id.startswith(prefix):
            return answer_id[len(prefix) :]
    return answer_id


def short(value: Any) -> str:
    """A value as JSON, cut where it is long, for a sentence about it."""
    try:
        text = orjson.dumps(value).decode()
    except TypeError:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _deeper(value: Any, levels: int) -> bool:
    """Whether a value is nested more than `levels` deep."""
    if not isinstance(value, dict | list):
        return False
    if levels == 0:
        return True
    parts = value.values() if isinstance(value, dict) else value
    return any(_deeper(part, levels - 1) for part in parts)
