"""Anthropic Messages: JSON <-> CompletionRequest, Completion, Delta, ApiError; and what external models of this protocol
respond. Pure.

Driven by the gateway, which chooses the protocol by route. Whether the model thinks before it answers is its own and its
template's; the response has its thinking where `thinking` asks for it, the record always, so that the conversation goes on
exactly. Accepted without effect are cache control, metadata and
service tiers. Unknown fields are passed over, save those with which other APIs change the response.

A tool call's arguments are an object here, which the sampled text need not be: what is no JSON object travels in the key
``_arguments``, beside what could be read of it, and is unwrapped when the agent sends it back, so that nothing is lost.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
import orjson
from msgspec import Meta, Struct

from agentlightning.protocols import fields
from agentlightning.protocols.base import (
    MAX_NESTING,
    ApiError,
    Choice,
    Completion,
    CompletionReader,
    CompletionRequest,
    Delta,
    EventStream,
    ToolDelta,
    call_id,
    short,
    sse_event,
)
from agentlightning.protocols.fields import expected
from agentlightning.protocols.images import image_part, take_images
from agentlightning.records import JSON
from agentlightning.runtime import json_text

NAME = "messages"

UNSUPPORTED_PARAMS = {**fields.ENGINE_PARAMS, **fields.SAMPLING_PARAMS, **fields.TOKEN_PARAMS}
"""Fields of other APIs that Anthropic's refuses as unknown."""

NOT_OURS = ("mcp_servers", "compaction")
"""Fields for services that stand before Anthropic's models, without which a model responds all the same."""

REFUSED = ("container",)
"""Fields for such services that the response would have to continue."""

THREAD_NOT_FOUND = "thread_not_found"
"""Code of the error on which SDKs send the whole conversation as a new thread."""

KEEPING_ALL = [{"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"})]
"""Context edits that edit nothing; Claude Code sends the first."""

ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error",
}  # fmt: skip


class Thinking(Struct):
    type: Annotated[
        Literal["enabled", "disabled", "adaptive", "between_tools"],
        Meta(description="enabled, adaptive, between_tools or disabled"),
    ]
    display: fields.Text = None


class ToolChoice(Struct):
    type: Annotated[Literal["auto", "any", "tool", "none"], Meta(description="auto, any, tool or none")]
    name: fields.Text = None
    disable_parallel_tool_use: fields.Flag = None


class MessagesRequest(fields.ExternalRequest, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, le=fields.MAX_INTEGER)]
    messages: list[Any] | None = None
    stop_sequences: fields.Stops = None
    temperature: fields.Share = None
    top_p: fields.Share = None
    top_k: fields.TopK = None
    thinking: Thinking | None = None
    tool_choice: ToolChoice | None = None
    output_config: fields.Record = None
    output_format: fields.Record = None
    context_management: fields.Record = None
    chat_template_kwargs: fields.Record = None


class _Edits(Struct):
    edits: list[JSON] | None = None


class _Effort(Struct):
    effort: fields.Text = None
    format: fields.Record = None


