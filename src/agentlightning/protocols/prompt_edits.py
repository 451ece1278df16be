"""Edits of prompts by the gateway: what `context_management` of Anthropic Messages clears, and another system prompt. Pure.

A context edit is read by the Messages parser and driven by the gateway, which can count the tokens of a prompt. It replaces
old tool results by a placeholder, or takes old thinking out; it never removes a message. Requests come whole each time, so
the same conversation is always edited alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from agentlightning.protocols import fields
from agentlightning.records import JSON, REASONING_CLEARED

CLEAR_TOOL_USES = "clear_tool_uses_20250919"
CLEAR_THINKING = "clear_thinking_20251015"

CLEARED_RESULT = "[Old tool result cleared]"
"""Stands in the place of a tool result that an edit cleared."""

MAX_EDITS = 4
"""Edits of one request: each counts the tokens of the whole conversation. There are two kinds."""

TRIGGER_TOKENS = 100_000
"""Defaults of Anthropic's documentation."""
KEPT_TOOL_USES = 3
KEPT_THINKING_TURNS = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearToolUses:
    """Clears the results of old tool calls, and their arguments if told to."""

    trigger_tokens: int | None = TRIGGER_TOKENS
    """Clears where the prompt has more tokens than that; None where `trigger_uses` decides."""
    trigger_uses: int | None = None
    """Clears where the conversation has more tool calls than that."""
    keep: int = KEPT_TOOL_USES
    """Number of the latest tool calls that stay."""
    clear_at_least: int = 0
    """Clears nothing where fewer tokens would be saved."""
    exclude: frozenset[str] = frozenset()
    """Names of tools whose calls stay."""
    clear_inputs: bool | frozenset[str] = False
    """Clears arguments too: of all tools, or of those named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearThinking:
    """Takes the thinking out of all assistant turns but the latest."""

    keep: int | None = KEPT_THINKING_TURNS
    """Number of turns with thinking that keep it; None keeps all."""


ContextEdit = ClearToolUses | ClearThinking


def apply_edits(
    edits: Sequence[ContextEdit], messages: list[JSON], count: Callable[[list[JSON]], int]
) -> tuple[list[JSON], tuple[JSON, ...]]:
    """The messages after the edits, and what those did, as Anthropic reports it. `count` gives the tokens of a prompt."""
    applied: list[JSON] = []
    for edit in edits:
        if isinstance(edit, ClearToolUses):
            messages, report = _clear_tool_uses(edit, messages, count)
        else:
            messages, report = _clear_thinking(edit, messages, count)
        applied += [report] if report is not None else []
    return messages, tuple(applied)


# --- applying -----------------------------------------------------------------------------------------------------------

Edited = tuple[list[JSON], JSON | None]
"""The messages, and the report of what was cleared; None where nothing was."""


def _clear_tool_uses(edit: ClearToolUses, messages: list[JSON], count: Callable[[list[JSON]], int]) -> Edited:
    results = {message.get("tool_call_id"): at for at, message in enumerate(messages) if message["role"] == "tool"}
    uses = [
        (at, call)
        for at, message in enumerate(messages)
        for call in message.get("tool_calls") or ()
        if call.get("id") in results
    ]
    old = [
        (at, call) for at, call in uses[: max(0, len(uses) - edit.keep)] if call["function"]["name"] not in edit.exclude
    ]
    if not old or (edit.trigger_uses is not None and len(uses) <= edit.trigger_uses):
        return messages, None
    before = count(messages)
    if edit.trigger_tokens is not None and before <= edit.trigger_tokens:
        return messages, None
    cleared = list(messages)
    for at, call in old:
        place = results[call["id"]]
        cleared[place] = {**cleared[place], "content": CLEARED_RESULT}
        if edit.clear_inputs is True or (edit.clear_inputs and call["function"]["name"] in edit.clear_inputs):
            cleared[at] = _without_input(cleared[at], call["id"])
    saved = before - count(cleared)
    if saved <= 0 or saved < edit.clear_at_least:
        return messages, None
    return cleared, {"type": CLEAR_TOOL_USES, "cleared_tool_uses": len(old), "cleared_input_tokens": saved}


def _without_input(message: JSON, call_id: str) -> JSON:
    calls = [
        {**call, "function": {**call["function"], "arguments": "{}"}} if call.get("id") == call_id else call
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _clear_thinking(edit: ClearThinking, messages: list[JSON], count: Callable[[list[JSON]], int]) -> Edited:
    if edit.keep is None:
        return messages, None
    turns = _thinking_turns(messages)
    old = [at for turn in turns[: max(0, len(turns) - edit.keep)] for at in turn]
    if not old:
        return messages, None
    cleared = list(messages)
    for at in old:
        bare = {name: value for name, value in messages[at].items() if name != "reasoning_content"}
        cleared[at] = {**bare, REASONING_CLEARED: True}
    saved = count(messages) - count(cleared)
    if saved <= 0:  # a template that leaves old thinking out by itself
        return messages, None
    removed = max(0, len(turns) - edit.keep)
    return cleared, {"type": CLEAR_THINKING, "cleared_thinking_turns": removed, "cleared_input_tokens": saved}


def _thinking_turns(messages: list[JSON]) -> list[list[int]]:
    """Places of the messages with thinking, by assistant turn: tool calls and their results belong to one turn."""
    turns: list[list[int]] = []
    begins = True
    for at, message in enumerate(messages):
        if message["role"] in ("user", "system"):
            begins = True
        elif message.get("reasoning_content"):
            if begins:
                turns.append([])
            turns[-1].append(at)
            begins = False
    return turns


# --- reading ------------------------------------------------------------------------------------------------------------


class _Amount(Struct):
    type: Literal["input_tokens", "tool_uses"]
    value: Annotated[int, Meta(ge=0, le=fields.MAX_INTEGER)]


class _Uses(Struct):
    type: Annotated[Literal["tool_uses"], Meta(description="tool_uses")]
    value: Annotated[int, Meta(ge=0, le=fields.MAX_INTEGER)]


class _Tokens(Struct):
    type: Annotated[Literal["input_tokens"], Meta(description="input_tokens")]
    value: Annotated[int, Meta(ge=0, le=fields.MAX_INTEGER)]


class _Turns(Struct):
    type: Annotated[Literal["thinking_turns"], Meta(description="thinking_turns")]
    value: Annotated[int, Meta(ge=1, le=fields.MAX_INTEGER)]


Tool = Annotated[str, Meta(description="the name of a tool")]


class _ToolUsesEdit(Struct):
    trigger: _Amount | None = None
    keep: _Uses | None = None
    clear_at_least: _Tokens | None = None
    exclude_tools: list[Tool] | None = None
    clear_tool_inputs: bool | list[Tool] | None = None


class _ThinkingEdit(Struct):
    keep: _Turns | None = None


class _Edits(Struct):
    edits: list[JSON] | None = None


def parse_edits(given: JSON | None) -> tuple[tuple[ContextEdit, ...], JSON]:
    """The edits of a request's `context_management`, and those that the gateway does not know, by their path."""
    known: list[ContextEdit] = []
    unknown: JSON = {}
    edits = fields.read(_Edits, given or {}, "context_management").edits or []
    if len(edits) > MAX_EDITS:
        raise fields.expected(f"at most {MAX_EDITS} edits", len(edits), "context_management.edits")
    for index, edit in enumerate(edits):
        where = f"context_management.edits[{index}]"
        if edit.get("type") == CLEAR_TOOL_USES:
            known.append(_tool_uses(fields.read(_ToolUsesEdit, edit, where)))
        elif edit.get("type") == CLEAR_THINKING:
            known.append(_thinking(edit, where))
        else:
            unknown[where] = edit
    return tuple(known), unknown


