"""Forked rollouts: an agent is put back into a state in which it was, and goes on from there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from gateway_house import LEASE_S, House, path

from agentlightning.adapters.trajectories import trajectories
from agentlightning.errors import InputError
from agentlightning.gateway.app import App
from agentlightning.records import Call, Claim, Finish, NewRollout, Resource, Rollout, WorkerStatus
from agentlightning.runner.agent import llm_for
from agentlightning.runner.connection_pool import ConnectionPool
from agentlightning.store.forks import new_forks, replay_ended, replay_warning
from agentlightning.store.summaries import SummaryQuery

QUESTIONS = ["weather in Rome?", "and in Oslo?", "and in Lima?"]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


async def converse(
    house: House, claim: Claim, questions: list[str] = QUESTIONS, *, app: App | None = None, stream: bool = False
) -> list[str]:
    """An agent that asks one question after another; returns the answers."""
    client = house.openai(claim, app)
    messages: list[Any] = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        if stream:
            parts = await client.chat.completions.create(model="policy", messages=messages, stream=True)
            said = "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])
        else:
            reply = await client.chat.completions.create(model="policy", messages=messages)
            said = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
    return [message["content"] for message in messages[1::2]]


async def recorded(house: House) -> Claim:
    """A finished rollout of three calls."""
    claim = await house.claim()
    house.say("sunny.", "rainy.", "cloudy.")
    assert await converse(house, claim) == ["sunny.", "rainy.", "cloudy."]
    await house.store.finish([Finish(lease=claim.lease, state="succeeded")])
    house.engine.requests.clear()
    return claim


async def fork(house: House, claim: Claim, calls: int) -> Claim:
    await house.store.enqueue(await new_forks(house.store, claim.rollout.id, calls))
    worker = WorkerStatus(id="w", run_id=house.run_id, host="h", pid=1, running=0, seen_ns=0)
    return (await house.store.claim(worker, lease_s=LEASE_S))[0]


async def calls_of(house: House, claim: Claim) -> list[Call]:
    return await house.store.calls([claim.rollout.id])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_first_calls_are_answered_from_the_record_and_the_next_is_sampled(house: House, stream: bool) -> None:
    claim = await recorded(house)
    forked = await fork(house, claim, 2)
    house.say("snowy.")
    assert await converse(house, forked, stream=stream) == ["sunny.", "rainy.", "snowy."]
    before, after = await calls_of(house, claim), await calls_of(house, forked)
    assert [call.replayed_id for call in after] == [before[0].id, before[1].id, None]
    assert len(house.engine.requests) == 1
    assert [(call.sampled_ids, call.logprobs, call.versions) for call in after[:2]] == [
        (call.sampled_ids, call.logprobs, call.versions) for call in before[:2]
    ]


async def test_an_agent_that_asks_something_else_is_sampled_from_there_on(house: House) -> None:
    claim = await recorded(house)
    forked = await fork(house, claim, 2)
    house.say("dark.", "bright.")
    assert await converse(house, forked, [QUESTIONS[0], "and on Mars?"]) == ["sunny.", "dark."]
    assert await converse(house, forked, QUESTIONS[:2]) == ["bright.", "bright."]
    assert [call.replayed_id is None for call in await calls_of(house, forked)] == [False, True, True, True]


async def test_a_gateway_that_starts_again_goes_on_with_the_replay(house: House) -> None:
    forked = await fork(house, await recorded(house), 2)
    house.say("snowy.")
    assert await converse(house, forked, QUESTIONS[:1]) == ["sunny."]
    client = house.openai(forked, house.gateway())
    said: list[Any] = [{"role": "assistant", "content": "sunny."}, {"role": "user", "content": QUESTIONS[1]}]
    for expected in ("rainy.", "snowy."):
        messages = [{"role": "user", "content": QUESTIONS[0]}, *said]
        reply = await client.chat.completions.create(model="policy", messages=messages)
        assert reply.choices[0].message.content == expected


async def test_a_fork_of_a_fork_has_the_seed_of_the_first(house: House) -> None:
    first = await recorded(house)
    second = await fork(house, first, 2)
    await converse(house, second)
    await house.store.finish([Finish(lease=second.lease, state="succeeded")])
    third = await fork(house, second, 1)
    seeds = {llm_for(claim, "http://gateway", "policy", ConnectionPool()).seed for claim in (first, second, third)}
    assert len(seeds) == 1
    assert seeds != {llm_for(await house.claim("another"), "http://gateway", "policy", ConnectionPool()).seed}


async def test_a_fork_of_another_run_s_rollout_gets_none_of_its_answers(house: House) -> None:
    claim = await recorded(house)
    [new] = await new_forks(house.store, claim.rollout.id, 2)
    house.run_id = (await house.store.create_run("another", {})).id
    await house.serve_policy()
    await house.store.enqueue([replace(new, run_id=house.run_id)])
    worker = WorkerStatus(id="w", run_id=house.run_id, host="h", pid=1, running=0, seen_ns=0)
    [forked] = await house.store.claim(worker, lease_s=LEASE_S)
    house.say("snowy.")
    assert await converse(house, forked, QUESTIONS[:1]) == ["snowy."]


async def test_equal_requests_get_the_recorded_answers_in_their_order(house: House) -> None:
    claim = await house.claim()
    house.say("one.", "two.", "three.")
    for _ in range(3):
        await converse(house, claim, ["a number?"])
    await house.store.finish([Finish(lease=claim.lease, state="succeeded")])
    forked = await fork(house, claim, 2)
    house.say("four.")
    assert [(await converse(house, forked, ["a number?"]))[0] for _ in range(3)] == ["one.", "two.", "four."]


async def test_tool_calls_are_replayed_with_their_ids(house: House) -> None:
    claim = await house.claim()
    house.say('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', "sunny.")
    said = []
    for one in (claim, None):
        one = one or await fork(house, claim, 1)
        client = house.openai(one)
        messages: list[Any] = [{"role": "user", "content": "weather?"}]
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
        message = reply.choices[0].message
        assert message.tool_calls
        said.append(message.tool_calls[0].id)
        messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}]
        await client.chat.completions.create(model="policy", messages=messages, tools=[WEATHER])  # type: ignore[list-item]
        await house.store.finish([Finish(lease=one.lease, state="succeeded")])
    assert said[0] == said[1]


async def test_replayed_calls_are_context_for_the_learner(house: House) -> None:
    forked = await fork(house, await recorded(house), 2)
    house.say("snowy.")
    await converse(house, forked)
    rollout, own = await finished(house, forked)
    [trajectory], left_out = trajectories([rollout], own, keep_unrewarded=True)
    assert not left_out
    assert [house.renderer.decode(one.sampled_ids) for one in trajectory.transitions] == ["snowy."]


async def weather(house: House, claim: Claim, **fields: Any) -> list[Any]:
    """What is answered to two requests with these fields, the policy's unless they name another model."""
    answers = []
    for question in QUESTIONS[:2]:
        body = {"model": "policy", "messages": [{"role": "user", "content": question}], **fields}
        answers.append((await house.http().post(f"{path(claim)}/v1/chat/completions", json=body)).json())
    return answers


