"""What a call of the policy does beside answering: choices, noise, retries, disconnects, limits, stored responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from exchange import Exchange, PassingStore
from gateway_house import END, House, path

from agentlightning.protocols.base import EventReader
from agentlightning.records import Call

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def asking(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}], **fields}


async def answered(
    house: House, claim: Any, body: dict[str, Any], route: str = "chat/completions", **headers: str
) -> Any:
    reply = await house.http().post(f"{path(claim)}/v1/{route}", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def calls_of(house: House, claim: Any) -> list[Call]:
    return await house.store.calls([claim.rollout.id])


# --- choices and noise ------------------------------------------------------------------------------------------------


async def test_n_choices_are_n_recorded_calls_with_noise_of_their_own_of_which_any_can_be_continued(
    house: House,
) -> None:
    claim = await house.claim()
    house.say("one", "two", "three", "end")
    reply = await answered(house, claim, asking(n=3))
    assert sorted(choice["message"]["content"] for choice in reply["choices"]) == ["one", "three", "two"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    calls = await calls_of(house, claim)
    first = reply["id"].removeprefix("chatcmpl-")
    assert sorted(call.id for call in calls) == [first, f"{first}.1", f"{first}.2"]
    assert len({request["sampling_params"]["seed"] for request in house.engine.requests}) == 3
    assert reply["usage"]["completion_tokens"] == sum(len(call.sampled_ids) for call in calls)
    chosen = next(choice for choice in reply["choices"] if choice["message"]["content"] == "two")
    messages = [*asking()["messages"], chosen["message"], {"role": "user", "content": "go on"}]
    await answered(house, claim, {"messages": messages})
    *before, last = await calls_of(house, claim)
    assert last.continuation == "continued"
    assert next(call for call in before if call.id == last.parent_id).completion["content"] == "two"


async def test_one_failed_choice_fails_the_call_and_others_are_recorded_as_abandoned(house: House) -> None:
    claim = await house.claim()
    house.engine.refusals = [(400, {"error": {"message": "no", "code": None}})]
    reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json=asking(n=2))
    assert reply.status_code == 400
    assert {call.finish_reason for call in await calls_of(house, claim)} <= {"abandoned"}


async def test_an_agents_seed_repeats_within_a_rollout_and_differs_between_them(house: House) -> None:
    one, other = await house.claim(replica=0), await house.claim(replica=1)
    for claim in (one, one, other):
        await answered(house, claim, asking(seed=5))
    first, again, elsewhere = [request["sampling_params"]["seed"] for request in house.engine.requests]
    assert first == again != elsewhere


async def test_an_engine_without_seeds_is_sent_none_and_refuses_those_of_agents(house: House) -> None:
    await house.serve_policy(seed=None)
    claim = await house.claim()
    await answered(house, claim, asking())
    assert "seed" not in house.engine.requests[0]["sampling_params"]
    reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json=asking(seed=5))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "seed"


# --- what the run's sampling policy does --------------------------------------------------------------------------------


async def test_sampling_that_no_trainer_could_account_for_is_left_out_and_recorded_where_the_run_says_so(
    house: House,
) -> None:
    await house.serve_policy(unsupported_params="drop")
    claim = await house.claim()
    given = {"top_a": 0.5, "typical_p": 0.5, "bad_words": ["sunny"]}
    await answered(house, claim, asking(**given, tools=TOOLS))
    [call] = await calls_of(house, claim)
    assert call.overridden_params == given
    assert not given.keys() & house.engine.requests[0]["sampling_params"].keys()


async def test_one_tool_call_only_stops_after_the_first(house: House) -> None:
    claim = await house.claim()
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    house.say(text)
    reply = await answered(house, claim, asking(tools=TOOLS, parallel_tool_calls=False))
    assert house.engine.requests[0]["sampling_params"]["stop"] == ["</tool_call>"]
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}


# --- retries and disconnects --------------------------------------------------------------------------------------------


def held_engine(house: House) -> asyncio.Event:
    """Streams wait after their first token; the event says that one has begun."""
    house.engine.gate = asyncio.Event()
    arrived = asyncio.Event()
    ids = [*house.renderer.encode("It is sunny."), END]
    house.engine.answers = lambda _: arrived.set() or ids  # type: ignore[func-returns-value]
    return arrived


async def test_a_call_whose_agent_has_gone_goes_on_and_its_retry_gets_the_answer(house: House) -> None:
    claim = await house.claim()
    held_engine(house)
    url = f"{path(claim)}/v1/chat/completions"
    first = Exchange(house.app, claim.key, url, asking(stream=True))
    await first.started.wait()
    first.hang_up()
    retry = Exchange(house.app, claim.key, url, asking(stream=True), {"x-stainless-retry-count": "1"})
    await asyncio.sleep(0)
    assert house.engine.gate is not None
    house.engine.gate.set()
    chunks = [json.loads(data) for data in EventReader().feed(await retry.done()) if data != b"[DONE]"]
    await first.task
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "It is sunny."
    assert [call.delivered for call in await calls_of(house, claim)] == [True]
    assert len(house.engine.requests) == 1


async def test_a_stored_response_that_is_fetched_was_delivered(house: House) -> None:
    claim = await house.claim()
    held_engine(house)
    body = {"model": "policy", "input": "Hi", "stream": True}
    first = Exchange(house.app, claim.key, f"{path(claim)}/v1/responses", body)
    await first.started.wait()
    first.hang_up()
    assert house.engine.gate is not None
    house.engine.gate.set()
    await first.task
    [call] = await calls_of(house, claim)
    assert not call.delivered
    assert (await house.http().get(f"{path(claim)}/v1/responses/resp_{call.id}")).status_code == 200
    assert [call.delivered for call in await calls_of(house, claim)] == [True]


@pytest.mark.parametrize("n", [1, 3])
async def test_an_agent_that_goes_while_its_call_is_recorded_was_not_delivered(house: House, n: int) -> None:
    claim = await house.claim()
    gone: list[Exchange] = []

    class Hanging(PassingStore):
        async def append_calls(self, calls: Sequence[Call]) -> None:
            assert all(call.delivered for call in calls)
            await house.store.append_calls(calls)
            gone[0].hang_up()

    app = house.gateway(cast(Any, Hanging(house.store)))
    house.say("It is sunny.")
    gone.append(Exchange(app, claim.key, f"{path(claim)}/v1/chat/completions", asking(n=n)))
    await gone[0].task
    assert [call.delivered for call in await calls_of(house, claim)] == [False] * n


@pytest.mark.parametrize("stream", [True, False])
async def test_an_abandoned_call_stops_after_its_grace_and_is_recorded_as_partial(house: House, stream: bool) -> None:
    claim = await house.claim()
    arrived = held_engine(house)
    if not stream:
        house.engine.hold_whole = True
    app = house.gateway(grace_s=0.0)
    call = Exchange(app, claim.key, f"{path(claim)}/v1/chat/completions", asking(stream=stream))
    await (call.started if stream else arrived).wait()
    call.hang_up()
    await call.task
    [partial] = await calls_of(house, claim)
    assert partial.finish_reason == "abandoned"
    assert len(partial.sampled_ids) == (1 if stream else 0)
    house.engine.gate = None
    house.engine.hold_whole = False
    retry = await answered(house, claim, asking(), **{"x-stainless-retry-count": "1"})
    assert retry["choices"][0]["message"]["content"] == "It is sunny."
    seeds = [request["sampling_params"]["seed"] for request in house.engine.requests]
    assert seeds[0] == seeds[1]


async def test_a_call_that_outlasts_its_deadline_is_a_504(house: House) -> None:
    claim = await house.claim()
    held_engine(house)
    house.engine.hold_whole = True
    app = house.gateway(deadline_s=0.05)
    reply = await house.http(app).post(f"{path(claim)}/v1/chat/completions", json=asking())
    assert reply.status_code == 504
    assert reply.json()["error"]["code"] == "deadline_exceeded"


async def test_identical_parallel_calls_stay_apart(house: House) -> None:
    claim = await house.claim()
    one, two = await asyncio.gather(answered(house, claim, asking()), answered(house, claim, asking()))
    assert one["id"] != two["id"]
    assert len(await calls_of(house, claim)) == 2


async def test_an_idempotency_key_makes_two_requests_one_call(house: House) -> None:
    claim = await house.claim()
    key = {"idempotency-key": "k1"}
    one, two = await asyncio.gather(answered(house, claim, asking(), **key), answered(house, claim, asking(), **key))
    later = await answered(house, claim, asking(), **key)
    other = await answered(house, claim, asking(), **{"idempotency-key": "k2"})
    assert one == two == later
    assert other["id"] != one["id"]
    assert len(house.engine.requests) == 2


# --- the other protocols ------------------------------------------------------------------------------------------------


async def test_a_response_is_continued_by_its_id_and_read_again(house: House) -> None:
    claim = await house.claim()
    body = {"model": "policy", "instructions": "be brief", "input": "hi"}
    first = await answered(house, claim, body, "responses")
    house.say("The answer is 42.")
    second = await answered(house, claim, {**body, "input": "go on", "previous_response_id": first["id"]}, "responses")
    calls = await calls_of(house, claim)
    assert [call.continuation for call in calls] == ["first_turn", "continued"]
    assert [message["role"] for message in calls[1].messages] == ["user"]
    again = await house.http().get(f"{path(claim)}/v1/responses/{second['id']}")
    assert again.json()["output"] == second["output"]


async def test_instructions_do_not_carry_over_to_the_next_response(house: House) -> None:
    claim = await house.claim()
    first = await answered(house, claim, {"model": "policy", "instructions": "be brief", "input": "hi"}, "responses")
    await answered(house, claim, {"model": "policy", "input": "on", "previous_response_id": first["id"]}, "responses")
    _, second = await calls_of(house, claim)
    assert [message["role"] for message in second.messages] == ["user", "assistant", "user"]
    assert second.continuation == "system_or_tools_changed"


async def test_a_response_of_another_attempt_is_not_found(house: House) -> None:
    one, other = await house.claim(replica=0), await house.claim(replica=1)
    first = await answered(house, one, {"model": "policy", "input": "hi"}, "responses")
    body = {"model": "policy", "input": "on", "previous_response_id": first["id"]}
    reply = await house.http().post(f"{path(other)}/v1/responses", json=body)
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "previous_response_not_found"
    assert repr(first["id"]) in reply.json()["error"]["message"]
    assert (await house.http().get(f"{path(other)}/v1/responses/{first['id']}")).status_code == 404


async def test_tokens_are_counted_as_the_call_will_have_them(house: House) -> None:
    claim = await house.claim()
    body = {"model": "policy", "system": "be brief", "messages": [{"role": "user", "content": "hi"}]}
    counted = await answered(house, claim, body, "messages/count_tokens")
    message = await answered(house, claim, {**body, "max_tokens": 50}, "messages")
    assert counted == {"input_tokens": message["usage"]["input_tokens"]}


async def test_a_completions_prompt_is_continued_by_its_text(house: House) -> None:
    claim = await house.claim()
    house.engine.answers = lambda _: house.renderer.encode(" sunny")
    first = await answered(
        house, claim, {"model": "policy", "prompt": "the weather is", "max_tokens": 5}, "completions"
    )
    text = "the weather is" + first["choices"][0]["text"]
    await answered(house, claim, {"model": "policy", "prompt": text + " and", "max_tokens": 5}, "completions")
    one, two = await calls_of(house, claim)
    assert two.parent_id == one.id
    assert house.engine.requests[1]["token_ids"][: one.prompt_tokens + len(one.sampled_ids)] == [
        *one.suffix_ids,
        *one.sampled_ids,
    ]


async def test_models_are_listed_in_the_shape_of_who_asks(house: House) -> None:
    base, http = f"{path(await house.claim())}/v1/models", house.http()
    anthropic = await http.get(base, headers={"anthropic-version": "2023-06-01"})
    assert anthropic.json()["data"][0]["type"] == "model"
    assert (await http.get(base)).json()["data"][0]["object"] == "model"
    assert (await http.get(f"{base}/policy")).json()["id"] == "policy"
    assert (await http.get(f"{base}/none")).status_code == 404
