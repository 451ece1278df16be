"""The messages, the completion and the tools of a model call's span, by each convention that records them. Pure.

Where several of them are on a span, the first in `PROMPTS` and `COMPLETIONS` that can be read counts. Nothing raises;
what cannot be read is not recorded (None).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from agentlightning.adapters.any_message import assistant_of, message_of, messages_of, tool_definitions
from agentlightning.adapters.semantics import json_of, read_json, text_of
from agentlightning.records import JSON, Span

LAST_INDEX = 10_000
"""Flattened lists are read up to this index: ``llm.input_messages.99999999.…`` must not cost memory."""

FINISHED = {
    "tool_call": "tool_calls",
    "tool_use": "tool_calls",
    "tool-calls": "tool_calls",
    "function_call": "tool_calls",
    "tool_calls": "tool_calls",
    "max_tokens": "length",
    "length": "length",
    "max_output_tokens": "length",
}
"""Ours by the reasons of others; any other means stop."""


def prompt_of(span: Span) -> list[JSON] | None:
    """The messages that the model read, in the form of Chat Completions; None where they were not recorded."""
    return next((found for read in PROMPTS if (found := read(span)) is not None), None)


def completion_of(span: Span) -> JSON | None:
    """The assistant message that the model gave; None where it was not recorded.

    Of two conventions that tell of the same tool calls, one may lack their arguments: then the other counts.
    """
    best: JSON | None = None
    for read in COMPLETIONS:
        found = read(span)
        if found is not None and (best is None or _tells_more(found, best)):
            best = found
    return best


def tools_of(span: Span) -> list[JSON] | None:
    """The tools that the model could call; None where they were not recorded."""
    own = span.attributes
    for key in ("gen_ai.tool.definitions", "ai.prompt.tools", "llm.request.functions"):
        listed = json_of(own, key)
        if isinstance(listed, list):
            return tool_definitions([read_json(one) for one in listed])
    flat = flattened(own, "llm.tools.")
    if flat:
        return tool_definitions([json_of(one, "tool.json_schema") for one in flat])
    flat = flattened(own, "llm.request.functions.")
    if flat:
        return tool_definitions([{**one, "parameters": json_of(one, "parameters")} for one in flat])
    settings = json_of(own, "llm.invocation_parameters")
    return tool_definitions(settings.get("tools")) if isinstance(settings, dict) else None


def finish_reason_of(span: Span, completion: JSON | None) -> str:
    """stop, length or tool_calls."""
    own = span.attributes
    said = json_of(own, "gen_ai.response.finish_reasons")
    reason = said[0] if isinstance(said, list) and said else said
    reason = reason or own.get("ai.response.finishReason") or own.get("gen_ai.completion.0.finish_reason")
    if isinstance(reason, str):
        return FINISHED.get(reason.lower(), "stop")
    return "tool_calls" if completion is not None and completion.get("tool_calls") else "stop"


def flattened(own: Mapping[str, Any], prefix: str) -> list[JSON]:
    """The tables of a list whose entries are attributes, in order; an index that is missing is left out.

    >>> flattened({"m.0.role": "user", "m.1.role": "tool", "m.x.role": "?"}, "m.")
    [{'role': 'user'}, {'role': 'tool'}]
    """
    found: defaultdict[int, JSON] = defaultdict(dict)
    for key, value in own.items():
        if not key.startswith(prefix):
            continue
        index, dot, rest = key[len(prefix) :].partition(".")
        if dot and rest and re.fullmatch(r"\d{1,5}", index, re.ASCII) and int(index) <= LAST_INDEX:
            found[int(index)][rest] = value
    return [found[index] for index in sorted(found)]


# --- GenAI semantic conventions, and any-agent's -------------------------------------------------------------------


def _gen_ai_prompt(span: Span) -> list[JSON] | None:
    for table in _details(span):
        found = messages_of(json_of(table, "gen_ai.input.messages"))
        if found is not None:
            parts = json_of(table, "gen_ai.system_instructions")
            system = message_of({"role": "system", "parts": parts}) if isinstance(parts, list) and parts else []
            return [*system, *found]
    return None


def _gen_ai_completion(span: Span) -> JSON | None:
    for table in _details(span):
        found = assistant_of(json_of(table, "gen_ai.output.messages"))
        if found is not None:
            return found
    return None


def _any_agent_completion(span: Span) -> JSON | None:
    """A text, or JSON in a text: tool calls in one of several shapes, a framework's own object, or the completion
    itself."""
    for key in ("gen_ai.output", "genai.output"):
        said = text_of(span.attributes, key)
        if said is not None:
            read = read_json(said)
            found = assistant_of(read)
            return found or {"role": "assistant", "content": read if isinstance(read, str) else said}
    return None


def _event_prompt(span: Span) -> list[JSON] | None:
    """``gen_ai.user.message`` and its like, as events of the span or, with pydantic-ai and older SDKs, as one
    attribute."""
    found = [
        message for name, table in _events(span) if name != "gen_ai.choice" for message in _event_message(name, table)
    ]
    return found or messages_of(_first_event(span, "gen_ai.content.prompt", "gen_ai.prompt"))


def _event_completion(span: Span) -> JSON | None:
    for name, table in _events(span):
        if name == "gen_ai.choice":
            inner = json_of(table, "message")
            inner = inner if isinstance(inner, dict) else table
            return assistant_of({**inner, "role": "assistant", "tool_calls": json_of(inner, "tool_calls")})
    return assistant_of(_first_event(span, "gen_ai.content.completion", "gen_ai.completion"))


def _event_message(name: str, table: JSON) -> list[JSON]:
    role = name.removeprefix("gen_ai.").removesuffix(".message")
    content = table.get("content")
    return message_of({**table, "role": role, "content": content, "tool_calls": json_of(table, "tool_calls")})


def _events(span: Span) -> list[tuple[str, JSON]]:
    found = [(event.get("name"), event.get("attributes")) for event in span.events]
    listed = json_of(span.attributes, "events")
    if isinstance(listed, list):
        found += [(one.get("event.name"), one) for one in listed if isinstance(one, dict)]
    return [
        (name, table)
        for name, table in found
        if isinstance(name, str) and isinstance(table, dict) and re.fullmatch(r"gen_ai\.(\w+\.message|choice)", name)
    ]


def _first_event(span: Span, name: str, key: str) -> Any:
    tables = (event.get("attributes") for event in span.events if event.get("name") == name)
    return next((json_of(table, key) for table in tables if isinstance(table, dict)), None)


def _details(span: Span) -> list[Mapping[str, Any]]:
    """The attributes that hold messages under current conventions: the span's, or those of an event of it."""
    events = (event.get("attributes") for event in span.events if event.get("name") == DETAILS)
    return [span.attributes, *(table for table in events if isinstance(table, dict))]


