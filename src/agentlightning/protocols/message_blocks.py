"""Anthropic messages of the assistant: written as blocks, whole or streamed, and read from external models. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from agentlightning.protocols import sse
from agentlightning.protocols.base import (
    ApiError,
    Choice,
    Completion,
    CompletionReader,
    CompletionRequest,
    Delta,
    ToolDelta,
    call_id,
)
from agentlightning.records import JSON

RAW = "_arguments"
"""The key of an input that holds arguments which are no JSON object, as they were sampled."""

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
    value: JSON = orjson.loads(written.feed(arguments) + written.end())
    return value


def arguments_text(given: JSON) -> str:
    """The arguments behind an input: those under `RAW` where `tool_input` made it of them."""
    raw: Any = given.get(RAW)
    ours = isinstance(raw, str) and tool_input(raw) == given
    return str(raw) if ours else orjson.dumps(given).decode()


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
            if self._is_end_of_member(char):
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

    def __init__(
        self,
        request: CompletionRequest,
        begun: JSON,
        error: Callable[[ApiError], bytes],
        more: Callable[[Completion], JSON],
    ) -> None:
        """`begun` is the message so far; `more` gives further fields of the event that ends it."""
        self._thinking = request.include_reasoning
        self._omitted = bool(request.echo.get(OMITTED))
        self._begun = begun
        self._error = error
        self._more_at_end = more
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
        if delta.reasoning and self._thinking:
            parts.append(self._open("thinking", 0, {"type": "thinking", "thinking": "", "signature": ""}))
            if not self._omitted:
                parts.append(self._more({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.content:
            parts.append(self._open("text", 0, {"type": "text", "text": ""}))
            parts.append(self._more({"type": "text_delta", "text": delta.content}))
        parts += [self._tool(tool) for tool in delta.tools]
        return b"".join(parts)

    def last(self, completion: Completion) -> bytes:
        """Closes the open block and the message."""
        counts = usage(completion.prompt_tokens, completion.sampled_tokens, completion.cached_tokens)
        end = _event("message_delta", delta=_stop(completion.choices[0]), usage=counts, **self._more_at_end(completion))
        return self._close() + end + _event("message_stop")

    def failed(self, refusal: ApiError) -> bytes:
        return b"event: error\ndata: " + self._error(refusal) + b"\n\n"

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


def _event(kind: str, **data: Any) -> bytes:
    return sse.event({"type": kind, **data}, kind)


def _dict(value: Any) -> JSON:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
