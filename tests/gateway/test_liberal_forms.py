"""Forms that clients write in place of the documented ones, where their meaning is certain: they are served alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
from external_house import recorded
from gateway_house import House, path

from agentlightning.records import Claim

HI: Any = {"model": "policy", "messages": [{"role": "user", "content": "Paris?"}]}
GOOGLE: Any = {"contents": [{"role": "user", "parts": [{"text": "Paris?"}]}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
SUNNY = "It is sunny."


async def post(house: House, claim: Claim, route: str, body: Any, **more: Any) -> Any:
    reply = await house.http().post(path(claim) + route, json=body, **more)
    assert reply.status_code == 200, reply.text
    return reply.json()


# --- paths, keys and probes --------------------------------------------------------------------------------------------


MESSAGES = {**HI, "max_tokens": 9}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions/", HI),
        ("//v1//chat/completions//", HI),
        ("/openai/deployments/policy/chat/completions?api-version=2025-01-01", HI),
        ("/openai/v1/chat/completions", HI),
        ("/v1/openai/deployments/policy/chat/completions", HI),
        ("/v1beta/openai/chat/completions", HI),
        ("/v1/v1/chat/completions", HI),
        ("/chat/completions", HI),
        ("/v1/v1/messages", MESSAGES),
        ("/messages", MESSAGES),
        ("/responses", {"model": "policy", "input": "Paris?"}),
        ("/v1/v1beta/models/policy:generateContent", GOOGLE),
    ],
)
async def test_slashes_paths_of_azure_and_google_and_v1_twice_or_never_reach_the_same_route(
    house: House, route: str, body: Any
) -> None:
    claim = await house.claim()
    assert SUNNY in str(await post(house, claim, route, body))
    assert [call.model for call in await recorded(house, claim)] == ["policy"]


async def test_a_deployment_of_azure_names_the_model_and_api_key_is_a_key(house: House) -> None:
    claim = await house.claim()
    http = house.http(adds_keys=False)
    body = {"messages": HI["messages"]}
    url = "/openai/deployments/policy/chat/completions?api-version=1"
    reply = await http.post(url, json=body, headers={"api-key": claim.key})
    assert (reply.status_code, reply.json()["model"]) == (200, "policy")
    assert [call.model for call in await recorded(house, claim)] == ["policy"]
    assert (await http.post(url, json=body, headers={"api-key": "other"})).status_code == 401


@pytest.mark.parametrize(
    "route", ["", "/", "/v1", "/v1/models", "/v1/chat/completions", "/v1/messages", "/v1beta/models"]
)
async def test_a_head_probe_is_answered_with_200_and_leaves_nothing_in_the_record(house: House, route: str) -> None:
    claim = await house.claim()
    assert (await house.http(adds_keys=False).head(path(claim) + route)).status_code == 200
    assert (await house.http().head(f"{path(claim)}/v1/nothing")).status_code == 404
    assert await house.store.spans([claim.rollout.id]) == []


async def test_interactions_of_google_are_refused_with_one_sentence_in_its_own_shape(house: House) -> None:
    claim = await house.claim()
    reply = await house.http().post(f"{path(claim)}/v1beta/interactions", json={"model": "policy", "input": "Paris?"})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["status"]) == (404, 404, "NOT_FOUND")
    assert error["message"].startswith("interactions: not served here; call models/MODEL:generateContent")


# --- numbers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {**HI, "max_tokens": 2.0, "n": 1.0, "stop_token_ids": [2.0, 2]}),
        ("/v1/completions", {"model": "policy", "prompt": "Paris?", "max_tokens": 2.0}),
        ("/v1/responses", {"model": "policy", "input": "Paris?", "max_output_tokens": 2e0}),
        ("/v1/messages", {**HI, "max_tokens": 2.0}),
        ("/v1beta/models/policy:generateContent", {**GOOGLE, "generationConfig": {"maxOutputTokens": 2.0}}),
        ("/v1/tokens/generate", {"prompt_ids": [5.0, 6], "max_tokens": 2.0}),
    ],
)
async def test_a_whole_number_may_be_written_as_a_float(house: House, route: str, body: Any) -> None:
    claim = await house.claim()
    await post(house, claim, route, body)
    (call,) = await recorded(house, claim)
    assert (call.sampling.max_tokens, len(call.sampled_ids)) == (2, 2)


# --- arguments of tool calls --------------------------------------------------------------------------------------------

ARGUMENTS = {"city": "Paris"}


# --- functions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_functions_and_function_call_are_tools_in_the_record_and_functions_for_the_client(
    house: House, streamed: bool
) -> None:
    house.say(CALL, SUNNY)
    claim = await house.claim()
    url = f"{path(claim)}/v1/chat/completions"
    asked = {**HI, "functions": [FUNCTION], "function_call": "auto", "stream": streamed}
    reply = await house.http().post(url, json=asked)
    assert reply.status_code == 200, reply.text
    if streamed:
        chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
        parts = ("".join(delta.get(key) or "" for delta in deltas) for key in ("name", "arguments"))
        called = dict(zip(("name", "arguments"), parts, strict=True))
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        called = reply.json()["choices"][0]["message"]["function_call"]
        reason = reply.json()["choices"][0]["finish_reason"]
    assert (called["name"], json.loads(called["arguments"]), reason) == ("weather", ARGUMENTS, "function_call")
    turn = [{"role": "assistant", "content": None, "function_call": called}]
    turn.append({"role": "function", "name": "weather", "content": "sun"})
    body = await post(
        house, claim, "/v1/chat/completions", {**asked, "stream": False, "messages": HI["messages"] + turn}
    )
    assert body["choices"][0]["message"]["content"] == SUNNY
    calls = await recorded(house, claim)
    assert [call.continuation for call in calls] == ["first_turn", "continued"]
    assert calls[0].tools == [TOOL]
    assert [message["role"] for message in calls[1].messages] == ["tool"]


async def test_a_named_function_call_forces_it_and_an_unknown_one_is_refused(house: House) -> None:
    claim = await house.claim()
    url = f"{path(claim)}/v1/chat/completions"
    for given, param in (
        ({"function_call": {"name": "other"}}, "function_call"),
        ({"function_call": 1}, "function_call"),
        ({"tools": [TOOL]}, "functions"),
    ):
        reply = await house.http().post(url, json={**HI, "functions": [FUNCTION], **given})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


# --- Google -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"contents": {"role": "user", "parts": {"text": "Paris?"}}},
        {"contents": [{"parts": {"text": "Paris?"}}]},
        {"contents": "Paris?"},
        {"contents": ["Paris?"]},
        {"contents": {"parts": ["Paris?"]}},
    ],
)
async def test_contents_and_parts_of_google_may_be_one_object(house: House, body: Any) -> None:
    claim = await house.claim()
    system = {"systemInstruction": {"parts": {"text": "Be brief."}}, "tools": {"functionDeclarations": [FUNCTION]}}
    await post(house, claim, "/v1beta/models/policy:generateContent", {**body, **system})
    (call,) = await recorded(house, claim)
    assert [(one["role"], one["content"]) for one in call.messages] == [("system", "Be brief."), ("user", "Paris?")]


async def test_a_stream_of_google_without_events_is_one_array_of_responses(house: House) -> None:
    claim = await house.claim()
    reply = await house.http().post(f"{path(claim)}/v1beta/models/policy:streamGenerateContent", json=GOOGLE)
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
    chunks = reply.json()
    texts = [part["text"] for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    assert len(chunks) > 1
    assert "".join(texts) == SUNNY
    assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"
    other = await house.http().post(f"{path(claim)}/v1beta/models/policy:streamGenerateContent?alt=proto", json=GOOGLE)
    assert (other.status_code, other.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
