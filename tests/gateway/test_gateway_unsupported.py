"""Parameters that the gateway cannot honour: named together where they are refused, in a header where they are dropped."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from gateway_house import House, path
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.gateway.policy.decoding import MAX_HEADER_BYTES, ignored_header, unsupported_error
from agentlightning.records import Sampling
from agentlightning.store.base import RolloutQuery

FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "custom"}, FUNCTION]},
    "responses": {"input": "hi", "tools": [{"type": "web_search"}, {"type": "function", "name": "weather"}]},
    "messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "tools": [{"type": "computer_20250124", "name": "computer"}, {"name": "weather", "input_schema": {}}],
    },
}


async def post(house: House, route: str, **body: Any) -> httpx.Response:
    claim = await house.claim(group=f"{len(house.engine.requests)}")
    return await house.http().post(f"{path(claim)}/v1/{route}", json={"model": "policy", **body})


async def test_one_answer_names_all_parameters_and_the_way_out(house: House) -> None:
    body = {**BODIES["chat/completions"], "top_a": 0.5, "chat_template": "x", "prompt_token_ids": [1]}
    error = (await post(house, "chat/completions", **body)).json()["error"]
    for name in ("tools[0]", "top_a", "chat_template", "prompt_token_ids: ", 'agent.unsupported_params = "drop"'):
        assert name in error["message"]
    assert error["code"] == "unsupported_value"


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_dropped_tools_are_named_in_a_header_and_recorded_and_functions_stay(
    house: House, route: str, stream: bool
) -> None:
    await house.serve_policy(unsupported_params="drop")
    answer = await post(house, route, stream=stream, **BODIES[route])
    assert (answer.status_code, answer.headers["x-agl-ignored"]) == (200, "tools[0]")
    prompt = house.renderer.decode(house.engine.requests[-1]["token_ids"], special=True)
    assert "weather" in prompt
    assert "computer" not in prompt
    [rollout] = await house.store.rollouts(RolloutQuery(run_id=house.run_id))
    [call] = await house.store.calls([rollout.id])
    assert call.overridden_params == {"tools[0]": BODIES[route]["tools"][0]}


TEMPERATURES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "temperature": 2.0, "top_p": 0.5},
    "completions": {"prompt": "hi", "temperature": 2.0, "top_p": 0.5},
    "responses": {"input": "hi", "temperature": 2.0, "top_p": 0.5},
    "messages": {**BODIES["messages"], "tools": [], "temperature": 0.5, "top_p": 0.5},
}


@pytest.mark.parametrize("route", TEMPERATURES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_temperature_that_the_runs_own_overrides_is_named_in_the_answer(
    house: House, route: str, stream: bool
) -> None:
    for setting in (None, "drop"):
        await house.serve_policy(unsupported_params=setting)
        answer = await post(house, route, **TEMPERATURES[route], stream=stream)
        assert (answer.status_code, answer.headers["x-agl-ignored"]) == (200, "temperature, top_p")
    same = {**TEMPERATURES[route], "temperature": 1, "top_p": 1.0}
    assert "x-agl-ignored" not in (await post(house, route, **same)).headers


async def test_a_run_that_says_error_refuses_another_temperature_in_training(house: House) -> None:
    await house.serve_policy(unsupported_params="error")
    body = TEMPERATURES["chat/completions"]
    answer = await post(house, "chat/completions", **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "temperature", "unsupported_value")
    assert "temperature: 2.0, top_p: 0.5 are not supported" in error["message"]
    claim = await house.claim(group="same")
    same = {"model": "policy", **body, "temperature": 1.0, "top_p": 1}
    assert (await house.http().post(f"{path(claim)}/v1/chat/completions", json=same)).status_code == 200
    greedy = await house.claim(group="greedy", sampling=Sampling(temperature=0.0), mode="eval")
    evaluated = await house.http().post(f"{path(greedy)}/v1/chat/completions", json={"model": "policy", **body})
    assert (evaluated.status_code, evaluated.headers["x-agl-ignored"]) == (200, "temperature, top_p")


async def test_truncation_is_accepted_while_the_prompt_fits_and_names_itself_where_it_does_not(house: House) -> None:
    assert (await post(house, "responses", input="hi", truncation="auto")).status_code == 200
    house.engine.refusals = [(400, {"error": {"message": "the prompt is longer than the context"}})]
    answer = await post(house, "responses", input="hi", truncation="auto")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "truncation", "context_length_exceeded")
    assert error["message"].startswith("truncation: auto would have to cut the prompt of ")


@given(st.lists(st.text(max_size=60), max_size=60))
def test_the_header_is_safe_and_bounded_whatever_the_names_hold(names: list[str]) -> None:
    value = ignored_header(names)
    assert len(value) <= MAX_HEADER_BYTES
    assert all(32 <= byte < 127 for byte in value)


def test_an_error_names_a_bounded_number_of_parameters() -> None:
    error = unsupported_error({f"tools[{index}]": {"type": "x" * 1000} for index in range(1000)}, {})
    assert len(error.message) < 3000
    assert "and 980 more" in error.message
