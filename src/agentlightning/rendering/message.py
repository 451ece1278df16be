"""One form for every message, so that equal ones are equal: for hashes, and for chat templates.

Agents and their frameworks send a message back with cosmetic changes: content None, "" or missing, a string or a list of
text parts, arguments re-serialised, fields added. `normal` removes what means nothing; `digest` hashes what is left. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
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
        reasoning = reasoning and reasoning.strip()
        named = calls and [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        form = (*form, named, reasoning, answered)
    return _hash(orjson.dumps(form, option=orjson.OPT_SORT_KEYS))


def verbatim(message: JSON) -> Digest:
    """Hash of a message that only an external model need understand: images, items without a role, whatever else there is.

    What `normal` understands whole hashes like `digest`, so that cosmetic changes do not count; the rest as it stands.
    """
    return digest(normal(message)) if _plain(message) else _hash(orjson.dumps(message, option=orjson.OPT_SORT_KEYS))


def letters(messages: list[JSON]) -> str:
    """First letters of the roles; developers are systems, and what has no role is an x."""
    return "".join(
        "s" if message.get("role") == "developer" else str(message.get("role") or "x")[0] for message in messages
    )


def answer_digests(answer: JSON, of: Callable[[JSON], Digest]) -> tuple[Digest, ...]:
    """Digests of the completion and, if it has reasoning, of it without that, which is how most agents send it back."""
    bare = {key: value for key, value in answer.items() if key != "reasoning_content"}
    return (of(answer),) if len(bare) == len(answer) else (of(answer), of(bare))


def chain(root: Digest, digests: list[Digest]) -> list[Digest]:
    """Running hashes: entry i covers the root and the first i digests, so entry 0 is the root."""
    result = [root]
    for one in digests:
        result.append(link(result[-1], one))
    return result


def link(before: Digest, one: Digest) -> Digest:
    """The hash of a history and one more message."""
    return _hash(before + one)


def root(tools: list[JSON] | None) -> Digest:
    """The hash of an empty history: of the tools alone."""
    return _hash(orjson.dumps(tools) if tools else b"")


def fingerprint(text: str) -> Digest:
    """Hash of a text."""
    return _hash(text.encode())


def _hash(data: bytes) -> Digest:
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def _plain(message: JSON) -> bool:
    """True where `normal` keeps all that the message says."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    calls = message.get("tool_calls") or ()
    return (
        message.get("role") in ("system", "developer", "user", "assistant", "tool")
        and (content is None or isinstance(content, str | list))
        and all(isinstance(part, dict) and part.get("type") in ("text", "refusal") for part in parts)
        and all(isinstance(part.get("text") or part.get("refusal") or "", str) for part in parts)
        and isinstance(message.get("reasoning_content") or "", str)
        and isinstance(calls, list | tuple)
        and all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls)
        and all({"name", "arguments"} <= call["function"].keys() for call in calls)
    )


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
