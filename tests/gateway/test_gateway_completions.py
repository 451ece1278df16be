"""Completions with the prompt before them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from gateway_house import END, House, path

from agentlightning.records import Claim

PROMPT = "The weather is"


def scripted(house: House) -> None:
    """Answers each prompt with its own last token and an end."""
    house.engine.answers = lambda request: [request["token_ids"][-1], *house.renderer.encode(" so"), END]


async def complete(house: House, claim: Claim, **asked: Any) -> dict[int, dict[str, Any]]:
    """The choices by index, put together where they are streamed."""
    told: Any = await house.openai(claim).completions.create(model="policy", **asked)
    if not asked.get("stream"):
        assert [choice.index for choice in told.choices] == list(range(len(told.choices)))
        return {choice.index: choice.model_dump() for choice in told.choices}
    found: dict[int, dict[str, Any]] = {}
    async for chunk in told:
        for choice in chunk.choices:
            one = found.setdefault(choice.index, {"text": "", "finish_reason": None, "logprobs": {}})
            one["text"] += choice.text
            one["finish_reason"] = choice.finish_reason or one["finish_reason"]
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                one["logprobs"].setdefault(name, []).extend(values)
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_and_its_logprobs_before_the_text(house: House, stream: bool) -> None:
    claim = await house.claim()
    scripted(house)
    prompt_ids = house.renderer.encode(PROMPT)
    whole = PROMPT + house.renderer.token_text(prompt_ids[-1]) + " so"
    plain = await complete(house, claim, prompt=PROMPT, echo=True, n=2, stream=stream)
    assert [plain[index]["text"] for index in range(2)] == [whole] * 2
    [choice] = (await complete(house, claim, prompt=prompt_ids, echo=True, logprobs=1, stream=stream)).values()
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == whole
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(logprobs["tokens"]) - 1)
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][len(prompt_ids)] == len(PROMPT)
    follower = house.renderer.token_text(prompt_ids[1] + 1)
    assert logprobs["top_logprobs"][1] == {logprobs["tokens"][1]: -0.5, follower: -0.25}
    assert not any(math.isnan(one) for one in logprobs["token_logprobs"][1:])
    calls = await house.store.calls([claim.rollout.id])
    assert {call.completion["content"] for call in calls} == {whole.removeprefix(PROMPT)}


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_and_echo_score_the_prompt_without_a_record(house: House, stream: bool) -> None:
    claim = await house.claim()
    asked = {"echo": True, "max_tokens": 0, "logprobs": 0, "stream": stream}
    [choice] = (await complete(house, claim, prompt=PROMPT, **asked)).values()
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert choice["logprobs"]["token_logprobs"][1:] == [-0.5] * (len(house.renderer.encode(PROMPT)) - 1)
    assert await house.store.calls([claim.rollout.id]) == []


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "k"}])
async def test_a_retry_gets_the_recorded_completion_with_its_prompt(house: House, headers: dict[str, str]) -> None:
    claim = await house.claim()
    scripted(house)
    asked = {"model": "policy", "prompt": PROMPT, "echo": True}
    url = f"{path(claim)}/v1/completions"
    first = await house.http().post(url, json=asked, headers={name: headers[name] for name in headers if "key" in name})
    house.say("other")
    again = await house.http().post(url, json=asked, headers=headers)
    assert [one.json()["choices"][0]["text"] for one in (first, again)] == [first.json()["choices"][0]["text"]] * 2
    assert len(house.engine.requests) == len(await house.store.calls([claim.rollout.id])) == 1
