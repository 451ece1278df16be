"""Streams of Anthropic Messages: the events that the gateway sends, and those that external models send. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from agentlightning.protocols.base import ApiError, Completion, CompletionReader, Delta, ToolDelta
from agentlightning.protocols.message_blocks import InputText, arguments_text, signature, stop_reason, usage
from agentlightning.types import JSON

FINISH_REASONS = {"max_tokens": "length", "tool_use": "tool_calls"}


class MessageEvents:
    """The events of one streamed message; every kind of content is a block of its own."""

    def __init__(self, call_id: str, model: str, prompt_tokens: int, error: Callable[[ApiError], bytes]) -> None:
        self._call_id = call_id
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._error = error
        self._block: tuple[str, int] | None = None
        """Kind of the open block, and the tool call it is."""
        self._index = -1
        self._input = InputText()
        """The input of the open tool call."""

    def first(self) -> bytes:
        """Opens the message."""
        message: JSON = {
            "id": f"msg_{self._call_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage(self._prompt_tokens, 0, 0),
        }
        return _event("message_start", message=message) + _event("ping")

    def delta(self, index: int, delta: Delta) -> bytes:
        """More thinking, text, or tool calls. There is one choice."""
        parts: list[bytes] = []
        if delta.reasoning:
            parts.append(self._open("thinking", 0, {"type": "thinking", "thinking": "", "signature": ""}))
            parts.append(self._more({"type": "thinking_delta", "thinking": delta.reasoning}))
        if delta.content:
            parts.append(self._open("text", 0, {"type": "text", "text": ""}))
            parts.append(self._more({"type": "text_delta", "text": delta.content}))
        parts += [self._tool(tool) for tool in delta.tools]
        return b"".join(parts)

    def last(self, answer: Completion) -> bytes:
        """Closes the open block and the message."""
        choice = answer.choices[0]
        return b"".join(
            (
                self._close(),
                _event(
                    "message_delta",
                    delta={"stop_reason": stop_reason(choice), "stop_sequence": choice.stop},
                    usage=usage(answer.prompt_tokens, answer.sampled_tokens, answer.cached_tokens),
                ),
                _event("message_stop"),
            )
        )

    def failed(self, refusal: ApiError) -> bytes:
        """Ends a stream that cannot go on."""
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
            rest = self._more({"type": "signature_delta", "signature": signature(self._call_id)})
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
        """Take in a complete response."""
        for block in _list(body.get("content")):
            self._take_block(block)
            self._end_block()
        self._take_end(body)

    def event(self, data: JSON) -> None:
        """Take in the data of one event of a stream."""
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
            self._add("content", block.get("text"))
        elif kind == "thinking":
            self._add("reasoning_content", block.get("thinking"))
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
            self._add("content", delta.get("text"))
        elif kind == "thinking_delta":
            self._add("reasoning_content", delta.get("thinking"))
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
        counts = _dict(data.get("usage"))
        read = [counts.get(name) for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")]
        if isinstance(read[0], int):
            self.prompt_tokens = sum(number for number in read if isinstance(number, int))
        if isinstance(counts.get("output_tokens"), int):
            self.sampled_tokens = counts["output_tokens"]

    def _add(self, name: str, more: Any) -> None:
        if isinstance(more, str) and more:
            self.message[name] = (self.message.get(name) or "") + more


def _event(kind: str, **data: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"


def _dict(value: Any) -> JSON:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
