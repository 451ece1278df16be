"""Events of OpenAI Responses: a completion as it is streamed. Pure; driven by responses.py while a call is sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentlightning.protocols import sse
from agentlightning.protocols.base import ApiError, Completion, Delta, EventStream, TokenLogprob, ToolDelta
from agentlightning.protocols.openai_shapes import logprob_list
from agentlightning.protocols.response_items import (
    call_item,
    message_item,
    reasoning_item,
    spoken,
    summarises,
)
from agentlightning.protocols.response_object import finished, response
from agentlightning.protocols.tool_folding import FOLDS, fold, freeform
from agentlightning.records import JSON


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


class ResponseEvents:
    """The events of one streamed response; every item opens, grows and closes before the next."""

    def __init__(self, echo: JSON, call_id: str, model: str, created_s: int) -> None:
        self._echo = echo
        self._call_id = call_id
        self._model = model
        self._created_s = created_s
        self._number = 0
        """Sequence number of the next event that is sent."""
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
            if summarises(self._echo):
                more = {"item_id": self._item_id(), "output_index": len(self._output), "summary_index": 0}
                parts.append(self._event("response.reasoning_summary_text.delta", delta=delta.reasoning, **more))
        if delta.content:
            parts.append(self._begin("message"))
            place = spoken(self._unplaced, delta.content, delta.reasoning)
            found = self._unplaced[place]
            del self._unplaced[: place.stop]
            self._logprobs += found
            more = {"content_index": 0, "logprobs": logprob_list(found)}
            parts.append(self._more("response.output_text.delta", delta.content, **more))
        if delta.tools or (delta.reasoning and not delta.content):
            self._unplaced.clear()
        parts += [self._tool_call(tool) for tool in delta.tools]
        return b"".join(parts)

    def last(self, completion: Completion) -> bytes:
        """Closes the open item and the response."""
        choice = completion.choices[0]
        parts: list[bytes] = []
        status = "incomplete" if choice.finish_reason == "length" else "completed"
        if not choice.content and not choice.tool_calls and not self._messages:
            parts.append(self._begin("message"))
        parts.append(self._end(status))
        whole = finished(completion, self._echo, self._output)
        parts.append(self._event(f"response.{whole['status']}", response=whole))
        return b"".join((*parts, sse.DONE))

    def failed(self, refusal: ApiError) -> bytes:
        about = {"message": refusal.message, "code": refusal.code, "param": refusal.param}
        whole = response(self._call_id, self._model, self._created_s, self._echo, "failed", self._output)
        whole["error"] = {"code": "server_error", "message": refusal.message}
        error = self._event("error", **about, error={**about, "type": refusal.type})
        return error + self._event("response.failed", response=whole) + sse.DONE

    # --- items ------------------------------------------------------------------------------------------------------

    def _tool_call(self, tool: ToolDelta) -> bytes:
        begun = b""
        if tool.name is not None:
            begun = self._end("completed")
            self._tool = tool.index
            item_id = f"fc_{self._call_id}_{tool.index}"
            item = call_item(item_id, tool.id or "", tool.name, "", "in_progress")
            begun += self._add(fold(item, self._echo.get(FOLDS, {})))
        if not tool.arguments:
            return begun
        if self._open is not None and self._open["type"] == "custom_tool_call":
            self._text.append(tool.arguments)  # its input is known once the arguments are whole
            return begun
        return begun + self._more("response.function_call_arguments.delta", tool.arguments)

    def _begin(self, kind: str) -> bytes:
        """Open an item of reasoning or text, where none is open."""
        if self._open is not None and self._open["type"] == kind:
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
            if summarises(self._echo):
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
            if summarises(self._echo):
                parts.append(self._whole("response.reasoning_summary_text.done", text=text, summary_index=0))
                parts.append(self._summary_part("done", text))
        elif item["type"] == "message":
            item = message_item(item["id"], text, status, self._logprobs)
            found = item["content"][0]["logprobs"]
            parts.append(self._whole("response.output_text.done", text=text, content_index=0, logprobs=found))
            parts.append(self._part("done", item["content"][0]))
        elif item["type"] == "custom_tool_call":
            item = {**item, "input": freeform(text), "status": status}
            parts.append(self._whole("response.custom_tool_call_input.delta", delta=item["input"]))
            parts.append(self._whole("response.custom_tool_call_input.done", input=item["input"]))
        else:
            item = {**item, "arguments": text, "status": status}
            parts.append(self._whole("response.function_call_arguments.done", name=item["name"], arguments=text))
        parts.append(self._event("response.output_item.done", output_index=len(self._output), item=item))
        self._output.append(item)
        self._open = None
        return b"".join(parts)

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
        self._number += 1
        return sse.event({"type": kind, "sequence_number": self._number - 1, **data}, kind)
