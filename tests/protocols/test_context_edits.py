"""Context edits of Anthropic Messages: how they are read, and what they clear."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.protocols.base import ApiError
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


def test_an_edit_that_is_not_known_is_collected_by_its_path() -> None:
    edits, unknown = read({"type": TOOLS}, {"type": "compact_20260112"})
    assert (edits, unknown) == ((ClearToolUses(),), {"context_management.edits[1]": {"type": "compact_20260112"}})


@pytest.mark.parametrize(
    ("edit", "param"),
    [
        (1, "context_management.edits[0]"),
        ({"type": TOOLS, "trigger": {"type": "hours", "value": 1}}, "context_management.edits[0].trigger.type"),
        ({"type": TOOLS, "trigger": {"type": "input_tokens"}}, "context_management.edits[0].trigger.value"),
        ({"type": TOOLS, "keep": {"type": "tool_uses", "value": -1}}, "context_management.edits[0].keep.value"),
        ({"type": TOOLS, "keep": 3}, "context_management.edits[0].keep"),
        ({"type": TOOLS, "exclude_tools": [1]}, "context_management.edits[0].exclude_tools[0]"),
        ({"type": TOOLS, "clear_tool_inputs": "yes"}, "context_management.edits[0].clear_tool_inputs"),
        ({"type": THINKING, "keep": "some"}, "context_management.edits[0].keep"),
        ({"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}, "context_management.edits[0].keep.value"),
    ],
)
def test_an_edit_with_a_value_of_another_kind_is_refused_by_its_path(edit: Any, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(edit)
    assert refused.value.param == param


def test_old_tool_results_are_cleared_and_the_latest_stay() -> None:
    before = conversation(5)
    after, applied = apply_edits([ClearToolUses(trigger_tokens=100)], before, size)
    assert cleared(after) == ["t0", "t1"]
    assert [message for message in after if message["role"] != "tool"] == [
        message for message in before if message["role"] != "tool"
    ]
    saved = size(before) - size(after)
    assert applied == ({"type": TOOLS, "cleared_tool_uses": 2, "cleared_input_tokens": saved},)


@pytest.mark.parametrize(
    "edit",
    [
        ClearToolUses(),
        ClearToolUses(trigger_tokens=None, trigger_uses=5),
        ClearToolUses(trigger_tokens=1, keep=5),
        ClearToolUses(trigger_tokens=1, clear_at_least=10**6),
        ClearToolUses(trigger_tokens=1, exclude=frozenset({"search"})),
        ClearThinking(keep=1),
        ClearThinking(keep=None),
    ],
)
def test_an_edit_with_nothing_to_clear_leaves_the_messages_as_they_are(edit: Any) -> None:
    before = conversation(5)
    assert apply_edits([edit], before, size) == (before, ())


def test_more_tool_calls_than_the_trigger_clear_and_inputs_go_where_told() -> None:
    before = [*conversation(2), *tool_turn(2, "read"), *tool_turn(3)]
    edit = ClearToolUses(trigger_tokens=None, trigger_uses=3, keep=0, clear_inputs=frozenset({"search"}))
    after, _ = apply_edits([edit], before, size)
    assert cleared(after) == ["t0", "t1", "t2", "t3"]
    arguments = [message["tool_calls"][0]["function"]["arguments"] for message in after if "tool_calls" in message]
    assert arguments == ["{}", "{}", '{"q":2}', "{}"]


def test_tools_that_are_excluded_keep_their_results() -> None:
    before = [{"role": "user", "content": "go"}, *tool_turn(0, "memory"), *tool_turn(1), *tool_turn(2)]
    after, applied = apply_edits([ClearToolUses(trigger_tokens=1, keep=1, exclude=frozenset({"memory"}))], before, size)
    assert (cleared(after), applied[0]["cleared_tool_uses"]) == (["t1"], 1)


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


@given(count=st.integers(0, 8), keep=st.integers(0, 8), least=st.integers(0, 2000), trigger=st.integers(0, 5000))
def test_an_edited_conversation_has_as_many_messages_and_the_latest_results(
    count: int, keep: int, least: int, trigger: int
) -> None:
    before = conversation(count)
    edit = ClearToolUses(trigger_tokens=trigger, keep=keep, clear_at_least=least)
    after, applied = apply_edits([edit], before, size)
    assert len(after) == len(before)
    kept = {message["tool_call_id"] for message in before if message["role"] == "tool"} - set(cleared(after))
    assert {f"t{number}" for number in range(max(0, count - keep), count)} <= kept
    assert bool(applied) == (after != before)
    if applied:
        assert applied[0]["cleared_input_tokens"] == size(before) - size(after) >= least
