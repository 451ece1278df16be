"""Reads the context edits of a request of Anthropic Messages: `context_management`.

Driven by the Messages parser. Pure; what an edit does stands in context_edits.py.
"""

from __future__ import annotations

from agentlightning.protocols import fields
from agentlightning.protocols.context_edits import (
    CLEAR_THINKING,
    CLEAR_TOOL_USES,
    KEPT_THINKING_TURNS,
    KEPT_TOOL_USES,
    MAX_EDITS,
    TRIGGER_TOKENS,
    ClearThinking,
    ClearToolUses,
    ContextEdit,
)
from agentlightning.protocols.fields import expected
from agentlightning.records import JSON


def parse_edits(data: JSON) -> tuple[tuple[ContextEdit, ...], JSON]:
    """The edits of a request, and those that the gateway does not know, by their path."""
    known: list[ContextEdit] = []
    unknown: JSON = {}
    given = fields.record(data, "context_management")
    edits = fields.items(given or {}, "edits", "context_management")
    if len(edits) > MAX_EDITS:
        raise expected(f"at most {MAX_EDITS} edits", len(edits), "context_management.edits")
    for index, edit in enumerate(edits):
        where = f"context_management.edits[{index}]"
        if not isinstance(edit, dict):
            raise expected("an object", edit, where)
        kind = edit.get("type")
        if kind == CLEAR_TOOL_USES:
            known.append(_tool_uses(edit, where))
        elif kind == CLEAR_THINKING:
            known.append(_thinking(edit, where))
        else:
            unknown[where] = edit
    return tuple(known), unknown


def _tool_uses(edit: JSON, where: str) -> ClearToolUses:
    trigger = _amount(edit, "trigger", ("input_tokens", "tool_uses"), where) or ("input_tokens", TRIGGER_TOKENS)
    keep = _amount(edit, "keep", ("tool_uses",), where)
    least = _amount(edit, "clear_at_least", ("input_tokens",), where)
    inputs = edit.get("clear_tool_inputs")
    if isinstance(inputs, list):
        inputs = _names(edit, "clear_tool_inputs", where)
    else:
        inputs = fields.boolean(edit, "clear_tool_inputs", at=where)
    return ClearToolUses(
        trigger_tokens=trigger[1] if trigger[0] == "input_tokens" else None,
        trigger_uses=trigger[1] if trigger[0] == "tool_uses" else None,
        keep=keep[1] if keep else KEPT_TOOL_USES,
        clear_at_least=least[1] if least else 0,
        exclude=_names(edit, "exclude_tools", where),
        clear_inputs=inputs,
    )


def _thinking(edit: JSON, where: str) -> ClearThinking:
    keep = edit.get("keep")
    if keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all"):
        return ClearThinking(keep=None)
    if isinstance(keep, str):
        raise expected('"all" or {"type": "thinking_turns", "value": …}', keep, "keep", where)
    amount = _amount(edit, "keep", ("thinking_turns",), where, low=1)
    return ClearThinking(keep=amount[1] if amount else KEPT_THINKING_TURNS)


def _amount(edit: JSON, name: str, kinds: tuple[str, ...], where: str, low: int = 0) -> tuple[str, int] | None:
    """(kind, number) of ``{"type": kind, "value": number}``."""
    given = fields.record(edit, name, where)
    if given is None:
        return None
    path = f"{where}.{name}"
    kind = given.get("type")
    if kind not in kinds:
        raise expected(" or ".join(kinds), kind, "type", path)
    value = fields.whole(given, "value", low, at=path)
    if value is None:
        raise expected(f"a whole number of at least {low}", None, "value", path)
    return kind, value


def _names(edit: JSON, name: str, where: str) -> frozenset[str]:
    values = fields.items(edit, name, where)
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise expected("the name of a tool", value, f"{where}.{name}[{index}]")
    return frozenset(values)
