"""Agents that own their tokens: ids in, ids and log-probabilities out, recorded as an exact prefix graph."""

from __future__ import annotations

import json
from typing import Any

from gateway_house import END, House, path

from agentlightning.records import Claim, Sampling

PROMPT = [5, 6, 7]


async def generate(house: House, claim: Claim, status: int = 200, headers: Any = None, **asked: Any) -> Any:
    answer = await house.http().post(f"{path(claim)}/v1/tokens/generate", json=asked, headers=headers)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_the_engine_reads_exactly_these_ids_and_all_that_is_sampled_comes_back(house: House) -> None:
    claim = await house.claim()
    body = await generate(house, claim, prompt_ids=PROMPT, max_tokens=50, stop_token_ids=[9])
    (call,) = await house.store.calls([claim.rollout.id])
    (request,) = house.engine.requests
    assert request["token_ids"] == PROMPT
    assert request["sampling_params"]["stop_token_ids"] == [9]
    [choice] = body["choices"]
    assert (choice["token_ids"], choice["logprobs"]) == (call.sampled_ids, [-0.5] * len(call.sampled_ids))
    assert call.sampled_ids[-1] == END
    assert (call.protocol, call.suffix_ids, body["id"]) == ("tokens", PROMPT, f"tok-{call.id}")


async def test_a_prompt_that_begins_with_an_earlier_call_continues_it_also_after_a_restart(house: House) -> None:
    claim = await house.claim()
    first = await generate(house, claim, prompt_ids=PROMPT)
    whole = [*PROMPT, *first["choices"][0]["token_ids"]]
    await generate(house, claim, prompt_ids=[*whole, 8])
    house.app = house.gateway()
    await generate(house, claim, prompt_ids=[*whole, 8, 9])
    calls = await house.store.calls([claim.rollout.id])
    assert [call.parent_id for call in calls] == [None, calls[0].id, calls[0].id]
    assert [call.suffix_ids for call in calls] == [PROMPT, [8], [8, 9]]


async def test_a_stream_has_the_same_ids_and_ends_with_reasons_and_usage(house: House) -> None:
    claim = await house.claim()
    answer = await house.http().post(
        f"{path(claim)}/v1/tokens/generate", json={"prompt_ids": PROMPT, "stream": True, "n": 2}
    )
    *lines, done = [line[6:] for line in answer.text.splitlines() if line]
    chunks = [json.loads(line) for line in lines]
    sampled: dict[int, list[int]] = {0: [], 1: []}
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"])
        sampled[choice["index"]] += choice["token_ids"]
    calls = await house.store.calls([claim.rollout.id])
    assert list(sampled.values()) == [call.sampled_ids for call in calls]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-3:-1]] == ["stop", "stop"]
    assert chunks[-1]["usage"]["prompt_tokens"] == len(PROMPT)
    assert done == "[DONE]"


async def test_the_rollouts_sampling_holds_and_what_was_asked_is_recorded(house: House) -> None:
    claim = await house.claim(sampling=Sampling(max_tokens=2))
    body = await generate(house, claim, prompt_ids=PROMPT, max_tokens=50, temperature=0.3)
    (call,) = await house.store.calls([claim.rollout.id])
    assert (len(call.sampled_ids), body["choices"][0]["finish_reason"]) == (2, "length")
    assert (call.sampling.temperature, call.overridden_params) == (1.0, {"temperature": 0.3})


async def test_a_retry_gets_the_recorded_samples(house: House) -> None:
    claim = await house.claim()
    asked = {"prompt_ids": PROMPT, "n": 2}
    first = await generate(house, claim, **asked)
    again = await generate(house, claim, headers={"x-stainless-retry-count": "1"}, **asked)
    assert again == first
    assert len(await house.store.calls([claim.rollout.id])) == 2


async def test_logprobs_of_given_tokens_are_computed_and_nothing_is_recorded(house: House) -> None:
    claim = await house.claim()
    answer = await house.http().post(f"{path(claim)}/v1/tokens/logprobs", json={"token_ids": PROMPT})
    assert answer.json()["logprobs"] == [None, -0.5, -0.5]
    assert await house.store.calls([claim.rollout.id]) == []


async def test_ids_beyond_the_vocabulary_are_refused_before_an_engine_or_a_learner_reads_them(house: House) -> None:
    claim = await house.claim()
    refused = await generate(house, claim, 400, prompt_ids=[5, 1_000_000])
    assert refused["error"]["message"] == "prompt_ids: expected ids of the model's vocabulary, got 1000000"
    http, root = house.http(), f"{path(claim)}/v1"
    for route, field, value in (
        ("tokens/logprobs", "token_ids", [5, 1_000_000]),
        ("completions", "prompt", [5, 1_000_000]),
        ("completions", "prompt", [[1_000_000]]),
    ):
        reply = await http.post(f"{root}/{route}", json={field: value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text
    assert house.engine.requests == []
    assert await house.store.calls([claim.rollout.id]) == []