async def test_alternatives_of_tokens_end_the_replay_and_those_of_the_prompt_are_asked_for_again(house: House) -> None:
    claim = await house.claim()
    before = await weather(house, claim, prompt_logprobs=1)
    await finished(house, claim)
    forked, other = await fork(house, claim, 1), await fork(house, claim, 1)
    after = await weather(house, forked, prompt_logprobs=1)
    assert [one["prompt_logprobs"] for one in after] == [one["prompt_logprobs"] for one in before]
    assert [call.replayed_id is None for call in await calls_of(house, forked)] == [False, True]
    await weather(house, other, logprobs=True, top_logprobs=1)
    assert replay_ended(*await finished(house, other)) == 0


@pytest.mark.parametrize(
    ("before", "after", "replays"),
    [
        ({}, {"max_tokens": 2}, False),
        ({}, {"max_tokens": 100}, True),
        ({"max_tokens": 5}, {"max_tokens": 6}, True),
        ({"max_tokens": 3}, {"max_tokens": 6}, False),  # it was cut, and would go on
        ({}, {"stop": ["nn"]}, False),
        ({}, {"stop": ["x"]}, True),
        ({"stop": ["nn"]}, {}, False),
        ({"stop": ["nn"]}, {"stop": ["nn"]}, True),
    ],
)
async def test_a_completion_that_the_request_could_not_have_got_is_not_replayed(
    house: House, before: dict[str, Any], after: dict[str, Any], replays: bool
) -> None:
    claim = await house.claim()
    house.say("sunny.")  # five tokens
    await weather(house, claim, **before)
    await finished(house, claim)
    forked = await fork(house, claim, 1)
    await weather(house, forked, **after)
    assert [call.replayed_id is not None for call in await calls_of(house, forked)] == [replays, False]


