"""Clients that train over the gateway get ids and log-probabilities as vLLM gives them, exactly those that are recorded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_house import END, House, path

from agentlightning.records import Call, Claim

QUESTION: Any = [{"role": "user", "content": "hi"}]
IDS = {"return_token_ids": True}


async def chat(house: House, claim: Claim, **asked: Any) -> dict[str, Any]:
    answer = await house.http().post(
        f"{path(claim)}/v1/chat/completions", json={"model": "policy", "messages": QUESTION, **asked}
    )
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def the_call(house: House, claim: Claim) -> Call:
    (call,) = await house.store.calls([claim.rollout.id])
    return call


async def test_chat_returns_the_ids_that_are_recorded(house: House) -> None:
    claim = await house.claim()
    body = await chat(house, claim, **IDS)
    call = await the_call(house, claim)
    assert body["prompt_token_ids"] == call.suffix_ids
    assert body["choices"][0]["token_ids"] == call.sampled_ids
    assert call.sampled_ids[-1] == END


async def test_logprobs_are_aligned_with_ids_and_may_be_named_by_them(house: House) -> None:
    body = await chat(house, await house.claim(), logprobs=True, return_tokens_as_token_ids=True, **IDS)
    [choice] = body["choices"]
    named = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert named == [f"token_id:{index}" for index in choice["token_ids"]]


async def test_streamed_chunks_have_the_same_ids_the_prompts_only_first(house: House) -> None:
    claim = await house.claim()
    stream = await house.openai(claim).chat.completions.create(
        model="policy", messages=QUESTION, stream=True, stop=["sunny"], extra_body=IDS
    )
    chunks = [chunk.model_dump() async for chunk in stream]
    call = await the_call(house, claim)
    assert chunks[0]["prompt_token_ids"] == call.suffix_ids
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert [index for chunk in chunks for index in chunk["choices"][0].get("token_ids") or ()] == call.sampled_ids
    assert "".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in chunks) == "It is "


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_have_ids_in_their_choices(house: House, stream: bool) -> None:
    claim = await house.claim()
    asked = {**IDS, "return_tokens_as_token_ids": True}
    answer: Any = await house.openai(claim).completions.create(
        model="policy", prompt="The weather is", logprobs=1, stream=stream, extra_body=asked
    )
    chunks = [chunk async for chunk in answer] if stream else [answer]
    call = await the_call(house, claim)
    assert chunks[0].choices[0].prompt_token_ids == call.suffix_ids
    assert [index for chunk in chunks for index in chunk.choices[0].token_ids] == call.sampled_ids
    named = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    assert named == [f"token_id:{index}" for index in call.sampled_ids]


@pytest.mark.parametrize("protocol", ["chat", "completions"])
async def test_prompt_logprobs_have_a_table_for_every_token_but_the_first(house: House, protocol: str) -> None:
    claim = await house.claim()
    if protocol == "chat":
        tables = (await chat(house, claim, prompt_logprobs=1))["prompt_logprobs"]
    else:
        answer = await house.http().post(
            f"{path(claim)}/v1/completions", json={"model": "policy", "prompt": "The weather is", "prompt_logprobs": 1}
        )
        tables = answer.json()["choices"][0]["prompt_logprobs"]
    call = await the_call(house, claim)
    assert tables[0] is None
    text = house.renderer.token_text
    assert tables[1:] == [
        {
            str(index): {"logprob": -0.5, "rank": 2, "decoded_token": text(index)},
            str(index + 1): {"logprob": -0.25, "rank": 1, "decoded_token": text(index + 1)},
        }
        for index in call.suffix_ids[1:]
    ]


async def test_an_engine_that_gives_no_prompt_logprobs_is_named(house: House) -> None:
    house.engine.raw = (
        '{"choices": [{"token_ids": [2], "logprobs": {"content": [{"logprob": -1}]}, "finish_reason": "stop"}]}'
    )
    answer = await house.http().post(
        f"{path(await house.claim())}/v1/chat/completions",
        json={"model": "policy", "messages": QUESTION, "prompt_logprobs": 1},
    )
    assert answer.status_code == 502
    assert "was asked for prompt_logprobs of" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_gets_the_ids_of_the_recorded_call(house: House, stream: bool) -> None:
    claim = await house.claim()
    body = {"model": "policy", "messages": QUESTION, "logprobs": True, "stream": stream, **IDS}
    url = f"{path(claim)}/v1/chat/completions"
    first = await house.http().post(url, json=body)
    again = await house.http().post(url, json=body, headers={"x-stainless-retry-count": "1"})
    assert len(await house.store.calls([claim.rollout.id])) == 1
    if not stream:
        assert again.json() == first.json()
        return
    assert joined(again.text) == joined(first.text)


def joined(events: str) -> tuple[list[int], list[int]]:
    """Ids of the prompt and of the completion, over all chunks of a stream."""
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    sampled = [index for chunk in chunks for index in chunk["choices"][0].get("token_ids") or ()]
    return chunks[0]["prompt_token_ids"], sampled
