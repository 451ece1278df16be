"""Items of OpenAI Responses: completions as items, and items as messages. Pure.

Every item of a response carries the id of its call (``rs_ID``, ``msg_ID``, ``fc_ID_0``), so that items which an agent sends
back are put together to the message that was recorded.
"""

from __future__ import annotations

import base64
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from agentlightning.protocols.base import Choice, CompletionReader, TokenLogprob
from agentlightning.protocols.openai_shapes import logprob_list
from agentlightning.protocols.tool_folding import FOLDS, fold
from agentlightning.records import JSON

SEALED = "agl:"
"""Prefix of our encrypted_content; the rest is the reasoning in base64, no secret."""

SEALED_REASONING = "reasoning.encrypted_content"
"""The member of `include` that asks for the sealed reasoning."""

OUR_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12})(?:_\d+)?\Z")
"""Calls have a UUID of version 7, which says that an item with another is not ours."""

TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def output_items(choice: Choice, response_id: str, echo: JSON) -> list[JSON]:
    """Reasoning, message, function calls; where the completion was cut, the last one is incomplete."""
    items: list[JSON] = []
    if choice.reasoning:
        items.append(reasoning_item(f"rs_{response_id}", choice.reasoning, echo, "completed"))
    if choice.content or not choice.tool_calls:
        tokens, text = choice.logprobs or (), choice.content or ""
        found = tokens[spoken(tokens, text, choice.reasoning or "")]
        items.append(message_item(f"msg_{response_id}", text, "completed", found))
    for index, call in enumerate(choice.tool_calls):
        item = call_item(f"fc_{response_id}_{index}", call.id, call.name, call.arguments, "completed")
        items.append(fold(item, echo.get(FOLDS, {})))
    if choice.finish_reason == "length":
        items[-1]["status"] = "incomplete"
    return items


def reasoning_item(item_id: str, text: str, echo: JSON, status: str) -> JSON:
    """A reasoning item, with what the request asked to have included."""
    item: JSON = {
        "id": item_id,
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}] if summarises(echo) else [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": status,
    }
    if SEALED_REASONING in echo.get("include", ()):
        item["encrypted_content"] = SEALED + base64.b64encode(text.encode()).decode()
    return item


def summarises(echo: JSON) -> bool:
    """True where the request asked for summaries of the reasoning: they are the reasoning itself."""
    asked = echo.get("reasoning") or {}
    return any(asked.get(name) is not None for name in ("summary", "generate_summary"))


def message_item(item_id: str, text: str, status: str, logprobs: Sequence[TokenLogprob] = ()) -> JSON:
    """A message item."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprob_list(logprobs)}
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> JSON:
    """A function call item."""
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def spoken(tokens: Sequence[TokenLogprob], text: str, before: str = "") -> slice:
    """The slice of tokens that wrote `text`, which followed `before`; all of them where the text was cut within a
    character."""
    written = "".join(one.text for one in tokens)
    start = written.find(text, max(written.find(before), 0) + len(before))
    if start < 0:
        return slice(0, len(tokens))
    ends = list(accumulate(len(one.text) for one in tokens))
    last = bisect_left(ends, start + len(text)) + 1 if text else 0
    return slice(bisect_right(ends, start), last)


class AssistantTurn:
    """Consecutive items of the assistant, put together to one message as far as they belong to one completion."""

    def __init__(self) -> None:
        self.message: JSON = {"role": "assistant", "content": None}
        self._origin = ""

    def takes(self, item: JSON) -> bool:
        """True where `item` belongs to the same response: by its id, else by the order of items in a response."""
        origin = _origin(item)
        if self._origin and origin:
            return origin == self._origin
        if "tool_calls" in self.message:
            return item.get("type") == "function_call"
        if self.message["content"] is not None:
            return item.get("type") == "function_call"
        return "reasoning_content" not in self.message or item.get("type") != "reasoning"

    def add(self, item: JSON) -> None:
        """Take in an item whose shape has been checked."""
        self._origin = self._origin or _origin(item)
        kind = item.get("type")
        if kind == "reasoning":
            text = reasoning_text(item)
            if text:
                self.message["reasoning_content"] = self.message.get("reasoning_content", "") + text
        elif kind == "function_call":
            function = {"name": str(item.get("name") or ""), "arguments": str(item.get("arguments") or "")}
            call = {"id": str(item.get("call_id") or ""), "type": "function", "function": function}
            self.message.setdefault("tool_calls", []).append(call)
        else:
            content = plain(item.get("content"))
            before = self.message["content"]
            joined = isinstance(before, str) and isinstance(content, str)
            self.message["content"] = before + content if joined else content


def reasoning_text(item: JSON) -> str:
    """The reasoning that an item holds: its content, what is sealed in it, or its summary."""
    said = plain(item.get("content") or "")
    if isinstance(said, str) and said:
        return said
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(SEALED):
        return _opened(sealed)
    summary = plain(item.get("summary") or "")
    return summary if isinstance(summary, str) else ""


def _opened(sealed: str) -> str:
    """The text in an encrypted_content of ours; empty where it was changed."""
    try:
        return base64.b64decode(sealed[len(SEALED) :], validate=True).decode()
    except ValueError:
        return ""


def plain(content: Any) -> Any:
    """Text parts as one text; other content as it is."""
    if not isinstance(content, list) or not all(is_text(part) for part in content):
        return content
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def is_text(part: Any) -> bool:
    """True where a content part is text."""
    if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
        return False
    return isinstance(part.get("refusal" if part["type"] == "refusal" else "text"), str)


def _origin(item: JSON) -> str:
    """The call behind an item's id; empty where it has none of ours. Other servers give each item an id of its own."""
    found = OUR_ID.match(str(item.get("id") or ""))
    return "" if found is None else found[1]


class ResponseReader(CompletionReader):
    """An external model's response, whole or event by event. Unknown fields are passed over."""

    def whole(self, body: JSON) -> None:
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
        self.read_usage(body, "input_tokens", "output_tokens")

    def event(self, data: JSON) -> None:
        """Take in the data of one event of a stream; the last one has everything."""
        kind, item = data.get("type"), data.get("item")
        if kind in ("response.completed", "response.incomplete") and isinstance(data.get("response"), dict):
            self.whole(data["response"])
        elif kind == "response.output_text.delta":
            self.add_text("content", data.get("delta"))
        elif kind == "response.reasoning_text.delta":
            self.add_text("reasoning_content", data.get("delta"))
        elif kind == "response.output_item.done" and isinstance(item, dict) and item.get("type") == "function_call":
            turn = AssistantTurn()
            turn.add(item)
            self.message.setdefault("tool_calls", []).extend(turn.message["tool_calls"])
