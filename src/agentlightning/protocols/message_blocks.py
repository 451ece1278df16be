"""The parts of an Anthropic message, shared by whole answers (messages.py) and streamed ones (message_events.py). Pure."""

from __future__ import annotations

from typing import Any

import orjson

from agentlightning.protocols.base import Choice
from agentlightning.types import JSON

RAW = "_arguments"
"""The key of an input that holds arguments which are no JSON object, as they were sampled."""

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

    >>> tool_input('{"a": 1}'), tool_input('{"a": 1, "b')
    ({'a': 1}, {'a': 1, '_arguments': '{"a": 1, "b'})
    """
    written = InputText()
    value: JSON = orjson.loads(written.feed(arguments) + written.end())
    return value


def arguments_text(given: JSON) -> str:
    """The arguments behind an input: those under `RAW` where `tool_input` made it of them."""
    raw: Any = given.get(RAW)
    ours = isinstance(raw, str) and tool_input(raw) == given
    return str(raw) if ours else orjson.dumps(given).decode()


class InputText:
    """Arguments as they are sampled, given out so that all of it together is an object whatever is sampled.

    SDKs parse an input while it comes, and raise where it is no JSON. So a member goes out once it is whole, as Anthropic's
    own models do; where the text stops being an object, the members so far are closed with the text under `RAW`.
    """

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._member = ""
        """Text since the last complete member; it begins with a brace or a comma."""
        self._read = 0
        """Characters of it that have been scanned."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._broken = False
        self._given = False

    def feed(self, text: str) -> str:
        """The members that `text` completes."""
        self._raw.append(text)
        if self._broken:
            return ""
        self._member += text
        out: list[str] = []
        while self._read < len(self._member):
            char = self._member[self._read]
            if self._is_end_of_member(char):
                member, self._member, self._read = self._member[: self._read], self._member[self._read :], 0
                if not _members(member + "}", first=not self._given):
                    self._broken = True
                    break
                self._given = True
                out.append(member)
            self._read += 1
        return "".join(out)

    def end(self) -> str:
        """The text that completes the object."""
        rest = None if self._broken else _members(self._member, first=not self._given)
        if rest is not None and (rest or not self._given):
            return self._member
        return (", " if self._given else "{") + orjson.dumps({RAW: "".join(self._raw)}).decode()[1:]

    def _is_end_of_member(self, char: str) -> bool:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        return char == "," and self._depth == 1 and not self._in_string and self._read > 0


def _members(text: str, first: bool) -> JSON | None:
    """The members at the end of an object, from its brace or a comma on; None where that is no JSON, or could be taken for
    ours."""
    text = text.lstrip() if first else text
    if not text.startswith("{" if first else ","):
        return None
    try:
        value: JSON = orjson.loads("{" + text[1:])
    except orjson.JSONDecodeError:
        return None
    return None if RAW in value else value


def signature(call_id: str) -> str:
    """The signature of a thinking block: the id of the recorded call."""
    return call_id


def stop_reason(choice: Choice) -> str:
    """The protocol's stop reason of a choice."""
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
