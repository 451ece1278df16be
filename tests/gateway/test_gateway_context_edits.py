"""What an agent with Anthropic's context editing sees (Claude Code sends it with every call), and what is recorded."""

from __future__ import annotations

import json
from typing import Any

from gateway_house import House, path

from agentlightning.protocols.prompt_edits import CLEARED_RESULT
from agentlightning.records import Claim

AS_CLAUDE_CODE = {
    "output_config": {"effort": "high"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
}
CLEARING = {
    "context_management": {
        "edits": [
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "tool_uses", "value": 1},
                "keep": {"type": "tool_uses", "value": 1},
            }
        ]
    }
}
TOOLS = [{"name": "search", "input_schema": {"type": "object"}}]


async def ask(house: House, claim: Claim, messages: list[Any], route: str = "messages", **settings: Any) -> Any:
    body = {"model": "policy", "max_tokens": 50, "messages": messages, **settings}
    answer = await house.http().post(f"{path(claim)}/v1/{route}", json=body)
    assert answer.status_code == 200, answer.text
    if settings.get("stream"):
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    return answer.json()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(answer: Any, text: str) -> list[dict[str, Any]]:
    """The completion, and the result of the tool that it calls."""
    [use] = [block for block in answer["content"] if block["type"] == "tool_use"]
    block = {"type": "tool_result", "tool_use_id": use["id"], "content": text}
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [block]}]


async def searched(house: House, claim: Claim, count: int, **settings: Any) -> tuple[list[Any], list[Any]]:
    """The messages of a conversation in which the policy called a tool so often, and all completions."""
    house.say(*['<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'] * count, "It is sunny.")
    messages: list[Any] = [user("find it")]
    answers = []
    for number in range(count):
        answers.append(await ask(house, claim, messages, tools=TOOLS, **settings))
        messages += result(answers[-1], f"{number}: " + "nothing to be seen here " * 5)
    return messages, answers


async def test_claude_codes_settings_change_nothing_and_are_recorded(house: House) -> None:
    claim = await house.claim()
    first = await ask(house, claim, [user("hi")], **AS_CLAUDE_CODE)
    again = [user("hi"), {"role": "assistant", "content": first["content"]}, user("and?")]
    second = await ask(house, claim, again, **AS_CLAUDE_CODE)
    assert first["context_management"] == second["context_management"] == {"applied_edits": []}
    one, two = await house.store.calls([claim.rollout.id])
    assert (two.parent_id, two.fork_cause) == (one.id, None)
    assert one.overridden_params == {"output_config.effort": "high"}


async def test_cleared_tool_results_leave_the_prompt_and_the_call_is_a_fork_by_that_name(house: House) -> None:
    claim = await house.claim()
    messages, answers = await searched(house, claim, 2, **CLEARING)
    assert [answer["context_management"]["applied_edits"] for answer in answers] == [[], []]
    answer = await ask(house, claim, messages, tools=TOOLS, **CLEARING)
    [applied] = answer["context_management"]["applied_edits"]
    assert (applied["type"], applied["cleared_tool_uses"]) == ("clear_tool_uses_20250919", 1)
    calls = await house.store.calls([claim.rollout.id])
    assert [call.fork_cause for call in calls] == [None, None, "context_cleared"]
    assert calls[2].untrained_tokens > 0
    prompt = house.renderer.decode(house.engine.requests[-1]["token_ids"], special=True)
    assert CLEARED_RESULT in prompt
    assert "0: nothing" not in prompt
    assert "1: nothing" in prompt


async def test_a_conversation_goes_on_exactly_after_the_same_results_were_cleared(house: House) -> None:
    claim = await house.claim()
    messages, _ = await searched(house, claim, 2)
    answer = await ask(house, claim, messages, tools=TOOLS, **CLEARING)
    more = [*messages, {"role": "assistant", "content": answer["content"]}, user("thanks")]
    for app in (None, house.gateway()):  # another gateway rebuilds the graph from the store
        body = {"model": "policy", "max_tokens": 50, "messages": more, "tools": TOOLS, **CLEARING}
        assert (await house.http(app).post(f"{path(claim)}/v1/messages", json=body)).status_code == 200
    calls = await house.store.calls([claim.rollout.id])
    assert [(call.parent_id, call.fork_cause) for call in calls[3:]] == [(calls[2].id, None)] * 2


async def test_a_stream_tells_of_applied_edits_and_tokens_are_counted_after_and_before_them(house: House) -> None:
    claim = await house.claim()
    messages, _ = await searched(house, claim, 2)
    events = await ask(house, claim, messages, tools=TOOLS, stream=True, **CLEARING)
    [end] = [event for event in events if event["type"] == "message_delta"]
    [applied] = end["context_management"]["applied_edits"]
    assert applied["cleared_tool_uses"] == 1
    assert applied["cleared_input_tokens"] > 0
    plain = await ask(house, claim, messages, "messages/count_tokens", tools=TOOLS)
    edited = await ask(house, claim, messages, "messages/count_tokens", tools=TOOLS, **CLEARING)
    assert edited["context_management"] == {"original_input_tokens": plain["input_tokens"]}
    assert edited["input_tokens"] < plain["input_tokens"]
