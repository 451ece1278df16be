"""System prompts are replaced in every protocol, and nothing else of a request is."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.protocols import chat, completions, generate_content, messages, responses
from agentlightning.protocols.system_prompts import replace_system

HI = {"role": "user", "content": "hi"}
TEXT = "Be old."


def system_of(wire: Any, data: dict[str, Any]) -> list[Any]:
    """The system messages that the protocol's own parser reads."""
    given = {"model": "m", "max_tokens": 5, **data} if wire is messages else {"model": "m", **data}
    return [each["content"] for each in wire.parse(given).messages if each["role"] in ("system", "developer")]


REQUESTS: list[tuple[Any, dict[str, Any]]] = [
    (chat, {"messages": [{"role": "system", "content": TEXT}, HI]}),
    (chat, {"messages": [{"role": "developer", "content": [{"type": "text", "text": TEXT}]}, HI], "n": 2}),
    (responses, {"instructions": TEXT, "input": "hi"}),
    (responses, {"input": [{"role": "system", "content": [{"type": "input_text", "text": TEXT}]}, HI]}),
    (messages, {"system": TEXT, "messages": [HI]}),
    (messages, {"system": [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}], "messages": [HI]}),
    (generate_content, {"systemInstruction": {"parts": [{"text": TEXT}]}, "contents": [{"parts": [{"text": "hi"}]}]}),
    (generate_content, {"system_instruction": {"parts": [{"text": TEXT}]}, "contents": [{"parts": [{"text": "hi"}]}]}),
]


@pytest.mark.parametrize(("wire", "data"), REQUESTS)
def test_a_system_prompt_is_replaced_as_a_whole(wire: Any, data: dict[str, Any]) -> None:
    changed, before = replace_system(wire.NAME, data, "New.")
    assert before == TEXT
    assert system_of(wire, changed) == ["New."]
    assert replace_system(wire.NAME, changed, "New.") == (changed, "New.")


def test_a_request_without_a_system_prompt_gets_one() -> None:
    for wire, data in (
        (chat, {"messages": [HI]}),
        (responses, {"input": "hi", "previous_response_id": "resp_1"}),
        (messages, {"messages": [HI]}),
        (generate_content, {"contents": [{"parts": [{"text": "hi"}]}]}),
    ):
        changed, before = replace_system(wire.NAME, data, "New.")
        assert (before, system_of(wire, changed)) == ("", ["New."])


def test_several_system_messages_become_one_and_later_ones_stay() -> None:
    late = {"role": "system", "content": "late"}
    given = [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}, HI, late]
    changed, before = replace_system("chat", {"messages": given}, "New.")
    assert (changed["messages"], before) == ([{"role": "system", "content": "New."}, HI, late], "a\n\nb")


def test_a_cached_block_stays_cached() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]
    changed, before = replace_system("messages", {"system": blocks, "messages": [HI]}, "New.")
    assert changed["system"] == [{"type": "text", "text": "New.", "cache_control": {"type": "ephemeral"}}]
    assert before == "a\n\nb"


def test_what_is_not_of_the_protocols_form_is_left_to_its_parser() -> None:
    for protocol, data in (
        ("chat", {"messages": "hi"}),
        ("chat", {"messages": [5]}),
        ("responses", {"input": 5}),
        ("messages", {"system": 5}),
        ("generate_content", {"systemInstruction": "x"}),
        (completions.NAME, {"prompt": "hi"}),
    ):
        replace_system(protocol, data, "x")
    assert replace_system(completions.NAME, {"prompt": "hi"}, "x") == ({"prompt": "hi"}, None)
