"""Protocol-neutral types: the request, the completion and the error that every wire format is translated to and from.

The gateway speaks only these; a module per protocol (`WireFormat`: chat, completions, responses, messages, embeddings) knows
how they look on the wire. Messages and tools have one form everywhere, that of Chat Completions, because chat templates and
the record are written in it. Pure data: knows nothing of tokens, templates, HTTP or rollouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from typing import Protocol as Interface

import orjson

from agentlightning.errors import EngineError
from agentlightning.records import JSON
from agentlightning.runtime import json_text

MAX_NESTING = 64
"""Levels of nesting that a request may have: what reads it is recursive."""

MAX_PARTS = 50_000
"""Objects and lists that a request may have: each message, part of one, tool and schema is read on the event loop."""

MAX_MARKS = 2_000_000
"""Commas, braces and brackets of a request, those of its texts among them: before it is read, nobody knows which are."""

EVENTS = b"text/event-stream; charset=utf-8"

ID_PREFIXES = ("tok-", "chatcmpl-", "cmpl-", "resp_", "msg_")


@dataclass(frozen=True, slots=True)
class RequestImage:
    """An image of a request, whose message names it by hash."""

    hash: str
    """SHA-256 of the file's bytes, in hex."""
    data: bytes = field(repr=False)
    path: str
    """The field that held it, for a sentence about it."""
    detail: str | None = None
    """The size in which it is to be read, where the request says one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One model call as the agent asked for it."""

    model: str
    messages: list[JSON]
    """Messages in the form of Chat Completions, whatever the protocol; empty where `prompt` is given."""
    prompt: str | list[int] | None = None
    """Completions only: raw text or token ids in place of messages."""
    images: tuple[RequestImage, ...] = ()
    """Images of the messages, whose parts name them by hash."""
    tools: list[JSON] | None = None
    """Function tools in the form of Chat Completions."""
    parse_tools: bool = False
    """True where the completion may contain tool calls: tools were given and the agent did not choose `none`."""
    template_kwargs: JSON = field(default_factory=dict)
    """Variables for the model's chat template (`chat_template_kwargs`)."""
    one_tool_call: bool = False
    """The completion may hold one tool call at most (parallel_tool_calls: false, disable_parallel_tool_use)."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    """Token ids after which the completion ends."""
    include_stop: bool = False
    """The text has the stop string, or the token of `stop_ids`, that ended it (include_stop_str_in_output)."""
    n: int = 1
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    """Number of alternatives to list with each token; 0 to 20."""
    return_token_ids: bool | None = None
    """The response has the ids of prompt and completion, as vLLM gives them; None: not asked, False: asked not to."""
    repeats_prompt: bool = False
    """Completions only: the choices begin with the prompt (`echo`)."""
    echoed: str = ""
    """Chat Completions only: the text that each choice begins with (`echo`)."""
    tokens_as_ids: bool = False
    """Log-probabilities name tokens ``token_id:17`` in place of their texts (return_tokens_as_token_ids)."""
    prompt_logprobs: int | None = None
    """Number of alternatives to list with each token of the prompt; None: no log-probabilities of the prompt."""
    planned_ids: list[int] | None = None
    """The prompt's ids, filled in by the gateway once they are known, where the response is to have them."""
    cached_tokens: int = 0
    """Tokens of the prompt that continue an earlier call, filled in by the gateway where the response is streamed."""
    stream: bool = False
    stream_type: bytes = EVENTS
    """Content type of the stream."""
    include_usage: bool = False
    """Streaming: a chunk with the token counts before the end."""
    forced: JSON = field(default_factory=dict)
    """`temperature` and `top_p` as the agent gave them: the rollout's own sampling overrides them, and the call says so."""
    not_applied: JSON = field(default_factory=dict)
    """Fields (as the agent named them) that no trained policy has a setting for: effort, verbosity. They are recorded."""
    unsupported: JSON = field(default_factory=dict)
    """Fields (as the agent named them) that would change the sampled distribution, with their values: the run's
    `unsupported_params` refuses or drops them."""
    grammar: JSON = field(default_factory=dict)
    """The form of the completion, as protocols/fields.py reads it: `content`, `tool_call`, or both."""
    logits: JSON = field(default_factory=dict)
    """Changes of the logits: penalties, logit_bias, top_k, min_p, min_tokens, allowed_token_ids, where they are not neutral;
    and ignore_eos."""
    refused: dict[str, str] = field(default_factory=dict)
    """Fields (as the agent named them) without which the response would be another, and why they are never served."""
    include_reasoning: bool = True
    """False: the response leaves the reasoning out. It is recorded, and restored when the completion comes back."""
    continuous_usage: bool = False
    """Streaming: every chunk has the token counts so far."""
    truncates: bool = False
    """Responses only: the agent would have the oldest items cut where the prompt does not fit; it is refused then."""
    previous_id: str | None = None
    """The call that this request continues (Responses: previous_response_id)."""
    echo: JSON = field(default_factory=dict)
    """Fields of the request that the protocol's response repeats; no other module reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call of a completion; `arguments` is the text that was sampled, which should be JSON and need not be."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token as text, with its natural log-probability and the likeliest alternatives, if asked for."""

    text: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    id: int = -1
    data: bytes | None = None
    """Its bytes, which the text of a token cannot show that is a part of a character; None: those of the text."""

    @property
    def utf8(self) -> bytes:
        """The bytes of the token; those of all tokens, joined, are the bytes of the text."""
        return self.text.encode() if self.data is None else self.data

    def named(self) -> TokenLogprob:
        """The same with the tokens named by their ids.

        >>> TokenLogprob(text="a", logprob=-1.0, id=3).named().text
        'token_id:3'
        """
        top = tuple(other.named() for other in self.top)
        return replace(self, text=f"token_id:{self.id}", top=top, data=self.utf8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the n samples of a completion."""

    content: str | None
    """None where there are tool calls and no text."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = "stop"
    """stop, length or tool_calls."""
    stop: str | None = None
    """The stop string that ended it."""
    sampled_tokens: int = 0
    reasoning_tokens: int = 0
    """Sampled tokens up to the end of the reasoning, its marks among them."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    token_ids: tuple[int, ...] = ()
    """All ids that were sampled, the one that ended the completion among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A sampled completion, parsed."""

    call_id: str
    """Id of the recorded call; choice i > 0 is recorded as ``{call_id}.{i}``."""
    model: str
    created_s: int
    prompt_tokens: int
    choices: tuple[Choice, ...]
    cached_tokens: int = 0
    """Number of the prompt's tokens that continue an earlier call."""
    """Reports of the request's context edits, as Anthropic writes them."""
    prompt_ids: tuple[int, ...] | None = None
    """The prompt's ids, where the request asks for them."""
    prompt_logprobs: list[JSON | None] | None = None
    """By token of the prompt a table of {logprob, rank, decoded_token} by id, None for the first; if asked for."""
    completed_s: int | None = None
    """Unix time at which its last token was sampled."""

    @property
    def sampled_tokens(self) -> int:
        """Sampled tokens of all choices."""
        total = 0
        for choice in self.choices:
            total += choice.sampled_tokens
        return total

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens of all choices."""
        total = 0
        for choice in self.choices:
            total += choice.reasoning_tokens
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDelta:
    """More of the tool call at `index`; `id` and `name` come with its first piece and only then."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """An increment of one choice: reasoning, then content, then tool calls; each may be empty."""

    content: str = ""
    reasoning: str = ""
    tools: tuple[ToolDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Log-probabilities of the tokens since the last delta; None where they were not requested."""
    token_ids: tuple[int, ...] = ()
    """The ids since the last delta, also of tokens whose text is held back, where they were requested."""
    sampled_tokens: int = 0
    """Tokens of the choice so far."""
    last: bool = False
    """Nothing of the choice follows but its finish reason."""


class EventStream(Interface):
    """The events of one streamed response: `first`, any number of `delta`, then `last` or `failed`.

    The deltas of a choice, put together, are the choice that `last` is given.
    """

    def first(self) -> bytes:
        """Opens the completion."""
        ...

    def delta(self, index: int, delta: Delta) -> bytes:
        """More of choice `index`."""
        ...

    def last(self, completion: Completion) -> bytes:
        """All that may only be sent once the call is durable: finish reasons, usage, end marks."""
        ...

    def failed(self, refusal: ApiError) -> bytes:
        """Ends a stream that cannot go on; SDKs raise the error that it carries."""
        ...


class CompletionReader(ABC):
    """Reads the response of an external model, whole or event by event, for the record. Never raises: what it does not know
    it passes over."""

    def __init__(self, content: str | None = None) -> None:
        self.message: JSON = {"role": "assistant", "content": content}
        """The assistant message so far, in the form of Chat Completions (of choice 0)."""
        self.finish_reason = "stop"
        self.prompt_tokens = 0
        self.sampled_tokens = 0
        self.choice_bytes = 0
        """Bytes of the texts of all choices, in protocols that have several."""

    @abstractmethod
    def whole(self, body: JSON) -> None:
        """Take in a complete response."""

    @abstractmethod
    def event(self, data: JSON) -> None:
        """Take in the data of one event of a stream."""

    def add_text(self, name: str, more: Any) -> None:
        """Append to a text of the message; what is no text changes nothing."""
        if isinstance(more, str) and more:
            self.message[name] = (self.message.get(name) or "") + more

    def count_choices(self, data: Any, part: str) -> None:
        """Count the texts under `part` of every choice."""
        choices = data.get("choices") if isinstance(data, dict) else None
        waiting: list[Any] = (
            [one.get(part) for one in choices if isinstance(one, dict)] if isinstance(choices, list) else []
        )
        while waiting:
            value = waiting.pop()
            if isinstance(value, str):
                self.choice_bytes += len(value.encode(errors="replace"))
            elif isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, list):
                waiting += value

    def read_usage(self, body: Any, prompt: str = "prompt_tokens", sampled: str = "completion_tokens") -> None:
        """Take in the token counts that `body` has under these names; one that is no number changes nothing."""
        usage = body.get("usage") if isinstance(body, dict) else None
        if isinstance(usage, dict):
            counts = usage.get(prompt), usage.get(sampled)
            self.prompt_tokens = counts[0] if isinstance(counts[0], int) else self.prompt_tokens
            self.sampled_tokens = counts[1] if isinstance(counts[1], int) else self.sampled_tokens