def parse(data: JSON, trained: bool = True) -> CompletionRequest:
    if not trained:
        external = fields.read(fields.ExternalRequest, data)
        return CompletionRequest(
            model=external.model or "",
            messages=take_images(_messages(data, trained))[0],
            tools=[_tool(tool) for tool in external.tools or () if isinstance(tool, dict)] or None,
            stream=bool(external.stream),
        )
    asked = fields.read(MessagesRequest, data)
    _check_thread(data.get("thread"))
    messages, images = take_images(_messages(data, trained))
    output = fields.read(_Effort, asked.output_config or {}, "output_config")
    formats = [
        fields.content(output.format, "output_config.format"),
        fields.content(asked.output_format, "output_format"),
    ]
    if messages[-1]["role"] == "assistant":
        messages = fields.begun(messages)
        if any(formats):
            raise fields.refused(
                "output_config.format", "expected the last message to be the user's: the answer is JSON as a whole"
            )
    tools, other_tools = _tools(asked.tools)
    parse_tools, one_call, tool_call = _tool_choice(asked.tool_choice, tools)
    thinking = asked.thinking
    return CompletionRequest(
        include_reasoning=thinking is not None and thinking.type != "disabled",
        model=asked.model or "",
        messages=messages,
        images=images,
        tools=tools,
        parse_tools=parse_tools,
        one_tool_call=one_call,
        max_tokens=asked.max_tokens,
        stop=fields.stops(asked.stop_sequences, "stop_sequences"),
        stream=bool(asked.stream),
        forced=fields.forced(data),
        not_applied=fields.not_applied(asked.output_config, ("effort",), "output_config"),
        refused={
            **fields.services(data, REFUSED),
            **fields.reserved_variables(asked.chat_template_kwargs),
            **fields.engine_refused(data),
        },
        template_kwargs=asked.chat_template_kwargs or {},
        unsupported={
            **fields.unsupported(data, UNSUPPORTED_PARAMS),
            **fields.given(data, (*fields.GUIDED, *NOT_OURS)),
            **other_tools,
            **_other_output_settings(asked.output_config),
            **_examples(asked.tools),
            **_context_edits(asked.context_management),
        },
        grammar=fields.combined(tool_call, *formats),
        logits={"top_k": asked.top_k} if asked.top_k is not None and asked.top_k > 0 else {},
        echo={OMITTED: thinking is not None and thinking.display == "omitted"},
    )


def _check_thread(thread: object) -> None:
    """Threads are not kept. One that a request creates is its conversation; for one that it continues, ApiError with
    THREAD_NOT_FOUND, on which SDKs send the conversation."""
    kind = thread.get("type") if isinstance(thread, dict) else thread
    if kind not in (None, "create", "continue"):
        raise expected('{"type": "create"} or {"type": "continue", …}', thread, "thread")
    if kind == "continue":
        sentence = "threads are not kept here; send the whole conversation"
        raise ApiError(sentence, status=404, param="thread.previous_message_id", code=THREAD_NOT_FOUND)


def _context_edits(context_management: JSON | None) -> JSON:
    """The edits of the prompt that a request asks for, by their path. Keeping all thinking is none."""
    edits = fields.read(_Edits, context_management or {}, "context_management").edits or []
    return {f"context_management.edits[{index}]": edit for index, edit in enumerate(edits) if edit not in KEEPING_ALL}


def _other_output_settings(output_config: JSON | None) -> JSON:
    return {
        f"output_config.{name}": value
        for name, value in (output_config or {}).items()
        if name not in ("effort", "format") and value is not None
    }


def body(request: CompletionRequest, completion: Completion) -> bytes:
    return json_text.dumps(finished(request, completion))


def stream(request: CompletionRequest, call_id: str, model: str, created_s: int, prompt_tokens: int) -> EventStream:
    return MessageEvents(request, unfinished(call_id, model, prompt_tokens, request.cached_tokens))


def error(refusal: ApiError) -> bytes:
    kind = ERROR_TYPES.get(refusal.status) or ("api_error" if refusal.status >= 500 else "invalid_request_error")
    details = {"details": {"error_code": refusal.code}} if refusal.code == THREAD_NOT_FOUND else {}
    return orjson.dumps({"type": "error", "error": {"type": kind, "message": refusal.message, **details}})


def count(tokens: int) -> bytes:
    """The body of POST messages/count_tokens."""
    return orjson.dumps({"input_tokens": tokens})


def models(names: list[str], created_s: int) -> bytes:
    """The body of GET models."""
    first, last = (names[0], names[-1]) if names else (None, None)
    data = [_model(name, created_s) for name in names]
    return orjson.dumps({"data": data, "has_more": False, "first_id": first, "last_id": last})


def model(name: str, created_s: int) -> bytes:
    """The body of GET models/{name}."""
    return orjson.dumps(_model(name, created_s))


