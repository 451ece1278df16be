"""One form for every message, so that equal ones are equal: for hashes, and for chat templates.

Agents and their frameworks send a message back with cosmetic changes: content None, "" or missing, a string or a list of
text parts, arguments re-serialised, fields added. `normal` removes what means nothing; `digest` hashes what is left. Pure.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import orjson

from agentlightning.types import JSON

Digest = bytes

DIGEST_BYTES = 16


def normal(message: JSON) -> JSON:
    """The message with text content, parsed arguments and no empty fields, as chat templates want it.

    >>> normal({"role": "assistant", "content": None, "refusal": None, "tool_calls": []})
    {'role': 'assistant', 'content': ''}
    """
    role = message["role"]
    result: JSON = {"role": "system" if role == "developer" else role, "content": _text(message.get("content"))}
    if reasoning := message.get("reasoning_content"):
        result["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [_tool_call(call) for call in calls]
    if call_id := message.get("tool_call_id"):
        result["tool_call_id"] = call_id
    if name := message.get("name"):
        result["name"] = name
    return result


def digest(message: JSON) -> Digest:
    """Hash of a normal message: role, content, reasoning, tool calls by name and arguments, and the tool call answered.

    Names, the ids of tool calls and space around an answer do not count: where a template renders them differently, the
    check of the prefix notices.
    """
    role, content = message["role"], message["content"]
    form: tuple[Any, ...] = (role, content.strip() if role == "assistant" else content)
    calls = message.get("tool_calls")
    reasoning = message.get("reasoning_content")
    answered = message.get("tool_call_id")
    if calls or reasoning or answered:
        named = calls and [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        form = (*form, named, reasoning, answered)
    return blake2b(orjson.dumps(form, option=orjson.OPT_SORT_KEYS), digest_size=DIGEST_BYTES).digest()


def chain(root: Digest, digests: list[Digest]) -> list[Digest]:
    """Running hashes: entry i covers the root and the first i digests, so entry 0 is the root."""
    result = [root]
    for one in digests:
        result.append(link(result[-1], one))
    return result


def link(before: Digest, one: Digest) -> Digest:
    """The hash of a history and one more message."""
    return blake2b(before + one, digest_size=DIGEST_BYTES).digest()


def root(tools: list[JSON] | None) -> Digest:
    """The hash of an empty history: of the tools alone."""
    return blake2b(orjson.dumps(tools) if tools else b"", digest_size=DIGEST_BYTES).digest()


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or part.get("refusal") or "" for part in content or ())


def _tool_call(call: JSON) -> JSON:
    function = call["function"]
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": _arguments(function["arguments"])},
    }


def _arguments(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    return value if isinstance(value, dict) else text