class WireFormat(Interface):
    """The interface of a protocol's module (a module is one)."""

    @property
    def NAME(self) -> str: ...

    def parse(self, data: JSON, trained: bool = True) -> CompletionRequest:
        """The request in a body. Raises ApiError, naming the field and what was expected.

        With `trained` False the call goes to an external model as it is: content that only that model understands (images,
        tools of its own, unknown items) is kept in `messages` as received, and nothing is collected as unsupported.
        """
        ...

    def body(self, request: CompletionRequest, completion: Completion) -> bytes:
        """The whole response of a call that is not streamed."""
        ...

    def stream(
        self, request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int
    ) -> EventStream:
        """The events of a streamed response."""
        ...

    def error(self, refusal: ApiError) -> bytes:
        """An error in the protocol's own shape."""
        ...

    def reader(self) -> CompletionReader:
        """A reader for one response of an external model with this protocol."""
        ...


class ApiError(Exception):
    """A request that is not served, in terms that each protocol can put into its own error shape."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        final: bool = False,
        fields: tuple[str, ...] = (),
    ) -> None:
        """`retry_after_s`: when to try again. `final`: a client that would, as SDKs do by status, is told not to. `fields`:
        all that it names, where those are several."""
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.final = final
        self.fields = fields


def read_object(body: bytes) -> JSON:
    """The JSON object in `body`, of `MAX_PARTS` objects and lists and `MAX_NESTING` levels at most. Raises ApiError."""
    if sum(map(body.count, (b"{", b"[", b","))) > MAX_MARKS:  # what is made of them takes a hundred times their bytes
        raise ApiError(f"the body: expected at most {MAX_MARKS} commas, braces and brackets", status=413)
    try:
        data = json_text.loads(body)
    except orjson.JSONDecodeError as cause:
        raise ApiError(f"the body is not valid JSON: {cause}") from None
    if not isinstance(data, dict):
        raise ApiError(f"the body: expected a JSON object, got {type(data).__name__}")
    if body.count(b"{") + body.count(b"[") > MAX_NESTING:
        check_parts(data)
    return data


def check_parts(data: JSON, field: str | None = None) -> None:
    """Raises ApiError for one of too many objects and lists, or levels of them."""
    level: list[JSON | list[Any]] = [data]
    count = 0
    for _ in range(MAX_NESTING):
        count += len(level)
        if count > MAX_PARTS:
            largest = max(data, key=lambda name: len(data[name]) if isinstance(data[name], dict | list) else 0)
            raise ApiError(
                f"{short(largest)}: expected at most {MAX_PARTS} objects and lists in one request", param=largest
            )
        level = [
            part
            for outer in level
            for part in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(part, dict | list)
        ]
    if level:
        raise ApiError(f"{field or 'the body'}: expected at most {MAX_NESTING} levels of nesting", param=field)


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


def call_id(response_id: str) -> str:
    """The recorded call behind an id that an agent saw, whatever the protocol.

    >>> call_id("chatcmpl-0197"), call_id("msg_0197"), call_id("0197.1")
    ('0197', '0197', '0197.1')
    """
    for prefix in ID_PREFIXES:
        if response_id.startswith(prefix):
            return response_id[len(prefix) :]
    return response_id


class OpenToolCalls:
    """Ids of tool calls in conversations whose protocol need not have any: a result answers the call of its id, else the
    first open one of its name, else the first open one."""

    def __init__(self) -> None:
        self._count = 0
        self._open: dict[str, None] = {}
        """Ids of calls without a result, in their order."""
        self._named: defaultdict[str, deque[str]] = defaultdict(deque)
        """Ids by name, those with a result since among them: a request may have thousands."""

    def call(self, given: str | None, name: str) -> str:
        """The id of the next call."""
        call_id = given or f"call_{self._count}"
        self._count += 1
        self._open[call_id] = None
        self._named[name].append(call_id)
        return call_id

    def answered(self, given: str | None, name: str) -> str:
        """The id of the call that a result answers; the name where none is open."""
        named = self._named[name]
        while named and named[0] not in self._open:
            named.popleft()
        found = given or (named[0] if named else next(iter(self._open), name))
        self._open.pop(found, None)
        return found


def short(value: Any) -> str:
    """A value as JSON, cut where it is long, for a sentence about it."""
    try:
        text = orjson.dumps(value).decode()
    except TypeError:
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def replayed(events: EventStream, completion: Completion, token_ids: bool = False) -> Iterator[bytes]:
    """Yields a whole completion as a stream, of whatever protocol; with `token_ids` its ids as well."""
    yield events.first()
    for index, choice in enumerate(completion.choices):
        tools = tuple(
            ToolDelta(index=place, arguments=call.arguments, id=call.id, name=call.name)
            for place, call in enumerate(choice.tool_calls)
        )
        delta = Delta(
            content=choice.content or "",
            reasoning=choice.reasoning or "",
            tools=tools,
            logprobs=choice.logprobs,
            token_ids=choice.token_ids if token_ids else (),
        )
        yield events.delta(index, delta)
    yield events.last(completion)


# --- server-sent events ----------------------------------------------------------------------------------------------


SSE_DONE = b"data: [DONE]\n\n"

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Room for the largest event there is, a whole response with an image in it; the loop that reads it serves everybody."""


def sse_event(data: Any, name: str = "") -> bytes:
    """One event that carries `data` as JSON, with its name where it has one."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + json_text.dumps(data) + b"\n\n"


class EventReader:
    """Splits a byte stream into the data of its events, wherever the network cut it.

    >>> reader = EventReader()
    >>> reader.feed(b'data: {"a"')
    []
    >>> reader.feed(b': 1}\\n\\ndata: [DONE]\\n\\n')
    [b'{"a": 1}', b'[DONE]']
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """Pieces of the line under way: joined once, so that reading takes time linear in the stream's bytes."""
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes; comments and other fields are passed over.

        Raises EngineError where an event is longer than MAX_EVENT_BYTES.
        """
        self._line.append(chunk)
        if b"\n" not in chunk:
            self._size += len(chunk)
            if self._size > MAX_EVENT_BYTES:
                raise event_too_large()
            return []
        lines = b"".join(self._line).split(b"\n")
        self._line = [lines.pop()]
        self._size = len(self._line[0])
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def event_too_large() -> EngineError:
    """The error for a stream whose next event does not end within MAX_EVENT_BYTES."""
    return EngineError(f"the stream has an event of more than {MAX_EVENT_BYTES} bytes")