def _tool_uses(edit: _ToolUsesEdit) -> ClearToolUses:
    trigger, inputs = edit.trigger, edit.clear_tool_inputs
    by_uses = trigger is not None and trigger.type == "tool_uses"
    tokens = TRIGGER_TOKENS if trigger is None else trigger.value
    return ClearToolUses(
        trigger_tokens=None if by_uses else tokens,
        trigger_uses=tokens if by_uses else None,
        keep=edit.keep.value if edit.keep else KEPT_TOOL_USES,
        clear_at_least=edit.clear_at_least.value if edit.clear_at_least else 0,
        exclude=frozenset(edit.exclude_tools or ()),
        clear_inputs=frozenset(inputs) if isinstance(inputs, list) else bool(inputs),
    )


def _thinking(edit: JSON, where: str) -> ClearThinking:
    keep = edit.get("keep")
    if keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all"):
        return ClearThinking(keep=None)
    if isinstance(keep, str):
        raise fields.expected('"all" or {"type": "thinking_turns", "value": …}', keep, "keep", where)
    turns = fields.read(_ThinkingEdit, edit, where).keep
    return ClearThinking(keep=turns.value if turns else KEPT_THINKING_TURNS)


# --- system prompts --------------------------------------------------------------------------------------------------


SYSTEM_ROLES = ("system", "developer")


def replace_system(protocol: str, data: JSON, text: str) -> tuple[JSON, str | None]:
    """The request with `text` for its system prompt, and what that was ('' where it had none); None where the protocol has
    no place for one.

    Several system messages at its beginning become one. What a Responses request has of them among its input goes into its
    instructions: these are sent with every request, while earlier input comes back by `previous_response_id`.
    """
    if protocol in ("chat", "ollama") and isinstance(data.get("messages"), list):
        system, others = _leading(data["messages"])
        role = system[0]["role"] if system else "system"
        made = {"role": role, "content": text}
        return {**data, "messages": [made, *others]}, _joined(each.get("content") for each in system)
    if protocol == "responses":
        items = data["input"] if isinstance(data.get("input"), list) else []
        system, others = _leading(items)
        before = _joined([data.get("instructions"), *(each.get("content") for each in system)])
        return {**data, "instructions": text, **({"input": others} if system else {})}, before
    if protocol == "messages":
        given = data.get("system")
        blocks = [block for block in given if isinstance(block, dict)] if isinstance(given, list) else []
        cached = [block["cache_control"] for block in blocks if "cache_control" in block][-1:]
        block = {"type": "text", "text": text, **({"cache_control": cached[0]} if cached else {})}
        return {**data, "system": [block] if blocks else text}, _joined([given])
    if protocol == "generate_content":
        name = _google_name(data)
        given = data.get(name)
        kept = given if isinstance(given, dict) else {"parts": given}
        return {**data, name: {**kept, "parts": [{"text": text}]}}, _joined([kept.get("parts")])
    return data, None


def _leading(items: list[Any]) -> tuple[list[JSON], list[Any]]:
    """The system messages that a conversation begins with, and the rest."""
    count = 0
    while count < len(items) and isinstance(items[count], dict) and items[count].get("role") in SYSTEM_ROLES:
        count += 1
    return items[:count], items[count:]


def _google_name(data: JSON) -> str:
    return "system_instruction" if "system_instruction" in data else "systemInstruction"


def _joined(contents: Any) -> str:
    """The texts of contents: a text each, or a list of parts that have one."""
    texts: list[str] = []
    for content in contents:
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                texts.append(text)
    return "\n\n".join(texts)
