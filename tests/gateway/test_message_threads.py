"""`thread` of Anthropic Messages: the gateway holds the conversation, and a request sends only what is new."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from gateway_house import House, path

from agentlightning.records import Call, Claim

TOOL = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]},
}
CREATE: dict[str, Any] = {
    "model": "policy",
    "max_tokens": 100,
    "system": [{"type": "text", "text": "You know the weather.", "cache_control": {"type": "ephemeral"}}],
    "tools": [TOOL],
    "messages": [{"role": "user", "content": "hi"}],
    "thread": {"type": "create"},
}


async def post(house: House, claim: Claim, route: str = "messages", **body: Any) -> httpx.Response:
    return await house.http().post(f"{path(claim)}/v1/{route}", json={"model": "policy", "max_tokens": 100, **body})


async def calls(house: House, claim: Claim) -> list[Call]:
    return await house.store.calls([claim.rollout.id])


def after(reply: httpx.Response) -> dict[str, Any]:
    return {"type": "continue", "previous_message_id": reply.json()["id"]}


async def test_a_thread_goes_on_exactly_with_only_what_is_new(house: House) -> None:
    claim = await house.claim()
    house.say('<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>', "It is sunny.")
    created = await post(house, claim, **CREATE)
    [text, use] = [*[None] * (2 - len(created.json()["content"])), *created.json()["content"]]
    assert (text, use["name"]) == (None, "weather")
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "sun"}
    turn = [{"role": "user", "content": [result]}]
    second = await post(house, claim, messages=turn, thread=after(created), tool_choice={"type": "auto"})
    third = await post(house, claim, messages=[{"role": "user", "content": "and now?"}], thread=after(second))
    assert (second.status_code, third.status_code) == (200, 200), (second.text, third.text)
    chain = await calls(house, claim)
    assert [call.parent_id for call in chain] == [None, chain[0].id, chain[1].id]
    assert [call.fork_cause for call in chain] == [None] * 3
    prompt = house.renderer.decode(house.engine.requests[-1]["token_ids"], special=True)
    assert "You know the weather." in prompt
    assert prompt.count("The weather.") == 1


async def test_the_tools_of_a_thread_are_the_same_as_if_they_were_sent_again(house: House) -> None:
    claim = await house.claim()
    house.say("It is sunny.", '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>')
    created = await post(house, claim, **CREATE)
    new = {"role": "user", "content": "and now?"}
    threaded = await post(house, claim, messages=[new], thread=after(created), tool_choice={"type": "any"})
    said = {"role": "assistant", "content": created.json()["content"]}
    whole = {**CREATE, "messages": [*CREATE["messages"], said, new], "tool_choice": {"type": "any"}, "thread": None}
    again = await post(house, claim, **whole)
    assert (threaded.status_code, again.status_code) == (200, 200), threaded.text
    one, other = house.engine.requests[1:]
    assert one["token_ids"] == other["token_ids"]
    assert one["sampling_params"]["structured_outputs"] == other["sampling_params"]["structured_outputs"]


async def test_tokens_of_a_thread_are_counted_with_all_that_it_holds(house: House) -> None:
    claim = await house.claim()
    created = await post(house, claim, **CREATE)
    turn = {"messages": [{"role": "user", "content": "and now?"}], "thread": after(created)}
    counted = (await post(house, claim, "messages/count_tokens", **turn)).json()["input_tokens"]
    assert (await post(house, claim, **turn)).status_code == 200
    assert (await calls(house, claim))[-1].prompt_tokens == counted


async def test_another_gateway_continues_a_thread(house: House) -> None:
    claim = await house.claim()
    created = await post(house, claim, **CREATE)
    body = {
        "model": "policy",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "?"}],
        "thread": after(created),
    }
    reply = await house.http(house.gateway()).post(f"{path(claim)}/v1/messages", json=body)
    assert (reply.status_code, (await calls(house, claim))[-1].parent_id) == (200, (await calls(house, claim))[0].id)


async def test_a_thread_of_another_attempt_is_not_found_in_the_shape_on_which_sdks_create_one(house: House) -> None:
    created = await post(house, await house.claim(), **CREATE)
    reply = await post(house, await house.claim(replica=1), messages=CREATE["messages"], thread=after(created))
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (404, "not_found_error")
    assert error["details"] == {"error_code": "thread_not_found"}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"system": "Other."}, "system: a thread keeps that of its first request"),
        ({"tools": [TOOL]}, "tools: a thread keeps those of its first request"),
        ({"thread": {"type": "fork"}}, "thread.type: expected create or continue"),
        ({"thread": {"type": "continue"}}, "thread.previous_message_id: expected the id of a message"),
        ({"messages": []}, "messages: expected a list of at least one message"),
    ],
)
async def test_what_a_thread_cannot_take_is_named(house: House, change: dict[str, Any], named: str) -> None:
    claim = await house.claim()
    created = await post(house, claim, **CREATE)
    body = {"messages": CREATE["messages"], "thread": after(created), **change}
    reply = await post(house, claim, **body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(named)


@pytest.mark.parametrize("thinking", [{"type": "adaptive", "display": "updates"}, {"type": "between_tools"}])
async def test_thinking_may_be_displayed_in_ways_that_are_not_known_yet(house: House, thinking: dict[str, str]) -> None:
    reply = await post(house, await house.claim(), messages=CREATE["messages"], thinking=thinking)
    assert reply.status_code == 200