async def test_the_samples_of_a_request_are_replayed_in_their_order(house: House) -> None:
    claim = await house.claim()
    house.say(*(f"{number}." for number in range(24)))
    before = await weather(house, claim, n=12)
    await finished(house, claim)
    after = await weather(house, await fork(house, claim, 1), n=12)
    said = [[one["message"]["content"] for one in answered["choices"]] for answered in (before[0], after[0])]
    assert said[0] == said[1]


async def test_a_policy_is_not_given_what_another_one_answered_to_the_same_request(house: House) -> None:
    rival = (await house.store.resources(house.run_id))[0].value | {"model": "rival"}
    await house.store.put_resources([Resource(run_id=house.run_id, name="rival", kind="policy", value=rival)])
    claim = await house.claim()
    house.say("sunny.", "rainy.", "cloudy.")
    for model in ("policy", "rival", "policy"):
        await weather(house, claim, model=model, max_tokens=20)
    await finished(house, claim)
    forked = await fork(house, claim, 4)
    for model in ("rival", "policy"):  # as where both are asked at once
        await weather(house, forked, model=model, max_tokens=20)
    before = {call.id: call.policy for call in await calls_of(house, claim)}
    after = await calls_of(house, forked)
    assert [before[call.replayed_id or ""] for call in after] == [call.policy for call in after]


async def finished(house: House, claim: Claim) -> tuple[Rollout, list[Call]]:
    await house.store.finish([Finish(lease=claim.lease, state="succeeded")])
    [rollout] = await _rollouts(house, claim)
    return rollout, await calls_of(house, claim)


async def test_a_replay_that_ended_too_early_is_told_from_the_record(house: House) -> None:
    claim = await recorded(house)
    whole, ended, stopped = [await fork(house, claim, 2) for _ in range(3)]
    await converse(house, whole)
    assert replay_ended(*await finished(house, whole)) is None
    await converse(house, ended, [QUESTIONS[0], "and on Mars?"])
    await converse(house, stopped, QUESTIONS[:1])
    for one, now in ((ended, 1), (stopped, None)):  # the second has still calls to come, until its agent ends by itself
        assert replay_ended((await _rollouts(house, one))[0], await calls_of(house, one)) == now
        rollout, calls = await finished(house, one)
        assert replay_ended(rollout, calls) == 1
        assert "after 1 of 2 calls" in (replay_warning(rollout, calls) or "")


async def test_replayed_tokens_are_none_of_those_that_limits_and_summaries_count(house: House) -> None:
    claim = await recorded(house)
    forked = await fork(house, claim, 2)
    await house.store.put_resources(
        [Resource(run_id=house.run_id, name="limits", kind="limits", value={"attempt": {"max_tokens": 1}})]
    )
    house.say("snowy.")
    assert await converse(house, forked) == ["sunny.", "rainy.", "snowy."]  # what is over the limit is refused after it
    await finished(house, forked)
    rows = {row.id: row for row in (await house.store.summaries(SummaryQuery(run_id=house.run_id))).rows}
    after = await calls_of(house, forked)
    assert rows[forked.rollout.id].sampled_tokens == len(after[2].sampled_ids)
    assert rows[claim.rollout.id].sampled_tokens == sum(len(call.sampled_ids) for call in await calls_of(house, claim))


async def test_forks_of_one_key_are_made_once(house: House) -> None:
    claim = await recorded(house)
    made = [
        await house.store.enqueue(await new_forks(house.store, claim.rollout.id, 1, 2, key=key))
        for key in ("a", "a", None, None)
    ]
    ids = [tuple(one.id for one in some) for some in made]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    assert [len({one.group_id for one in some}) for some in made] == [1] * 4


async def _rollouts(house: House, claim: Claim) -> list[Rollout]:
    from agentlightning.store.base import RolloutQuery

    return await house.store.rollouts(RolloutQuery(ids=[claim.rollout.id]))


async def test_what_cannot_be_forked_is_refused(house: House) -> None:
    claim = await recorded(house)
    for calls in (-1, 3):
        with pytest.raises(InputError, match="expected 0 to 2 calls to replay"):
            await new_forks(house.store, claim.rollout.id, calls)
    with pytest.raises(InputError, match="expected a finished rollout"):
        await new_forks(house.store, (await house.claim("running")).rollout.id, 0)
    session = await house.store.open_session(NewRollout(run_id=house.run_id, task={}, group_id="someone"), 60.0)
    with pytest.raises(InputError, match="no agent can be started"):
        await new_forks(house.store, session.rollout.id, 0)
