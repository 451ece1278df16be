"""The parts of an Anthropic message, shared by whole answers (messages.py) and streamed ones (message_events.py). Pure."""

from __future__ import annotations

from typing import Any

import orjson

from agentlightning.protocols.neutral import Choice
from agentlightning.types import JSON

RAW = "_arguments"
"""The only key of an input that stands for arguments which are no JSON object."""

STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def blocks(choice: Choice, call_id: str) -> list[JSON]:
    """The content of an answer: thinking, text, tool calls."""
    result: list[JSON] = []
    if choice.reasoning:
        result.append({"type": "thinking", "thinking": choice.reasoning, "signature": signature(call_id)})
    if choice.content:
        result.append({"type": "text", "text": choice.content})
    for call in choice.tool_calls:
        result.append({"type": "tool_use", "id": call.id, "name": call.name, "input": tool_input(call.arguments)})
    return result


def tool_input(arguments: str) -> JSON:
    """Arguments as an object; `arguments_text` undoes it.

    >>> tool_input('{"a": 1}'), tool_input('{"a": 1')
    ({'a': 1}, {'_arguments': '{"a": 1'})
    """
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {RAW: arguments}
    return value if isinstance(value, dict) and RAW not in value else {RAW: arguments}


def arguments_text(given: JSON) -> str:
    """The arguments behind an input."""
    raw: Any = given.get(RAW)
    if len(given) == 1 and isinstance(raw, str):
        return raw
    return orjson.dumps(given).decode()


def signature(call_id: str) -> str:
    """What stands for Anthropic's seal on a thinking block: the recorded call."""
    return call_id


def stop_reason(choice: Choice) -> str:
    """Why an answer ended."""
    if choice.stop is not None and not choice.tool_calls:
        return "stop_sequence"
    return STOP_REASONS.get(choice.finish_reason, "end_turn")


def usage(prompt_tokens: int, sampled_tokens: int, cached_tokens: int) -> JSON:
    """The token counts; those that continue an earlier call are counted as read from a cache."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "output_tokens": sampled_tokens,
        "cache_read_input_tokens": cached_tokens,
        "cache_creation_input_tokens": 0,
    }