def _model(name: str, created_s: int) -> JSON:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": f"{datetime.fromtimestamp(created_s, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "lifecycle": "active",
    }


# --- parsing ------------------------------------------------------------------------------------------------------------


class _Messages(Struct):
    messages: list[Any] | None = None


class _ToolResult(Struct):
    tool_use_id: fields.Text = None
    is_error: fields.Flag = None


class _ToolUse(Struct):
    id: fields.Text = None
    name: fields.Text = None
    input: fields.Arguments | None = None


class ToolDefinition(Struct):
    name: Annotated[str, Meta(min_length=1, description="the name of a tool")]
    description: fields.Text = None
    input_schema: fields.Record = None
    strict: fields.Flag = None


def _messages(data: JSON, trained: bool) -> list[JSON]:
    given = fields.read(_Messages, data).messages or []
    if not given and trained:
        raise expected("a list of at least one message", data.get("messages"), "messages")
    result: list[JSON] = []
    system = data.get("system")
    if system is not None:
        result.append({"role": "system", "content": _content(system, "system", trained, text_only=True)})
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise expected("an object", message, where)
        role = message.get("role")
        if role == "assistant":
            result.append(_assistant(message, where, trained))
        elif role == "user":
            result += _user(message, where, trained)
        elif role == "system":
            content = _content(message.get("content"), f"{where}.content", trained, text_only=True)
            result.append({"role": "system", "content": content})
        else:
            raise expected("user, assistant or system", role, "role", where)
    return result


def _parts(message: JSON, where: str) -> list[Any]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise expected("a string or a list of content blocks", content, "content", where)
    return content


def _user(message: JSON, where: str, trained: bool) -> list[JSON]:
    """Tool results, each a message of its own, then what else the user says."""
    results: list[JSON] = []
    said: list[JSON] = []
    for index, part in enumerate(_parts(message, where)):
        path = f"{where}.content[{index}]"
        if not isinstance(part, dict) or part.get("type") != "tool_result":
            said += _block(part, path, trained)
            continue
        content, given = part.get("content"), fields.read(_ToolResult, part, path)
        text = "" if content is None else _content(content, f"{path}.content", trained)
        error = {"is_error": True} if given.is_error else {}
        results.append({"role": "tool", "tool_call_id": given.tool_use_id or "", "content": text, **error})
    if said or not results:
        results.append({"role": "user", "content": _joined(said)})
    return results


def _assistant(message: JSON, where: str, trained: bool) -> JSON:
    text: list[JSON] = []
    reasoning: list[str] = []
    calls: list[JSON] = []
    for index, part in enumerate(_parts(message, where)):
        path = f"{where}.content[{index}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            text.append(_text(part["text"]))
        elif kind == "thinking" and isinstance(part.get("thinking"), str):
            reasoning.append(part["thinking"])
        elif kind == "redacted_thinking":
            continue  # another model's; it has no text
        elif kind == "tool_use":
            calls.append(_tool_use(part, path))
        elif trained or not isinstance(part, dict):
            raise _not_text(part, path)
        else:
            text.append(part)
    result: JSON = {"role": "assistant", "content": _joined(text) if text or not calls else None}
    if reasoning:
        result["reasoning_content"] = "".join(reasoning)
    return {**result, "tool_calls": calls} if calls else result


def _tool_use(part: JSON, where: str) -> JSON:
    given = fields.read(_ToolUse, part, where)
    written = given.input or {}
    function = {"name": given.name or "", "arguments": written if isinstance(written, str) else arguments_text(written)}
    return {"id": given.id or "", "type": "function", "function": function}


def _content(value: Any, where: str, trained: bool, text_only: bool = False) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise expected("a string or a list of text blocks", value, where)
    return _joined([one for at, part in enumerate(value) for one in _block(part, f"{where}[{at}]", trained, text_only)])


def _block(part: Any, where: str, trained: bool, text_only: bool = False) -> list[JSON]:
    """A block as parts of a message: as it is, where an external model reads it."""
    if not isinstance(part, dict):
        raise _not_text(part, where)
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return [_text(part["text"])]
    if not trained:
        return [part]
    image = None if text_only else image_part(part, where)
    if image is None:
        raise _not_text(part, where)
    return [image]


def _joined(parts: list[JSON]) -> str | list[JSON]:
    """One text where all parts are text; the parts, where an external model reads others."""
    if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _not_text(part: Any, where: str) -> ApiError:
    what = "a text block, an image, a tool call or its result, all that the trained policy reads"
    return fields.refused(where, f"expected {what}, got {short(part)}")


def _tools(given: list[Any] | None) -> tuple[list[JSON] | None, JSON]:
    """Functions in the form of Chat Completions, and the tools that Anthropic runs itself, by path."""
    result: list[JSON] = []
    others: JSON = {}
    for index, tool in enumerate(given or ()):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or not isinstance(tool.get("type", ""), str | None):
            raise expected('{"name", "description", "input_schema"}', tool, where)
        if tool.get("type") not in (None, "custom"):
            others[where] = tool
            continue
        fields.read(ToolDefinition, tool, where)
        result.append(_tool(tool))
    return result or None, others


def _examples(given: list[Any] | None) -> JSON:
    """The inputs that tools give as examples: Anthropic puts them into the prompt, chat templates have no place for them."""
    return {
        f"tools[{index}].input_examples": tool["input_examples"]
        for index, tool in enumerate(given or ())
        if tool.get("input_examples")
    }


def _tool(tool: JSON) -> JSON:
    """A tool in the form of Chat Completions."""
    given = {"description": tool.get("description"), "parameters": tool.get("input_schema")}
    given["strict"] = True if tool.get("strict") is True else None
    kept = {name: value for name, value in given.items() if value is not None}
    return {"type": "function", "function": {"name": tool.get("name"), **kept}}


def _tool_choice(given: ToolChoice | None, tools: list[JSON] | None) -> tuple[bool, bool, JSON]:
    """(tool calls are parsed, at most one is allowed, `tool_call` of the grammar)."""
    if given is None:
        return tools is not None, False, fields.strict(tools)
    if given.type == "none":
        return False, False, {}
    one_call = bool(given.disable_parallel_tool_use)
    if given.type == "auto":
        return tools is not None, one_call, fields.strict(tools)
    names = [given.name or ""] if given.type == "tool" else None
    return tools is not None, one_call, fields.forced_call(names, tools)


def _text(text: str) -> JSON:
    return {"type": "text", "text": text}


# --- messages of the assistant ---------------------------------------------------------------------------------------


RAW = "_arguments"
"""The key of an input that holds arguments which are no JSON object, as they were sampled."""

MAX_INPUT_NESTING = MAX_NESTING - 10
"""Levels of an input; deeper arguments travel under `RAW`, since the request that repeats them has levels of its own."""

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
FINISH_REASONS = {"max_tokens": "length", "tool_use": "tool_calls"}

OMITTED = "_omitted"
"""Name in `echo` of a request whose response has thinking blocks without text (`thinking.display`)."""


def unfinished(call_id: str, model: str, prompt_tokens: int, cached_tokens: int) -> JSON:
    """A message that has only begun; the caller adds content, stop reason and usage."""
    return {
        "id": f"msg_{call_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(prompt_tokens, 0, cached_tokens),
    }


def finished(request: CompletionRequest, completion: Completion) -> JSON:
    """The message of a whole completion: thinking (where asked for), text, tool calls."""
    choice = completion.choices[0]
    return {
        **unfinished(completion.call_id, completion.model, completion.prompt_tokens, completion.cached_tokens),
        "content": _blocks(request, choice, completion.call_id),
        **_stop(choice),
        "usage": usage(completion.prompt_tokens, completion.sampled_tokens, completion.cached_tokens),
    }


def _blocks(request: CompletionRequest, choice: Choice, call_id: str) -> list[JSON]:
    """The id of the recorded call signs a thinking block."""
    result: list[JSON] = []
    if choice.reasoning and request.include_reasoning:
        shown = "" if request.echo.get(OMITTED) else choice.reasoning
        result.append({"type": "thinking", "thinking": shown, "signature": call_id})
    if choice.content:
        result.append({"type": "text", "text": choice.content})
    for call in choice.tool_calls:
        result.append({"type": "tool_use", "id": call.id, "name": call.name, "input": tool_input(call.arguments)})
    return result


def tool_input(arguments: str) -> JSON:
    """Arguments as an object; `arguments_text` undoes it.

    >>> tool_input('{"a": 1}'), tool_input('{"a": 1, "b')
    ({'a': 1}, {'a': 1, '_arguments': '{"a": 1, "b'})
    """
    written = InputText()
    value: JSON = msgspec.json.decode(written.feed(arguments) + written.end())  # integers of any size
    return value


def arguments_text(given: JSON) -> str:
    """The arguments behind an input: those under `RAW` where `tool_input` made it of them."""
    raw: Any = given.get(RAW)
    ours = isinstance(raw, str) and tool_input(raw) == given
    return str(raw) if ours else json_text.dumps(given).decode()


class InputText:
    """Arguments as they are sampled, given out so that all of it together is an object whatever is sampled.

    SDKs parse an input while it comes, and raise where it is no JSON. So a member goes out once it is whole, as Anthropic's
    own models do; where the text stops being an object, the members so far are closed with the text under `RAW`.
    """

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._member = ""
        """Text since the last complete member; it begins with a brace or a comma."""
        self._read = 0
        """Characters of it that have been scanned."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._broken = False
        self._given = False

    def feed(self, text: str) -> str:
        """The members that `text` completes."""
        self._raw.append(text)
        if self._broken:
            return ""
        self._member += text
        out: list[str] = []
        while self._read < len(self._member):
            char = self._member[self._read]
            ends = self._is_end_of_member(char)
            if self._depth > MAX_INPUT_NESTING:
                self._broken = True
                break
            if ends:
                member, self._member, self._read = self._member[: self._read], self._member[self._read :], 0
                if not _members(member + "}", first=not self._given):
                    self._broken = True
                    break
                self._given = True
                out.append(member)
            self._read += 1
        return "".join(out)

    def end(self) -> str:
        """The text that completes the object."""
        rest = None if self._broken else _members(self._member, first=not self._given)
        if rest is not None and (rest or not self._given):
            return self._member
        return (", " if self._given else "{") + orjson.dumps({RAW: "".join(self._raw)}).decode()[1:]

    def _is_end_of_member(self, char: str) -> bool:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return char == "," and self._depth == 1 and not self._in_string and self._read > 0


def _members(text: str, first: bool) -> JSON | None:
    """The members at the end of an object, from its brace or a comma on; None where that is no JSON, or could be taken for
    ours."""
    text = text.lstrip() if first else text
    if not text.startswith("{" if first else ","):
        return None
    try:
        value: JSON = orjson.loads("{" + text[1:])
    except orjson.JSONDecodeError:
        return None
    return None if RAW in value else value


def _stop(choice: Choice) -> JSON:
    reason = STOP_REASONS.get(choice.finish_reason, "end_turn")
    if choice.stop is not None and not choice.tool_calls:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": choice.stop}


def usage(prompt_tokens: int, sampled_tokens: int, cached_tokens: int) -> JSON:
    """The token counts; those that continue an earlier call are counted as read from a cache."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "output_tokens": sampled_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,
    }


