"""Context edits of Anthropic Messages: how they are read, and what they clear."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.protocols.prompt_edits import (
    CLEARED_RESULT,
    ClearThinking,
    ClearToolUses,
    apply_edits,
    parse_edits,
)

TOOLS = "clear_tool_uses_20250919"
THINKING = "clear_thinking_20251015"


def read(*edits: Any) -> Any:
    return parse_edits({"edits": list(edits)})


def tool_turn(number: int, tool: str = "search", reasoning: str | None = None) -> list[dict[str, Any]]:
    call = {"id": f"t{number}", "type": "function", "function": {"name": tool, "arguments": f'{{"q":{number}}}'}}
    said: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    if reasoning is not None:
        said["reasoning_content"] = reasoning
    return [said, {"role": "tool", "tool_call_id": f"t{number}", "content": f"a long result {number} " * 20}]


def conversation(count: int) -> list[dict[str, Any]]:
    turns = [message for number in range(count) for message in tool_turn(number)]
    return [{"role": "user", "content": "go"}, *turns]


def size(messages: list[dict[str, Any]]) -> int:
    """Stands for the number of tokens."""
    return sum(len(str(message)) for message in messages)


def cleared(messages: list[dict[str, Any]]) -> list[str]:
    return [message["tool_call_id"] for message in messages if message.get("content") == CLEARED_RESULT]


@pytest.mark.parametrize(
    ("edit", "understood"),
    [
        ({"type": TOOLS}, ClearToolUses()),
        (
            {"type": TOOLS, "trigger": {"type": "input_tokens", "value": 9}, "keep": {"type": "tool_uses", "value": 0}},
            ClearToolUses(trigger_tokens=9, keep=0),
        ),
        (
            {
                "type": TOOLS,
                "trigger": {"type": "tool_uses", "value": 2},
                "clear_at_least": {"type": "input_tokens", "value": 5},
                "exclude_tools": ["memory"],
                "clear_tool_inputs": True,
            },
            ClearToolUses(
                trigger_tokens=None,
                trigger_uses=2,
                clear_at_least=5,
                exclude=frozenset({"memory"}),
                clear_inputs=True,
            ),
        ),
        ({"type": TOOLS, "clear_tool_inputs": ["search"]}, ClearToolUses(clear_inputs=frozenset({"search"}))),
        ({"type": THINKING}, ClearThinking()),
        ({"type": THINKING, "keep": "all"}, ClearThinking(keep=None)),
        ({"type": THINKING, "keep": {"type": "all"}}, ClearThinking(keep=None)),
        ({"type": THINKING, "keep": {"type": "thinking_turns", "value": 2}}, ClearThinking(keep=2)),
    ],
)
def test_an_edit_is_read(edit: Any, understood: Any) -> None:
    assert read(edit) == ((understood,), {})


def test_old_tool_results_are_cleared_and_the_latest_stay() -> None:
    before = conversation(5)
    after, applied = apply_edits([ClearToolUses(trigger_tokens=100)], before, size)
    assert cleared(after) == ["t0", "t1"]
    assert [message for message in after if message["role"] != "tool"] == [
        message for message in before if message["role"] != "tool"
    ]
    saved = size(before) - size(after)
    assert applied == ({"type": TOOLS, "cleared_tool_uses": 2, "cleared_input_tokens": saved},)


def test_more_tool_calls_than_the_trigger_clear_and_inputs_go_where_told() -> None:
    before = [*conversation(2), *tool_turn(2, "read"), *tool_turn(3)]
    edit = ClearToolUses(trigger_tokens=None, trigger_uses=3, keep=0, clear_inputs=frozenset({"search"}))
    after, _ = apply_edits([edit], before, size)
    assert cleared(after) == ["t0", "t1", "t2", "t3"]
    arguments = [message["tool_calls"][0]["function"]["arguments"] for message in after if "tool_calls" in message]
    assert arguments == ["{}", "{}", '{"q":2}', "{}"]


def test_thinking_of_all_turns_but_the_latest_is_taken_out() -> None:
    turns = [
        {"role": "user", "content": "one"},
        *tool_turn(0, reasoning="first, at some length"),
        *tool_turn(1, reasoning="still the first turn"),
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "yes", "reasoning_content": "second"},
        {"role": "user", "content": "three"},
    ]
    after, applied = apply_edits([ClearThinking(keep=1)], turns, size)
    thoughts = [message.get("reasoning_content") for message in after if message["role"] == "assistant"]
    assert thoughts == [None, None, None, "second"]
    assert [message.get("reasoning_cleared", False) for message in after if message["role"] == "assistant"] == [
        True, True, False, False,
    ]  # fmt: skip
    assert applied[0]["cleared_thinking_turns"] == 1
    assert apply_edits([ClearThinking(keep=2)], turns, size) == (turns, ())
