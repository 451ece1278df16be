"""Model calls read from spans that follow the GenAI semantic conventions of OpenTelemetry. Pure.

Nothing here raises: spans are somebody else's data, and what cannot be read counts as not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentlightning.adapters.semantics import error_of, json_of, model_of, plain_result, role_of, usage_of, written
from agentlightning.adapters.span_tree import SpanTree
from agentlightning.records import JSON, Span

DETAILS = "gen_ai.client.inference.operation.details"
"""The event that holds the messages where the span's own attributes do not."""
FINISHED = {"tool_call": "tool_calls", "tool_calls": "tool_calls", "length": "length", "max_tokens": "length"}
"""Finish reasons of Chat Completions by the recorded one; any other means stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One model call, as far as somebody recorded it."""

    span_id: str = ""
    agent: str | None = None
    model: str = ""
    messages: list[JSON] | None = None
    """The whole prompt in the form of Chat Completions."""
    completion: JSON | None = None
    """The assistant message."""
    tools: list[JSON] | None = None
    finish_reason: str = "stop"
    usage: JSON = field(default_factory=dict)
    """prompt_tokens and sampled_tokens, those that are known."""
    error: str | None = None
    started_ns: int = 0
    finished_ns: int = 0

    @property
    def missing(self) -> str | None:
        """The reason why it cannot be trained on; None where it can."""
        if self.error is not None:
            return "the call failed"
        if not self.messages:
            return "its prompt was not recorded"
        if self.completion is None or not (self.completion.get("content") or self.completion.get("tool_calls")):
            return "its answer was not recorded"
        return None


def model_calls(tree: SpanTree) -> list[ModelCall]:
    """The model calls in order of time; a call that several layers of a framework recorded is the innermost span."""
    models = [span for span in tree.spans if role_of(span) == "model"]
    outer = {parent.id for span in models if (parent := tree.parent(span)) is not None}
    calls = [_model_call(span, tree.agent(span)) for span in models if span.id not in outer]
    return sorted(calls, key=lambda one: (one.started_ns, one.span_id))


def _model_call(span: Span, agent: str | None) -> ModelCall:
    events = [event.get("attributes") for event in span.events if event.get("name") == DETAILS]
    tables = [span.attributes, *(table for table in events if isinstance(table, dict))]
    prompt = _first(tables, "gen_ai.input.messages")
    answer = _first(tables, "gen_ai.output.messages")
    messages = chat_messages(prompt)
    system = _first(tables, "gen_ai.system_instructions")
    if messages is not None and isinstance(system, list) and system:
        messages = [*chat_message({"role": "system", "parts": system}), *messages]
    completion = chat_message(answer[0]) if isinstance(answer, list) and answer else []
    said = json_of(span.attributes, "gen_ai.response.finish_reasons")
    return ModelCall(
        span_id=span.id,
        agent=agent,
        model=model_of(span) or "",
        messages=messages,
        completion=completion[0] if len(completion) == 1 and completion[0]["role"] == "assistant" else None,
        tools=chat_tools(_first(tables, "gen_ai.tool.definitions")),
        finish_reason=FINISHED.get(str(said[0] if isinstance(said, list) and said else said), "stop"),
        usage=usage_of(span) or {},
        error=error_of(span),
        started_ns=span.started_ns,
        finished_ns=span.finished_ns,
    )


def _first(tables: Sequence[Mapping[str, Any]], key: str) -> Any:
    return next((found for table in tables if (found := json_of(table, key)) is not None), None)


def chat_messages(value: Any) -> list[JSON] | None:
    """A conversation as Chat Completions; None where any of it is no message: half of one never counts as whole.

    >>> chat_messages([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}])
    [{'role': 'user', 'content': 'hi'}]
    """
    if not isinstance(value, list) or not value:
        return None
    read = [chat_message(one) for one in value]
    return [message for entry in read for message in entry] if all(read) else None


def chat_message(value: Any) -> list[JSON]:
    """The messages of one entry: one, or several with results of several tools; none where it is no message."""
    role = value.get("role") if isinstance(value, dict) else None
    if role not in ("system", "developer", "user", "assistant", "tool"):
        return []
    if not isinstance(value.get("parts"), list):  # a message of Chat Completions already
        return [{name: one for name, one in value.items() if one is not None or name == "content"}]
    texts, reasoning, others = [], [], []
    calls: list[JSON] = []
    results: list[JSON] = []
    for part in value["parts"]:
        match part:
            case str(text) | {"type": "text", "content": str(text)}:
                texts.append(text)
            case {"type": "reasoning", "content": str(text)}:
                reasoning.append(text)
            case {"type": "tool_call", "name": str(name)}:
                function = {"name": name, "arguments": written(part.get("arguments")) or "{}"}
                calls.append({"id": str(part.get("id") or ""), "type": "function", "function": function})
            case {"type": "tool_call_response"}:
                told = plain_result(part.get("response", part.get("result"))) or ""
                results.append({"role": "tool", "content": told, "tool_call_id": str(part.get("id") or "")})
            case dict():
                others.append(part)
    content: Any = "".join(texts)
    if others:
        content = [*([{"type": "text", "text": content}] if content else []), *others]
    if results and not content:
        return results
    message: JSON = {"role": role, "content": content}
    if calls:
        message |= {"content": content or None, "tool_calls": calls}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    return [*results, message]


def chat_tools(value: Any) -> list[JSON] | None:
    """Tool definitions in the form of Chat Completions; None where there are none, or one of them is none."""
    if not isinstance(value, list) or not value:
        return None
    found = []
    for one in value:
        inner = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            return None
        kept = {name: inner[name] for name in ("name", "description", "parameters") if inner.get(name) is not None}
        found.append({"type": "function", "function": {"parameters": {}, **kept}})
    return found
