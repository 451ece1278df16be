"""Forked rollouts whose agents ask external models, too: these answer from the record while the replay goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from external_server import ExternalServer
from gateway_house import LEASE_S, House, path

from agentlightning.gateway.app import App
from agentlightning.records import Call, Claim, Finish, WorkerStatus
from agentlightning.store.forks import new_forks, replayable, replayable_external

TOPICS = ["the weather", "the time", "the traffic"]


async def converse(house: House, claim: Claim, *, app: App | None = None, stream: bool = False) -> list[str]:
    """An agent that lets a simulated user speak, asks its policy, and so on; returns what both said."""
    client = house.openai(claim, app)
    said: list[str] = []
    for topic in TOPICS:
        ask: Any = [{"role": "user", "content": f"Ask about {topic}, after {said}."}]
        if stream:
            parts = await client.chat.completions.create(model="gpt-4o-mini", messages=ask, stream=True)
            said.append("".join([part.choices[0].delta.content or "" async for part in parts if part.choices]))
        else:
            reply = await client.chat.completions.create(model="gpt-4o-mini", messages=ask)
            said.append(reply.choices[0].message.content or "")
        answer = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": " ".join(said)}]
        )
        said.append(answer.choices[0].message.content or "")
    return said


async def recorded(house: House, external: ExternalServer, claim: Claim) -> list[str]:
    house.say("sunny.", "noon.", "slow.")
    said = await converse(house, claim)
    await house.store.finish([Finish(lease=claim.lease, state="succeeded")])
    external.requests.clear()
    external.text = "Now?"
    return said


async def fork(house: House, claim: Claim, calls: int) -> Claim:
    await house.store.enqueue(await new_forks(house.store, claim.rollout.id, calls))
    worker = WorkerStatus(id="w", run_id=house.run_id, host="h", pid=1, running=0, seen_ns=0)
    return (await house.store.claim(worker, lease_s=LEASE_S))[0]


async def external_calls(house: House, claim: Claim) -> list[Call]:
    return [call for call in await house.store.calls([claim.rollout.id]) if not call.policy]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_external_model_is_asked_only_after_the_place_of_the_fork(
    house: House, external: ExternalServer, claim: Claim, stream: bool
) -> None:
    before = await recorded(house, external, claim)
    forked = await fork(house, claim, 1)
    house.say("midnight.", "fast.")
    said = await converse(house, forked, stream=stream)
    assert said == [*before[:3], "midnight.", "Now?", "fast."]
    assert len(external.requests) == 1
    old, new = await external_calls(house, claim), await external_calls(house, forked)
    assert [call.replayed_id for call in new] == [old[0].id, old[1].id, None]


async def test_a_gateway_that_starts_again_replays_each_external_call_once(
    house: House, external: ExternalServer, claim: Claim
) -> None:
    before = await recorded(house, external, claim)
    forked = await fork(house, claim, 1)
    ask: Any = [{"role": "user", "content": f"Ask about {TOPICS[0]}, after []."}]
    texts = []
    for app in (house.app, house.gateway()):
        reply = await house.openai(forked, app).chat.completions.create(model="gpt-4o-mini", messages=ask)
        texts.append(reply.choices[0].message.content)
    assert texts == [before[0], "Now?"]


async def test_another_question_or_sampling_is_asked_and_ends_nothing(
    house: House, external: ExternalServer, claim: Claim
) -> None:
    before = await recorded(house, external, claim)
    forked = await fork(house, claim, 1)
    ask: Any = [{"role": "user", "content": f"Ask about {TOPICS[0]}, after []."}]
    client = house.openai(forked)
    for options in ({"temperature": 0.5}, {"n": 2}, {"logprobs": True}):
        await client.chat.completions.create(model="gpt-4o-mini", messages=ask, **options)
    assert len(external.requests) == 3
    reply = await client.chat.completions.create(model="gpt-4o-mini", messages=ask)
    assert (reply.choices[0].message.content, len(external.requests)) == (before[0], 3)


async def test_tool_calls_of_an_anthropic_model_are_replayed_with_their_ids(
    house: House, external: ExternalServer, claim: Claim
) -> None:
    external.tool = ("weather", '{"city": "Oslo"}')
    ask: Any = {"model": "claude-x", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    seen = []
    for number in range(2):
        http = house.http()
        headers = {"x-api-key": claim.key, "anthropic-version": "2023-06-01"}
        reply = await http.post(f"{path(claim)}/v1/messages", json=ask, headers=headers)
        seen.append([block for block in reply.json()["content"] if block["type"] == "tool_use"])
        if number == 0:
            house.say("sunny.")
            await house.openai(claim).chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "weather?"}]
            )
            await house.store.finish([Finish(lease=claim.lease, state="succeeded")])
            claim = await fork(house, claim, 0)
    assert seen[0] == seen[1]
    assert seen[0]
    assert len(external.requests) == 1


async def test_an_answer_is_asked_for_again_whose_state_the_provider_has(
    house: House, external: ExternalServer, claim: Claim
) -> None:
    """Signatures of reasoning and stored responses are not in the record, and the next request would be refused without."""
    await recorded(house, external, claim)
    first, *others = await house.store.calls([claim.rollout.id])
    place = replayable([first, *others])[1:2]
    thought = replace(first, completion={**first.completion, "reasoning_content": "So."})
    stored = replace(first, protocol="responses")
    found = [len(replayable_external([one, *others], place)) for one in (first, thought, stored)]
    assert found == [2, 1, 1]