DETAILS = "gen_ai.client.inference.operation.details"


# --- lists that are flattened into attributes: OpenInference; OpenLLMetry (traceloop) and LangSmith ---------------


def _flat_prompt(prefix: str, message: Callable[[JSON], JSON]) -> Callable[[Span], list[JSON] | None]:
    def read(span: Span) -> list[JSON] | None:
        return messages_of([message(one) for one in flattened(span.attributes, prefix)])

    return read


def _flat_completion(prefix: str, message: Callable[[JSON], JSON]) -> Callable[[Span], JSON | None]:
    def read(span: Span) -> JSON | None:
        listed = flattened(span.attributes, prefix)
        return assistant_of({**message(listed[0]), "role": "assistant"}) if listed else None

    return read


def _openinference_message(own: JSON) -> JSON:
    parts = [_openinference_part(one) for one in flattened(own, "message.contents.")]
    calls = [
        {
            "id": one.get("tool_call.id"),
            "name": one.get("tool_call.function.name"),
            "arguments": one.get("tool_call.function.arguments"),
        }
        for one in flattened(own, "message.tool_calls.")
    ]
    message = {"role": own.get("message.role"), "content": own.get("message.content", parts or None)}
    message |= {"tool_calls": calls} if calls else {}
    return message | {"tool_call_id": own.get("message.tool_call_id")}


def _openinference_part(one: JSON) -> JSON:
    kind = one.get("message_content.type")
    if kind == "text":
        return {"type": "text", "text": one.get("message_content.text")}
    url = one.get("message_content.image.image.url")
    return {"type": "image_url", "image_url": {"url": url}} if isinstance(url, str) else {"type": str(kind)}


def _value_prompt(span: Span) -> list[JSON] | None:
    """The whole request under input.value, as it was passed: messages, a table of them, or a function's arguments."""
    read = json_of(span.attributes, "input.value")
    if isinstance(read, dict) and isinstance(read.get("args"), list) and read["args"]:
        return messages_of(read["args"][0])
    if isinstance(read, dict) and isinstance(read.get("kwargs"), dict):
        read = read["kwargs"]
    return messages_of(read)


def _traceloop_message(own: JSON) -> JSON:
    content = own.get("content")
    parts = read_json(content) if isinstance(content, str) and content.startswith("[{") else None
    if isinstance(parts, list) and all(isinstance(part, dict) and "type" in part for part in parts):
        content = parts
    calls = flattened(own, "tool_calls.")
    message = {"role": own.get("role"), "content": content, "tool_call_id": own.get("tool_call_id")}
    return message | ({"tool_calls": calls} if calls else {})


def _vercel_completion(span: Span) -> JSON | None:
    text = text_of(span.attributes, "ai.response.text")
    calls = json_of(span.attributes, "ai.response.toolCalls")
    if text is None and not isinstance(calls, list):
        return None
    return assistant_of({"role": "assistant", "content": text, "tool_calls": calls})


def _tells_more(other: JSON, best: JSON) -> bool:
    """True where another convention's reading of a completion has parts that the first one lacks."""
    calls = best.get("tool_calls") or []
    if not calls:
        return not best.get("content") and bool(other.get("tool_calls") or other.get("content"))
    lacks = any(call["function"]["arguments"] in ("", "{}") for call in calls)
    names = [[call["function"]["name"] for call in listed] for listed in (calls, other.get("tool_calls") or [])]
    return lacks and names[0] == names[1]


PROMPTS: tuple[Callable[[Span], list[JSON] | None], ...] = (
    _gen_ai_prompt,
    _flat_prompt("llm.input_messages.", _openinference_message),
    _flat_prompt("gen_ai.prompt.", _traceloop_message),
    lambda span: messages_of(json_of(span.attributes, "ai.prompt.messages")),
    _event_prompt,
    _value_prompt,
)
COMPLETIONS: tuple[Callable[[Span], JSON | None], ...] = (
    _gen_ai_completion,
    _flat_completion("llm.output_messages.", _openinference_message),
    _flat_completion("gen_ai.completion.", _traceloop_message),
    _vercel_completion,
    _event_completion,
    _any_agent_completion,
    lambda span: assistant_of(json_of(span.attributes, "output.value")),
)
