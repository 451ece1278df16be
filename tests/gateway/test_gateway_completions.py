"""Completions of several prompts, and with the prompt before them: one recorded call for each prompt."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest
from gateway_house import END, House, path

from agentlightning.records import Claim

PROMPTS = ["The weather is", "The answer is"]


def scripted(house: House) -> None:
    """Answers each prompt with its own last token and an end."""
    house.engine.answers = lambda request: [request["token_ids"][-1], *house.renderer.encode(" so"), END]


def texts(house: House) -> list[str]:
    return [house.renderer.token_text(house.renderer.encode(prompt)[-1]) + " so" for prompt in PROMPTS]


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
async def test_each_prompt_is_a_recorded_call_and_its_choices_are_in_order(house: House, stream: bool) -> None:
    claim = await house.claim()
    scripted(house)
    ids = [house.renderer.encode(prompt) for prompt in PROMPTS]
    for prompt in (PROMPTS, ids):
        choices = await complete(house, claim, prompt=prompt, n=2, stream=stream)
        assert [choices[index]["text"] for index in range(4)] == [text for text in texts(house) for _ in range(2)]
        assert {choice["finish_reason"] for choice in choices.values()} == {"stop"}
    calls = await house.store.calls([claim.rollout.id])
    assert sorted(tuple(call.suffix_ids) for call in calls) == sorted(tuple(one) for one in ids for _ in range(4))
    assert all(call.delivered for call in calls)
    assert len([call for call in calls if "." not in call.id]) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_and_its_logprobs_before_the_text(house: House, stream: bool) -> None:
    claim = await house.claim()
    scripted(house)
    plain = await complete(house, claim, prompt=PROMPTS, echo=True, stream=stream)
    assert [plain[index]["text"] for index in range(2)] == [
        prompt + text for prompt, text in zip(PROMPTS, texts(house), strict=True)
    ]
    [choice] = (await complete(house, claim, prompt=PROMPTS[0], echo=True, logprobs=1, stream=stream)).values()
    logprobs, prompt_ids = choice["logprobs"], house.renderer.encode(PROMPTS[0])
    assert "".join(logprobs["tokens"]) == choice["text"] == plain[0]["text"]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(logprobs["tokens"]) - 1)
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"][len(prompt_ids)] == len(PROMPTS[0])
    follower = house.renderer.token_text(prompt_ids[1] + 1)
    assert logprobs["top_logprobs"][1] == {logprobs["tokens"][1]: -0.5, follower: -0.25}
    assert not any(math.isnan(one) for one in logprobs["token_logprobs"][1:])


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_and_echo_score_the_prompt_without_a_record(house: House, stream: bool) -> None:
    claim = await house.claim()
    choices = await complete(house, claim, prompt=PROMPTS, echo=True, max_tokens=0, logprobs=0, stream=stream)
    assert [choices[index]["text"] for index in range(2)] == PROMPTS
    assert [choices[index]["finish_reason"] for index in range(2)] == ["length"] * 2
    assert choices[1]["logprobs"]["token_logprobs"][1:] == [-0.5] * (len(house.renderer.encode(PROMPTS[1])) - 1)
    assert await house.store.calls([claim.rollout.id]) == []


async def test_token_ids_and_usage_are_those_of_every_prompt(house: House) -> None:
    claim = await house.claim()
    scripted(house)
    asked: Any = {"model": "policy", "prompt": PROMPTS, "extra_body": {"return_token_ids": True}}
    client = house.openai(claim).completions
    whole: Any = await client.create(**asked)
    ids = [house.renderer.encode(prompt) for prompt in PROMPTS]
    assert [choice.prompt_token_ids for choice in whole.choices] == ids
    assert whole.usage.prompt_tokens == sum(map(len, ids))
    assert whole.usage.completion_tokens == sum(len(choice.token_ids) for choice in whole.choices)
    stream: Any = await client.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    firsts = {choice.index: choice.prompt_token_ids for chunk in reversed(chunks) for choice in chunk.choices}
    assert [firsts[index] for index in range(2)] == ids
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("headers", [{"x-stainless-retry-count": "1"}, {"idempotency-key": "k"}])
async def test_a_retry_gets_the_recorded_completion_of_every_prompt(house: House, headers: dict[str, str]) -> None:
    claim = await house.claim()
    scripted(house)
    asked = {"model": "policy", "prompt": PROMPTS, "echo": True}
    url = f"{path(claim)}/v1/completions"
    first = await house.http().post(url, json=asked, headers={name: headers[name] for name in headers if "key" in name})
    house.say("other")
    again = await house.http().post(url, json=asked, headers=headers)
    told = [[choice["text"] for choice in one.json()["choices"]] for one in (first, again)]
    assert told[0] == told[1]
    assert len(house.engine.requests) == len(await house.store.calls([claim.rollout.id])) == 2


async def test_where_one_prompt_fails_nothing_was_delivered(house: House) -> None:
    claim = await house.claim()
    scripted(house)
    with pytest.raises(openai.BadRequestError, match="prompt: expected"):
        await complete(house, claim, prompt=[PROMPTS[0], ""])
    house.engine.refusals.append((400, {"error": {"message": "too long", "type": "BadRequestError"}}))
    with pytest.raises(openai.APIStatusError):
        await complete(house, claim, prompt=PROMPTS)
    assert not any(call.delivered for call in await house.store.calls([claim.rollout.id]))


async def test_a_suffix_is_dropped_by_name_where_the_run_says_so(house: House) -> None:
    await house.serve_policy(unsupported_params="drop")
    claim = await house.claim()
    answer = await house.http().post(
        f"{path(claim)}/v1/completions", json={"model": "policy", "prompt": PROMPTS, "suffix": "b"}
    )
    assert (answer.status_code, answer.headers["x-agl-ignored"]) == (200, "suffix")