class MessageEvents:
    """The events of one streamed message; every kind of content is a block of its own."""

    def __init__(self, request: CompletionRequest, begun: JSON) -> None:
        """`begun` is the message so far."""
        self._request = request
        self._begun = begun
        self._block: tuple[str, int] | None = None
        """Kind of the open block, and the tool call it is."""
        self._index = -1
        self._input = InputText()
        """The input of the open tool call."""

    def first(self) -> bytes:
        """Opens the message."""
        return _event("message_start", message=self._begun) + _event("ping")

    def delta(self, index: int, delta: Delta) -> bytes:
        """More thinking, text, or tool calls. There is one choice."""
        parts: list[bytes] = []
        if delta.reasoning and self._request.include_reasoning:
            parts.append(self._open("thinking", 0, {"type": "thinking", "thinking": "", "signature": ""}))
            if not self._request.echo.get(OMITTED):
                parts.append(self._more({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.content:
            parts.append(self._open("text", 0, {"type": "text", "text": ""}))
            parts.append(self._more({"type": "text_delta", "text": delta.content}))
        parts += [self._tool(tool) for tool in delta.tools]
        return b"".join(parts)

    def last(self, completion: Completion) -> bytes:
        """Closes the open block and the message."""
        counts = usage(completion.prompt_tokens, completion.sampled_tokens, completion.cached_tokens)
        end = _event("message_delta", delta=_stop(completion.choices[0]), usage=counts)
        return self._close() + end + _event("message_stop")

    def failed(self, refusal: ApiError) -> bytes:
        return b"event: error\ndata: " + error(refusal) + b"\n\n"

    def _tool(self, tool: ToolDelta) -> bytes:
        opened = b""
        if tool.name is not None:
            block: JSON = {"type": "tool_use", "id": tool.id, "name": tool.name, "input": {}}
            opened = self._open("tool_use", tool.index, block)
            self._input = InputText()
        return opened + self._more_input(self._input.feed(tool.arguments))

    def _more_input(self, text: str) -> bytes:
        return self._more({"type": "input_json_delta", "partial_json": text}) if text else b""

    def _open(self, kind: str, number: int, block: JSON) -> bytes:
        if self._block == (kind, number):
            return b""
        closed = self._close()
        self._block = (kind, number)
        self._index += 1
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        if self._block is None:
            return b""
        rest = b""
        if self._block[0] == "thinking":
            rest = self._more({"type": "signature_delta", "signature": call_id(self._begun["id"])})
        elif self._block[0] == "tool_use":
            rest = self._more_input(self._input.end())
        self._block = None
        return rest + _event("content_block_stop", index=self._index)

    def _more(self, delta: JSON) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


class MessageReader(CompletionReader):
    """An external model's response, whole or event by event. Unknown fields are passed over."""

    def __init__(self) -> None:
        super().__init__()
        self._block: JSON = {}
        """The tool call under way."""

    def whole(self, body: JSON) -> None:
        for block in _list(body.get("content")):
            self._take_block(block)
            self._end_block()
        self._take_end(body)

    def event(self, data: JSON) -> None:
        kind = data.get("type")
        if kind == "message_start":
            self._take_end(_dict(data.get("message")))
        elif kind == "content_block_start":
            self._take_block(data.get("content_block"))
        elif kind == "content_block_delta":
            self._take_delta(_dict(data.get("delta")))
        elif kind == "content_block_stop":
            self._end_block()
        elif kind == "message_delta":
            self._take_end({**_dict(data.get("delta")), "usage": data.get("usage")})

    def _take_block(self, given: Any) -> None:
        block = _dict(given)
        kind = block.get("type")
        if kind == "text":
            self.add_text("content", block.get("text"))
        elif kind == "thinking":
            self.add_text("reasoning_content", block.get("thinking"))
        elif kind == "tool_use":
            written = block.get("input")
            self._block = {
                "id": str(block.get("id") or ""),
                "type": "function",
                "function": {
                    "name": str(block.get("name") or ""),
                    "arguments": arguments_text(written) if isinstance(written, dict) and written else "",
                },
            }

    def _take_delta(self, delta: JSON) -> None:
        kind = delta.get("type")
        if kind == "text_delta":
            self.add_text("content", delta.get("text"))
        elif kind == "thinking_delta":
            self.add_text("reasoning_content", delta.get("thinking"))
        elif kind == "input_json_delta" and self._block and isinstance(delta.get("partial_json"), str):
            self._block["function"]["arguments"] += delta["partial_json"]

    def _end_block(self) -> None:
        if self._block:
            self._block["function"]["arguments"] = self._block["function"]["arguments"] or "{}"
            self.message.setdefault("tool_calls", []).append(self._block)
            self._block = {}

    def _take_end(self, data: JSON) -> None:
        reason = data.get("stop_reason")
        if isinstance(reason, str):
            self.finish_reason = FINISH_REASONS.get(reason, "stop")
        counts = dict(_dict(data.get("usage")))
        read = [counts.get(name) for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")]
        if isinstance(read[0], int):
            counts["input_tokens"] = sum(number for number in read if isinstance(number, int))
        self.read_usage({"usage": counts}, "input_tokens", "output_tokens")


reader = MessageReader


def _event(kind: str, **data: Any) -> bytes:
    return sse_event({"type": kind, **data}, kind)


def _dict(value: Any) -> JSON:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
