"""Google's protocol through the gateway: keys, exact continuations, streams, external models, and the attempt's root."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from aiohttp import web
from external_house import SECRET, recorded, serve
from external_server import ExternalServer, sse
from gateway_house import House, path

from agentlightning.protocols.base import EventReader
from agentlightning.records import Claim
from agentlightning.store.gateway_events import UNKNOWN_ROUTE

HI: Any = {"contents": [{"role": "user", "parts": [{"text": "Paris?"}]}]}
TOOLS = [{"functionDeclarations": [{"name": "weather", "parametersJsonSchema": {"type": "object"}}]}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'


def url(claim: Claim, method: str = "generateContent", model: str = "policy") -> str:
    return f"{path(claim)}/v1beta/models/{model}:{method}"


def chunks(reply: httpx.Response) -> list[Any]:
    return [json.loads(one) for one in EventReader().feed(reply.content)]


def parts(reply: httpx.Response) -> list[Any]:
    return list(reply.json()["candidates"][0]["content"]["parts"])


async def test_a_call_is_answered_and_recorded_with_its_tokens(house: House) -> None:
    claim = await house.claim()
    reply = await house.http().post(url(claim), json=HI)
    assert (reply.status_code, parts(reply)) == (200, [{"text": "It is sunny."}])
    (call,) = await recorded(house, claim)
    assert (call.protocol, call.model, len(call.sampled_ids)) == (
        "generate_content", "policy", reply.json()["usageMetadata"]["candidatesTokenCount"],
    )  # fmt: skip
    assert reply.json()["responseId"] == call.id


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_function_call_and_its_response_continue_the_exact_ids(house: House, streamed: bool) -> None:
    house.say(CALL, "It is sunny.", "Bye.")
    claim, http = await house.claim(), house.http()
    contents: list[Any] = list(HI["contents"])
    for turn in range(3):
        asked = {"contents": contents, "tools": TOOLS}
        if streamed:
            reply = await http.post(f"{url(claim, 'streamGenerateContent')}?alt=sse", json=asked)
            contents += [chunk["candidates"][0]["content"] for chunk in chunks(reply)]
        else:
            contents.append((await http.post(url(claim), json=asked)).json()["candidates"][0]["content"])
        called = [part["functionCall"] for part in contents[-1]["parts"] if "functionCall" in part]
        assert bool(called) == (turn == 0)
        results = [
            {"functionResponse": {"id": one["id"], "name": one["name"], "response": {"output": "sun"}}}
            for one in called
        ]
        contents.append({"role": "user", "parts": results or [{"text": "and?"}]})
    calls = await recorded(house, claim)
    assert [call.fork_cause for call in calls] == [None] * 3
    assert [call.parent_id for call in calls] == [None, calls[0].id, calls[1].id]
    assert calls[1].untrained_tokens == 0


@pytest.mark.parametrize("how", ["x-goog-api-key", "query", "bearer"])
async def test_the_key_may_come_as_googles_sdks_send_it(house: House, how: str) -> None:
    claim = await house.claim()
    headers = {"x-goog-api-key": {"x-goog-api-key": claim.key}, "bearer": {"authorization": f"Bearer {claim.key}"}}
    query = f"?key={claim.key}" if how == "query" else ""
    http = house.http(adds_keys=False)
    reply = await http.post(f"/v1beta/models/policy:generateContent{query}", json=HI, headers=headers.get(how, {}))
    assert reply.status_code == 200
    assert len(await recorded(house, claim)) == 1
    refused = await http.post("/v1beta/models/policy:generateContent", json=HI)
    assert (refused.status_code, refused.json()["error"]["status"]) == (401, "UNAUTHENTICATED")


async def test_models_are_listed_in_googles_shape(house: House) -> None:
    claim, http = await house.claim(), house.http()
    (listed,) = (await http.get(f"{path(claim)}/v1beta/models")).json()["models"]
    assert listed["name"] == "models/policy"
    assert (await http.get(f"{path(claim)}/v1beta/models/policy")).json() == listed
    by_key = await house.http(adds_keys=False).get(f"{path(claim)}/v1/models", headers={"x-goog-api-key": claim.key})
    assert by_key.json() == {"models": [listed]}
    missing = await http.get(f"{path(claim)}/v1beta/models/other")
    assert (missing.status_code, missing.json()["error"]["status"]) == (404, "NOT_FOUND")


# --- the attempt's root -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("under", ["", "/", "/v1", "/v1/", "/v1beta"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_program_that_looks_for_its_base_url_finds_it(house: House, method: str, under: str) -> None:
    claim = await house.claim()
    reply = await house.http(adds_keys=False).request(method, path(claim) + under)
    assert reply.status_code == 200
    assert [span.name for span in await house.store.spans([claim.rollout.id])].count(UNKNOWN_ROUTE) == 0


# --- external models -----------------------------------------------------------------------------------------------------

ANSWER: Any = {
    "candidates": [{"content": {"parts": [{"text": "yes"}], "role": "model"}, "finishReason": "STOP"}],
    "usageMetadata": {"promptTokenCount": 11, "candidatesTokenCount": 7, "totalTokenCount": 18},
}


@pytest.fixture
async def gemini(house: House, external: ExternalServer) -> Claim:
    address = external.url.removesuffix("/v1")
    await serve(
        house, "google", url=f"{address}/v1beta", models=["gemini-*"], key_env="JUDGE_KEY", protocol="google",
        rename="gemini-3",
    )  # fmt: skip
    external.refusals.append(web.json_response(ANSWER))
    return await house.claim()


async def test_an_external_model_gets_the_body_as_it_came_under_its_own_name_and_key(
    house: House, external: ExternalServer, gemini: Claim
) -> None:
    asked = {**HI, "generationConfig": {"topK": 3}, "cachedContent": "c"}
    reply = await house.http().post(url(gemini, model="gemini-pro"), json=asked)
    assert (reply.status_code, reply.json()) == (200, ANSWER)
    (seen,) = external.requests
    assert (seen.path, seen.json, seen.headers["x-goog-api-key"]) == (
        "/v1beta/models/gemini-3:generateContent", asked, SECRET,
    )  # fmt: skip
    (call,) = await recorded(house, gemini)
    assert (call.protocol, call.policy, call.completion["content"]) == ("generate_content", "", "yes")
    assert call.usage == {"prompt_tokens": 11, "sampled_tokens": 7}


async def test_an_external_stream_goes_through_as_it_is_and_is_recorded_before_it_ends(
    house: House, external: ExternalServer, gemini: Claim
) -> None:
    half = {"candidates": [{"content": {"parts": [{"text": "oh "}], "role": "model"}}]}
    events = sse(half) + sse(ANSWER)
    external.refusals[0] = web.Response(body=events, headers={"content-type": "text/event-stream"})
    asked = f"{url(gemini, 'streamGenerateContent', 'gemini-pro')}?alt=sse"
    reply = await house.http().post(asked, json=HI)
    assert reply.content == events
    (call,) = await recorded(house, gemini)
    assert (call.completion["content"], call.finish_reason) == ("oh yes", "stop")
