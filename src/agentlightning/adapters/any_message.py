"""A message as some framework wrote it, in the form of Chat Completions. Pure.

Traces hold messages as each framework serialises them: Chat Completions, parts of the GenAI conventions, blocks of
Anthropic and LlamaIndex, constructors and generations of LangChain, content of the Vercel AI SDK, lists of tool calls
of any-agent. What is not recognised is no message (None): nothing is made up, and nothing raises.
"""

from __future__ import annotations

from typing import Any

from agentlightning.adapters.semantics import plain_result, written
from agentlightning.records import JSON

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "humanmessage": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "chatbot": "assistant",
    "aimessage": "assistant",
    "systemmessage": "system",
    "toolmessage": "tool",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "tool-call": "assistant",
    "tool-response": "tool",
}
"""Ours by theirs, in lower case."""

CALL_PARTS = ("tool_call", "tool_use", "tool-call", "function_call")
RESULT_PARTS = ("tool_call_response", "tool_result", "tool-result", "function_call_output")
REASONING_PARTS = ("reasoning", "thinking")
TEXT_PARTS = ("text", "input_text", "output_text")


def messages_of(value: Any) -> list[JSON] | None:
    """A conversation; None where any of it is no message, so that half of one never counts as whole.

    >>> messages_of([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}])
    [{'role': 'user', 'content': 'hi'}]
    """
    if isinstance(value, dict):
        inner = value.get("messages")
        return messages_of(inner) if isinstance(inner, list) else None
    if not isinstance(value, list) or not value:
        return None
    if len(value) == 1 and isinstance(value[0], list):  # LangChain: a batch of one
        return messages_of(value[0])
    found: list[JSON] = []
    for one in value:
        read = message_of(one)
        if not read:
            return None
        found += read
    return found


def message_of(value: Any) -> list[JSON]:
    """The messages that one entry means: mostly one, several where it holds results of several tools; none where it is
    no message."""
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("kwargs"), dict) and ("lc" in value or value.get("type") == "constructor"):
        inner: JSON = value["kwargs"]
        kind = value["id"][-1] if isinstance(value.get("id"), list) and value["id"] else inner.get("type")
        return message_of({**inner, "role": inner.get("role") or str(kind or "").removesuffix("Chunk")})
    said = value.get("role") or (value.get("type") if "content" in value or "data" in value else None)
    if isinstance(value.get("data"), dict):  # LangChain's message_to_dict
        return message_of({**value["data"], "role": said})
    role = ROLES.get(said.lower()) if isinstance(said, str) else None
    if role is None:
        return []
    read = _Reading(role)
    read.content(value.get("parts", value.get("blocks", value.get("content"))))
    extra = value.get("additional_kwargs")
    for calls in (value.get("tool_calls"), extra.get("tool_calls") if isinstance(extra, dict) else None):
        if isinstance(calls, list) and not read.calls:
            read.calls += [call for one in calls if (call := tool_call(one)) is not None]
    reasoning = value.get("reasoning_content") or value.get("reasoning")
    if isinstance(reasoning, str):
        read.reasoning.append(reasoning)
    return read.messages(value)


def assistant_of(value: Any) -> JSON | None:
    """The completion of a model call, whatever the framework put around it; None where there is none.

    >>> assistant_of([{"tool.name": "add", "tool.args": {"a": 1}}])["tool_calls"][0]["function"]
    {'name': 'add', 'arguments': '{"a":1}'}
    """
    if isinstance(value, list):
        calls = [tool_call(one) for one in value]
        if calls and all(calls):
            return {"role": "assistant", "content": None, "tool_calls": calls}
        return assistant_of(value[0]) if len(value) == 1 else None
    if not isinstance(value, dict):
        return None
    for key in ("generations", "choices", "messages"):
        if isinstance(value.get(key), list):
            return assistant_of(value[key])
    if isinstance(value.get("message"), dict):
        return assistant_of(value["message"])
    read = message_of(value)
    if len(read) == 1 and read[0]["role"] == "assistant":
        return read[0]
    return None


