"""Streams of OpenAI Responses: the events that the gateway sends, and those that external models send. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from agentlightning.protocols.base import ApiError, Completion, CompletionReader, Delta, TokenLogprob, ToolDelta
from agentlightning.protocols.response_items import (
    AssistantTurn,
    call_item,
    finished,
    listed,
    message_item,
    reasoning_item,
    response,
    spoken,
    summarises,
)
from agentlightning.types import JSON


class ResponseEvents:
    """The events of one streamed response; every item opens, grows and closes before the next."""

    def __init__(self, echo: JSON, call_id: str, model: str, created_s: int) -> None:
        self._echo = echo
        self._call_id = call_id
        self._model = model
        self._created_s = created_s
        self._number = 0
        """Sequence number of the next event."""
        self._output: list[JSON] = []
        """Items that are closed."""
        self._open: JSON | None = None
        """The item under way."""
        self._text: list[str] = []
        """The text of the open item."""
        self._logprobs: list[TokenLogprob] = []
        """Log-probabilities of the open message's tokens."""
        self._unplaced: list[TokenLogprob] = []
        """Log-probabilities of tokens whose text is held back: their item is known with their text."""
        self._tool = -1
        """Index of the tool call under way."""
        self._messages = 0

    def first(self) -> bytes:
        """Opens the response."""
        begun = response(self._call_id, self._model, self._created_s, self._echo, "in_progress", [])
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def delta(self, index: int, delta: Delta) -> bytes:
        """More reasoning, text, or tool calls. There is one choice."""
        parts: list[bytes] = []
        self._unplaced += delta.logprobs or ()
        if delta.reasoning:
            parts.append(self._begin("reasoning"))
            parts.append(self._more("response.reasoning_text.delta", delta.reasoning, content_index=0))
            if self._summarises():
                more = {"item_id": self._item_id(), "output_index": len(self._output), "summary_index": 0}
                parts.append(self._event("response.reasoning_summary_text.delta", delta=delta.reasoning, **more))
        if delta.content:
            parts.append(self._begin("message"))
            place = spoken(self._unplaced, delta.content, delta.reasoning)
            found = self._unplaced[place]
            del self._unplaced[: place.stop]
            self._logprobs += found
            more = {"content_index": 0, "logprobs": listed(found)}
            parts.append(self._more("response.output_text.delta", delta.content, **more))
        if delta.tools or (delta.reasoning and not delta.content):
            self._unplaced.clear()
        parts += [self._tool_call(tool) for tool in delta.tools]
        return b"".join(parts)

    def last(self, answer: Completion) -> bytes:
        """Closes the open item and the response."""
        choice = answer.choices[0]
        parts: list[bytes] = []
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        if not choice.content and not choice.tool_calls and not self._messages:
            parts.append(self._begin("message"))
        parts.append(self._end(status))
        whole = finished(answer, self._echo, self._output)
        parts.append(self._event(f"response.{whole['status']}", response=whole))
        return b"".join(parts)

    def failed(self, refusal: ApiError) -> bytes:
        """Ends a stream that cannot go on."""
        about = {"message": refusal.message, "code": refusal.code, "param": refusal.param}
        whole = response(self._call_id, self._model, self._created_s, self._echo, "failed", self._output)
        whole["error"] = {"code": "server_error", "message": refusal.message}
        return self._event("response.failed", response=whole) + self._event(
            "error", **about, error={**about, "type": refusal.type}
        )

    # --- items ------------------------------------------------------------------------------------------------------

    def _tool_call(self, tool: ToolDelta) -> bytes:
        begun = b""
        if tool.name is not None:
            begun = self._end("completed")
            self._tool = tool.index
            item_id = f"fc_{self._call_id}_{tool.index}"
            begun += self._add(call_item(item_id, tool.id or "", tool.name, "", "in_progress"))
        if not tool.arguments:
            return begun
        return begun + self._more("response.function_call_arguments.delta", tool.arguments)

    def _begin(self, kind: str) -> bytes:
        """Open an item of reasoning or text, where none is open."""
        if self._is_open(kind):
            return b""
        closed = self._end("completed")
        if kind == "reasoning":
            item = {
                "id": f"rs_{self._call_id}",
                "type": "reasoning",
                "summary": [],
                "content": [],
                "status": "in_progress",
            }
            opened = self._add(item) + self._part("added", {"type": "reasoning_text", "text": ""})
            if self._summarises():
                opened += self._summary_part("added", "")
            return closed + opened
        number = f"_{self._messages}" if self._messages else ""
        self._messages += 1
        item = {**message_item(f"msg_{self._call_id}{number}", "", "in_progress"), "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return closed + self._add(item) + self._part("added", part)

    def _add(self, item: JSON) -> bytes:
        self._open, self._text, self._logprobs = item, [], []
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _end(self, status: str) -> bytes:
        """Close the open item."""
        if self._open is None:
            return b""
        item, text = self._open, "".join(self._text)
        parts: list[bytes] = []
        if item["type"] == "reasoning":
            item = reasoning_item(item["id"], text, self._echo, status)
            parts.append(self._whole("response.reasoning_text.done", text=text, content_index=0))
            parts.append(self._part("done", {"type": "reasoning_text", "text": text}))
            if self._summarises():
                parts.append(self._whole("response.reasoning_summary_text.done", text=text, summary_index=0))
                parts.append(self._summary_part("done", text))
        elif item["type"] == "message":
            item = message_item(item["id"], text, status, self._logprobs)
            found = item["content"][0]["logprobs"]
            parts.append(self._whole("response.output_text.done", text=text, content_index=0, logprobs=found))
            parts.append(self._part("done", item["content"][0]))
        else:
            item = {**item, "arguments": text, "status": status}
            parts.append(self._whole("response.function_call_arguments.done", name=item["name"], arguments=text))
        parts.append(self._event("response.output_item.done", output_index=len(self._output), item=item))
        self._output.append(item)
        self._open = None
        return b"".join(parts)

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _summarises(self) -> bool:
        return summarises(self._echo)

    def _item_id(self) -> str:
        return str(self._open["id"]) if self._open is not None else ""

    def _more(self, kind: str, text: str, **fields: Any) -> bytes:
        self._text.append(text)
        return self._whole(kind, delta=text, **fields)

    def _whole(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id(), output_index=len(self._output), **fields)

    def _part(self, what: str, part: JSON) -> bytes:
        return self._whole(f"response.content_part.{what}", content_index=0, part=part)

    def _summary_part(self, what: str, text: str) -> bytes:
        part = {"type": "summary_text", "text": text}
        return self._whole(f"response.reasoning_summary_part.{what}", summary_index=0, part=part)

    def _event(self, kind: str, **data: Any) -> bytes:
        number = self._number
        self._number += 1
        body = orjson.dumps({"type": kind, "sequence_number": number, **data})
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


class ResponseReader(CompletionReader):
    """An external model's response, whole or event by event. Unknown fields are passed over."""

    def whole(self, body: JSON) -> None:
        """Take in a complete response."""
        turn = AssistantTurn()
        output = body.get("output")
        for item in output if isinstance(output, list) else ():
            if isinstance(item, dict) and item.get("type") in ("reasoning", "message", "function_call"):
                turn.add(item)
        self.message = turn.message
        if "tool_calls" in self.message:
            self.finish_reason = "tool_calls"
        if body.get("status") == "incomplete":
            self.finish_reason = "length"
        usage = body.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage.get("input_tokens"), self.prompt_tokens)
            self.sampled_tokens = _count(usage.get("output_tokens"), self.sampled_tokens)

    def event(self, data: JSON) -> None:
        """Take in the data of one event of a stream; the last one has everything."""
        kind = data.get("type")
        if kind in ("response.completed", "response.incomplete") and isinstance(data.get("response"), dict):
            self.whole(data["response"])
        elif kind == "response.output_text.delta" and isinstance(data.get("delta"), str):
            self.message["content"] = (self.message["content"] or "") + data["delta"]
        elif kind == "response.reasoning_text.delta" and isinstance(data.get("delta"), str):
            self.message["reasoning_content"] = self.message.get("reasoning_content", "") + data["delta"]
        elif kind == "response.output_item.done" and _is_call(data.get("item")):
            turn = AssistantTurn()
            turn.add(data["item"])
            self.message.setdefault("tool_calls", []).extend(turn.message["tool_calls"])


def _is_call(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "function_call"


def _count(value: Any, known: int) -> int:
    return value if isinstance(value, int) else known
