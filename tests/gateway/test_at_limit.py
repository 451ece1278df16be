"""agent.at_limit: a budget that is used up, or a context that is full, ends an agent in place of failing it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from external_house import HI, serve
from external_server import ExternalServer
from gateway_house import House, path
from test_gateway_limits import BODIES as FOUR
from test_gateway_limits import ask, limit, told

import build
from agentlightning.gateway.attempts import MAX_ENDS
from agentlightning.records import Claim, Finish
from agentlightning.store.base import RolloutQuery

GOOGLE = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
BODIES: dict[str, dict[str, Any]] = {f"/v1/{route}": body for route, body in FOUR.items()} | {
    "/v1beta/models/policy:generateContent": GOOGLE,
    "/v1beta/models/policy:streamGenerateContent?alt=sse": GOOGLE,
}


async def begin(house: House, **agent: Any) -> Claim:
    """An attempt of a run with these settings of its agent."""
    house.run_id = (await house.store.create_run("ends", {"agent": {"reward": [], **agent}})).id
    await house.serve_policy()
    return await house.claim()


def said(route: str, reply: httpx.Response) -> str:
    """The text of an answer, whatever its protocol, whole or streamed."""
    assert reply.status_code == 200, reply.text
    return json.dumps(reply.json()) if reply.headers["content-type"].startswith("application/json") else reply.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", BODIES)
async def test_a_command_that_has_used_its_budget_is_told_so_by_the_model(
    house: House, route: str, stream: bool
) -> None:
    claim = await begin(house, command="bash agent.sh")
    await limit(house, attempt={"max_calls": 1})
    body = BODIES[route] if "v1beta" in route else {**BODIES[route], "stream": stream}
    replies = [await house.http().post(f"{path(claim)}{route}", json=body) for _ in range(3)]
    assert "It is sunny" in said(route, replies[0]) or stream or "stream" in route
    for reply in replies[1:]:
        assert "The budget of this task is used up: this attempt has made the 1 model calls" in said(route, reply)
    assert len(await house.store.calls([claim.rollout.id])) == 1
    (span,) = await told(house, claim)
    assert span.attributes["setting"] == "limits.attempt.max_calls"


async def test_an_sdk_reads_the_end_as_a_final_message(house: House) -> None:
    claim = await begin(house, command="bash agent.sh")
    await limit(house, attempt={"max_calls": 1})
    tools: Any = [
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    ]
    client = house.openai(claim)
    await client.chat.completions.create(model="policy", messages=HI, tools=tools)
    (choice,) = (await client.chat.completions.create(model="policy", messages=HI, tools=tools)).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert "end here" in str(choice.message.content)


@pytest.mark.parametrize("full", [False, True])
async def test_a_response_that_continues_the_end_is_the_end_again(house: House, full: bool) -> None:
    house.engine.context = 64
    claim = await begin(house, command="bash agent.sh")
    if not full:
        await limit(house, attempt={"max_calls": 1})
    client = house.openai(claim)
    last = await client.responses.create(model="policy", input="hi")
    for text in ("hello " * 100 if full else "hi", "so?", "so?"):
        last = await client.responses.create(model="policy", input=text, previous_response_id=last.id)
        assert "end here" in last.output_text
    with pytest.raises(openai.NotFoundError):
        await house.openai(await begin(house, command="x")).responses.create(
            model="policy", input="hi", previous_response_id=last.id
        )


async def test_its_attempt_succeeds_with_its_reward(house: House) -> None:
    claim = await begin(house, command="bash agent.sh")
    await limit(house, attempt={"max_calls": 1})
    assert [(await ask(house, claim)).status_code for _ in range(2)] == [200, 200]
    reward = build.reward(claim, 0.5)
    await house.store.finish([Finish(lease=claim.lease, state="succeeded", rewards=[reward])])
    (rollout,) = await house.store.rollouts(RolloutQuery(run_id=house.run_id))
    assert (rollout.state, rollout.reward, rollout.refused) == ("succeeded", 0.5, False)


async def test_a_full_context_ends_a_command_and_fails_a_function(house: House) -> None:
    house.engine.context = 40
    long = {"model": "policy", "messages": [{"role": "user", "content": "sunny weather " * 60}]}
    for agent, status in (
        ({"command": "x"}, 200),
        ({"run": "a.py:f"}, 400),
        ({"run": "a.py:f", "at_limit": "end"}, 200),
        ({"command": "x", "at_limit": "error"}, 400),
        ({}, 400),
    ):
        claim = await begin(house, **agent)
        reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json=long)
        assert reply.status_code == status, agent
        assert "the model's context is 40, answer included" in reply.text
        assert [span.attributes["setting"] for span in await told(house, claim)] == (
            ["context_length_exceeded"] if status == 200 else []
        )
    assert house.engine.requests == []


async def test_a_program_that_asks_on_and_on_is_refused_in_the_end(house: House) -> None:
    claim = await begin(house, command="x")
    await limit(house, attempt={"max_calls": 1})
    statuses = [(await ask(house, claim)).status_code for _ in range(MAX_ENDS + 2)]
    assert statuses == [200] * (MAX_ENDS + 1) + [429]


async def test_an_external_model_ends_the_agent_too_and_a_judge_is_no_agent(
    house: House, external: ExternalServer
) -> None:
    claim = await begin(house, command="x")
    await serve(house, "hosted", url=external.url, models=["gpt-4o-mini"], key_env="JUDGE_KEY")
    await limit(house, attempt={"max_tokens": 18})
    body = {"model": "gpt-4o-mini", "messages": HI}
    url = f"{path(claim)}/v1/chat/completions"
    assert (await house.http().post(url, json=body)).status_code == 200
    ended = await house.http().post(url, json=body)
    assert "has used 18 of 18 tokens" in ended.json()["choices"][0]["message"]["content"]
    key = {"authorization": f"Bearer {claim.judge_key}"}
    judged = await house.http().post(url, json=body, headers=key)
    assert judged.json()["choices"][0]["message"]["content"] == "It is sunny."  # the attempt's limits are its agent's
    await limit(house, run={"max_tokens": 18})
    judged = await house.http(house.gateway()).post(url, json=body, headers=key)
    assert judged.status_code == 429
    embedded = await house.http().post(f"{path(claim)}/v1/embeddings", json={"model": "gpt-4o-mini", "input": "x"})
    assert embedded.status_code == 429