def tool_call(value: Any) -> JSON | None:
    """A tool call as completions hold it; '' for an id that nobody recorded. None where it is none."""
    if not isinstance(value, dict):
        return None
    inner = value.get("tool_call")
    if isinstance(inner, dict):
        value = inner
    function = value.get("function")
    table: JSON = function if isinstance(function, dict) else value
    name = _first(table, "name", "tool.name", "toolName", "tool_name")
    arguments = _first(table, "arguments", "tool.args", "args", "input", "arguments_json")
    identity = _first(value, "id", "call_id", "toolCallId", "tool_call_id")
    if not isinstance(name, str) or not name or (arguments is None and "arguments" not in table and identity is None):
        return None
    return {
        "id": identity if isinstance(identity, str) else "",
        "type": "function",
        "function": {"name": name, "arguments": arguments_of(arguments)},
    }


def arguments_of(value: Any) -> str:
    """Arguments as the text that a model writes.

    >>> arguments_of({"a": 1}), arguments_of('{"a": 1}'), arguments_of(None)
    ('{"a":1}', '{"a": 1}', '{}')
    """
    if value is None:
        return "{}"
    text = written(value)
    return str(value) if text is None else text


def tool_definitions(value: Any) -> list[JSON] | None:
    """Tools in the form of Chat Completions; None where there are none, or one of them is none."""
    if not isinstance(value, list) or not value:
        return None
    found = []
    for one in value:
        inner = one.get("function", one) if isinstance(one, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            return None
        schema = _first(inner, "parameters", "input_schema", "inputSchema", "parametersJsonSchema")
        function: JSON = {"name": inner["name"], "parameters": schema if isinstance(schema, dict) else {}}
        if isinstance(inner.get("description"), str):
            function["description"] = inner["description"]
        found.append({"type": "function", "function": function})
    return found


class _Reading:
    """The content of one message, part by part."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.texts: list[str] = []
        self.others: list[JSON] = []
        self.reasoning: list[str] = []
        self.calls: list[JSON] = []
        self.results: list[JSON] = []

    def content(self, content: Any) -> None:
        if isinstance(content, str):
            self.texts.append(content)
        for part in content if isinstance(content, list) else ():
            if isinstance(part, str):
                self.texts.append(part)
            elif isinstance(part, dict):
                self._part(part)

    def messages(self, value: JSON) -> list[JSON]:
        """The messages read: results of tools as messages of their own, before the text beside them."""
        content: str | list[JSON] | None = "".join(self.texts)
        if self.others:
            content = [*([{"type": "text", "text": content}] if content else []), *self.others]
        message: JSON = {"role": self.role, "content": content}
        if self.role == "tool":
            if self.results:
                return self.results
            identity = _first(value, "tool_call_id", "toolCallId", "id")
            return [{**message, "tool_call_id": identity if isinstance(identity, str) else ""}]
        if self.role == "assistant":
            if self.calls:
                message |= {"content": content or None, "tool_calls": self.calls}
            if self.reasoning:
                message["reasoning_content"] = "".join(self.reasoning)
        if self.results and not content:
            return self.results
        return [*self.results, message]

    def _part(self, part: JSON) -> None:
        kind = part.get("type") or part.get("block_type")
        text = _first(part, "text", "content", "thinking", "reasoning")
        if kind in REASONING_PARTS:
            self.reasoning.append(text if isinstance(text, str) else "")
        elif kind in CALL_PARTS:
            call = tool_call(part)
            self.calls += [call] if call is not None else []
        elif kind in RESULT_PARTS:
            identity = _first(part, "id", "tool_use_id", "toolCallId", "call_id")
            result = _first(part, "response", "result", "content", "output")
            self.results.append(
                {
                    "role": "tool",
                    "content": _result_text(result),
                    "tool_call_id": identity if isinstance(identity, str) else "",
                }
            )
        elif (kind in TEXT_PARTS or kind is None) and isinstance(text, str):
            self.texts.append(text)
        else:
            self.others.append(part)


def _result_text(result: Any) -> str:
    if isinstance(result, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in result
    ):
        return "".join(part["text"] for part in result)
    if isinstance(result, dict) and result.keys() == {"type", "value"}:  # the Vercel AI SDK
        result = result["value"]
    return plain_result(result) or ""


def _first(table: JSON, *names: str) -> Any:
    return next((table[name] for name in names if table.get(name) is not None), None)
