"""Agents are named by the headers that programs send of themselves, else by their system prompts."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_house import House, path

from agentlightning.protocols.system_prompts import prompt_name

HI: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("headers", "agent"),
    [
        ({"x-claude-code-agent-id": "explore-1"}, "explore-1"),
        ({"x-claude-code-agent-type": "Explore", "x-claude-code-agent-id": "explore-1"}, "Explore"),
        ({"x-openai-subagent": "review"}, "review"),
        ({"x-openai-subagent": "review", "x-agl-agent": "mine"}, "mine"),
        ({"x-openai-subagent": "review", "baggage": "agl.agent=theirs"}, "theirs"),
        ({"x-claude-code-agent-id": "a" * 500}, "a" * 200),
        ({"x-claude-code-agent-id": "a\u0085b"}, "ab"),
        ({"x-claude-code-agent-id": "  "}, None),
        ({"x-claude-code-agent-id": "agl.judge"}, None),
    ],
)
async def test_a_sub_agent_has_the_name_of_its_header(house: House, headers: dict[str, str], agent: str | None) -> None:
    claim = await house.claim()
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    await house.http().post(f"{path(claim)}/v1/chat/completions", json=HI, headers=encoded)
    (call,) = await house.store.calls([claim.rollout.id])
    assert call.agent == agent


PROMPTS: Any = {
    "chat/completions": lambda text: {"messages": [{"role": "developer", "content": text}, *HI["messages"]]},
    "responses": lambda text: {"instructions": text, "input": "hi"},
    "messages": lambda text: {"system": [{"type": "text", "text": text}], "max_tokens": 9, "messages": HI["messages"]},
}


@pytest.mark.parametrize("route", PROMPTS)
async def test_a_program_that_names_no_agent_gets_names_by_its_system_prompts(house: House, route: str) -> None:
    found = []
    for replica in range(2):
        claim = await house.claim(replica=replica)
        for text in ("You are the planner.", "You are the writer."):
            body = {"model": "policy", **PROMPTS[route](text)}
            assert (await house.http().post(f"{path(claim)}/v1/{route}", json=body)).status_code == 200
        found.append([call.agent for call in await house.store.calls([claim.rollout.id])])
    assert found[0] == found[1] == [prompt_name("You are the planner."), prompt_name("You are the writer.")]


async def test_a_continued_response_keeps_the_name_of_its_first_prompt(house: House) -> None:
    claim = await house.claim()
    url = f"{path(claim)}/v1/responses"
    first = [{"role": "system", "content": "You are the planner."}, {"role": "user", "content": "hi"}]
    answer = (await house.http().post(url, json={"model": "policy", "input": first})).json()
    more = {"model": "policy", "previous_response_id": answer["id"], "input": "go on"}
    assert (await house.http().post(url, json=more)).status_code == 200
    calls = await house.store.calls([claim.rollout.id])
    assert [call.agent for call in calls] == [prompt_name("You are the planner.")] * 2
