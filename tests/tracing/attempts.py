"""Attempts as the gateway would record them: calls whose conversation continues, tools' replies, and tools' spans."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

import build
from agentlightning.records import JSON, Call, Span

SECOND = 10**9
WEATHER: JSON = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Conversation:
    """Calls of one attempt, in order; each lasts a second and begins two seconds after the one before."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def call(
        self,
        *messages: JSON,
        text: str | None = None,
        asks: list[tuple[str, str, str]] | None = None,
        parent: str | None = "last",
        **fields: Any,
    ) -> str:
        """Record a call and return its id. `asks`: id, name and arguments of each tool call of its answer."""
        number = len(self.calls)
        above = (self.calls[-1].id if self.calls else None) if parent == "last" else parent
        answer: JSON = {"role": "assistant", "content": text}
        if asks:
            answer["tool_calls"] = [
                {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
                for one, name, arguments in asks
            ]
        asked = orjson.dumps([number if above is None else above, messages])
        known: dict[str, Any] = {
            "id": f"call-{number}",
            "tools": [WEATHER] if above is None else None,
            "sampled_ids": [7, 8],
            "request_hash": hashlib.sha256(asked).hexdigest(),
            "started_ns": (3 * number + 1) * SECOND,
            "finished_ns": (3 * number + 2) * SECOND,
        }
        record = {"suffix_ids": [1], "model": "policy", "versions": [], "history_hash": "", **known, **fields}
        self.calls.append(build.call(parent_id=above, messages=list(messages), completion=answer, **record))
        return self.calls[-1].id


def user(text: str) -> JSON:
    return {"role": "user", "content": text}


def tool(call_id: str, text: str, **fields: Any) -> JSON:
    return {"role": "tool", "tool_call_id": call_id, "content": text, **fields}


def tool_span(name: str, at_s: float, *, number: int = 0, failed: bool = False, **fields: Any) -> Span:
    """A tool's span in the words of the GenAI conventions, half a second long."""
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name}
    for key in ("id", "arguments", "result"):
        if f"call_{key}" in fields:
            attributes[f"gen_ai.tool.call.{key}"] = fields.pop(f"call_{key}")
    times = {"started_ns": int(at_s * SECOND), "finished_ns": int((at_s + 0.5) * SECOND)}
    given = {"attributes": attributes, "status": "error" if failed else "ok", **times, **fields}
    return build.span(name=f"execute_tool {name}", id=f"rollout.1.{number:016x}", **given)
