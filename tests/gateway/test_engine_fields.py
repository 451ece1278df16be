"""vLLM's fields beside OpenAI's: applied and recorded, recorded where they change no completion, or refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from gateway_house import House, path

from agentlightning.records import Claim

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "completions": {"prompt": "hi"},
    "responses": {"input": "hi"},
}
BOUNDS: dict[str, Any] = {"min_tokens": 2, "allowed_token_ids": [9, 5, 5], "ignore_eos": True}


async def post(house: House, claim: Claim, route: str, **body: Any) -> httpx.Response:
    return await house.http().post(f"{path(claim)}/v1/{route}", json={"model": "policy", **BODIES[route], **body})


async def test_bounds_on_tokens_reach_the_engine_and_the_record(house: House) -> None:
    for route in BODIES:
        claim = await house.claim(group=route)
        stops = {} if route == "responses" else {"stop_token_ids": [7]}
        assert (await post(house, claim, route, **BOUNDS, **stops)).status_code == 200
        applied = {"min_tokens": 2, "allowed_token_ids": [5, 9], "ignore_eos": True}
        [call] = await house.store.calls([claim.rollout.id])
        assert call.decoding["logits"] == {**applied, **stops}
        params = house.engine.requests[-1]["sampling_params"]
        assert applied.items() <= params.items()
        assert params["stop_token_ids"] == stops.get("stop_token_ids", [])


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"min_tokens": 2, "stop": "x"}, "min_tokens"),
        ({"min_tokens": 2, "max_tokens": 1}, "min_tokens"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
    ],
)
async def test_bounds_that_cannot_hold_are_refused(house: House, given: dict[str, Any], param: str) -> None:
    answer = await post(house, await house.claim(), "chat/completions", **given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_fields_of_scheduling_are_accepted_and_recorded(house: House) -> None:
    given = {"priority": 3, "cache_salt": "s", "session_id": "a", "stream_interval": 4}
    for route in BODIES:
        claim = await house.claim(group=route)
        assert (await post(house, claim, route, **given)).status_code == 200
        [call] = await house.store.calls([claim.rollout.id])
        assert call.overridden_params == given


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shown", [False, True])
async def test_what_stopped_a_completion_is_in_its_text_where_the_request_says_so(
    house: House, stream: bool, shown: bool
) -> None:
    stop_id = house.renderer.encode("It is sunny.")[-1]
    asked: list[tuple[dict[str, Any], str]] = [
        ({"stop": "sun"}, "It is sun" if shown else "It is "),
        ({"stop_token_ids": [stop_id]}, "It is sunny." if shown else "It is sunny"),
    ]
    for number, (given, text) in enumerate(asked):
        house.engine.answers = lambda _: house.renderer.encode("It is sunny.")
        answer = await post(
            house, await house.claim(group=f"{number}"), "completions", stream=stream,
            include_stop_str_in_output=shown, **given,
        )  # fmt: skip
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        parts = [chunk["choices"][0]["text"] for chunk in (chunks if stream else [answer.json()])]
        assert "".join(parts) == text


async def test_a_retry_that_asks_for_alternatives_is_sampled_again(house: House) -> None:
    claim = await house.claim()
    asked = {"model": "policy", **BODIES["chat/completions"], "logprobs": True, "top_logprobs": 2}
    url = f"{path(claim)}/v1/chat/completions"
    await house.http().post(url, json=asked, headers={"idempotency-key": "k"})
    again = await house.http().post(url, json=asked, headers={"x-stainless-retry-count": "1"})
    assert again.status_code == 200
    calls = await house.store.calls([claim.rollout.id])
    assert [call.delivered for call in calls] == [False, True]
    kept = await house.http().post(url, json=asked, headers={"idempotency-key": "k"})
    assert (kept.status_code, kept.json()["error"]["code"]) == (409, "alternatives_not_kept")
    assert kept.headers["x-should-retry"] == "false"
