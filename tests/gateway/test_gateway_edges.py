"""Keys, wrong routes, rewards, engines that are away, and every kind of bad input."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from gateway_house import SERVER_KEY, House, path

from agentlightning.gateway.app import App
from agentlightning.gateway.proxy import UNKNOWN_ROUTE
from agentlightning.records import Claim, Resource

HI: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --- who may call -----------------------------------------------------------------------------------------------------


async def test_the_key_alone_names_the_attempt(house: House) -> None:
    claim = await house.claim()
    reply = await house.http().post("/v1/chat/completions", json=HI, headers=bearer(claim.key))
    assert reply.status_code == 200
    assert len(await house.store.calls([claim.rollout.id])) == 1


@pytest.mark.parametrize("key", ["sk-agl-x", "sk-agl-" + "A" * 46])
async def test_a_forged_key_is_refused(house: House, key: str) -> None:
    claim = await house.claim()
    reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json=HI, headers=bearer(key))
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")


async def test_a_path_without_key_opens_a_server_without_a_key_on_this_machine_only(house: House) -> None:
    claim = await house.claim()
    url = f"{path(claim)}/v1/chat/completions"
    keyless = App(house.store, load_renderer=lambda _: house.renderer)
    assert (await house.http(keyless).post(url, json=HI, headers=bearer("whatever"))).status_code == 200
    stranger = house.http(keyless, "10.0.0.7", adds_keys=False)
    assert (await stranger.post(url, json=HI)).status_code == 401
    assert (await stranger.post(url, json=HI, headers=bearer(claim.key))).status_code == 200
    assert (await house.http(keyless).post("/v1/chat/completions", json=HI)).status_code == 401
    await keyless.close()


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/v1/reward", "/v1/traces", "/v1/models"])
async def test_a_server_with_a_key_wants_the_attempts_key_of_every_caller_whatever_its_address(
    house: House, route: str
) -> None:
    claim = await house.claim()
    http = house.http(
        address="127.0.0.1", adds_keys=False
    )  # as everybody has who comes through a proxy on this machine
    for headers in ({}, bearer("whatever"), bearer("sk-agl-token-" + "A" * 43)):
        method = "GET" if route == "/v1/models" else "POST"
        reply = await http.request(method, f"{path(claim)}{route}", json={}, headers=headers)
        assert reply.status_code == 401


async def test_calls_of_a_finished_attempt_are_refused_at_once(house: House) -> None:
    claim = await house.claim()
    http = house.http()
    url = f"{path(claim)}/v1/chat/completions"
    assert (await http.post(url, json=HI)).status_code == 200
    finish = {"finishes": [{"lease": lease(claim), "state": "succeeded"}]}
    reply = await http.post("/api/finish", json=finish, headers=bearer(SERVER_KEY))
    assert reply.status_code == 200, reply.text
    late = await http.post(url, json=HI)
    assert (late.status_code, late.json()["error"]["code"]) == (410, "attempt_over")
    assert len(await house.store.calls([claim.rollout.id])) == 1


def lease(claim: Claim) -> dict[str, Any]:
    return {"rollout_id": claim.lease.rollout_id, "attempt": claim.lease.attempt, "token": claim.lease.token}


@pytest.mark.parametrize("where", ["/r/none/1/v1", "/r/01a1fb87-102d-74c1-aedc-82b9b8a4466d/1/v1", "/r/x/0/v1"])
async def test_an_unknown_attempt_is_named_where_no_key_is_needed(house: House, where: str) -> None:
    keyless = App(house.store)
    reply = await house.http(keyless).post(f"{where}/chat/completions", json=HI)
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "unknown_attempt")
    await keyless.close()


# --- wrong routes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["/v2/chat/completions", "/v1/v1/nothing", "/v1", "/v1/audio/speech", ""])
async def test_a_wrong_route_names_the_right_base_url_and_leaves_a_span(house: House, route: str) -> None:
    claim = await house.claim()
    reply = await house.http().post(path(claim) + route, json=HI)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "unknown_route")
    assert f"http://gateway{path(claim)}/v1 " in error["message"]
    (span,) = await house.store.spans([claim.rollout.id])
    assert (span.name, span.attributes["path"]) == (UNKNOWN_ROUTE, path(claim) + route)


@pytest.mark.parametrize("route", ["/chat/completion", "/v1/v1/nothing"])
async def test_a_wrong_route_with_a_key_is_explained_too(house: House, route: str) -> None:
    claim = await house.claim()
    reply = await house.http().post(route, json=HI, headers=bearer(claim.key))
    assert reply.status_code == 404
    assert "http://gateway/v1 " in reply.json()["error"]["message"]
    assert len(await house.store.spans([claim.rollout.id])) == 1


async def test_a_path_without_an_attempts_number_is_explained(house: House) -> None:
    reply = await house.http().post("/r/x/v1/chat/completions", json=HI)
    assert reply.status_code == 404
    assert "/r/<rollout>/<attempt>/v1" in reply.json()["error"]["message"]


# --- rewards and the rest ---------------------------------------------------------------------------------------------


async def test_a_reward_is_recorded_as_posted(house: House) -> None:
    claim = await house.claim()
    http = house.http()
    answer = (await http.post(f"{path(claim)}/v1/chat/completions", json=HI)).json()
    await http.post(f"{path(claim)}/v1/reward", json={"value": 1})
    await http.post(
        "/v1/reward", json={"value": 0.5, "name": "step", "call_id": answer["id"]}, headers=bearer(claim.key)
    )
    rewards = await house.store.rewards([claim.rollout.id])
    (call,) = await house.store.calls([claim.rollout.id])
    assert [(r.value, r.name, r.source, r.call_id) for r in rewards] == [
        (1.0, "reward", "posted", None),
        (0.5, "step", "posted", call.id),
    ]


@pytest.mark.parametrize(
    "body",
    [
        *(b"{", b"[1]", b"{}", b'{"value": "1"}', b'{"value": null}', b'{"value": 1e999}', b'{"value": [1]}'),
        *(b'{"value": 1, "name": 2}', b'{"value": 1, "call_id": "x"}'),
    ],
)
async def test_a_bad_reward_is_refused_in_one_sentence(house: House, body: bytes) -> None:
    claim = await house.claim()
    reply = await house.http().post(f"{path(claim)}/v1/reward", content=body)
    assert reply.status_code in (400, 422)
    assert "\n" not in reply.json()["error"]["message"]
    assert await house.store.rewards([claim.rollout.id]) == []


async def test_with_several_policies_an_unknown_name_lists_them(house: House) -> None:
    claim = await house.claim()
    value = {"model": "critic", "endpoints": [house.engine.url], "tokenizer": str(house.folder)}
    await house.store.put_resources([Resource(run_id=house.run_id, name="second", kind="policy", value=value)])
    client = house.openai(claim)
    with pytest.raises(openai.NotFoundError, match="critic, policy"):
        await client.chat.completions.create(model="gpt-9", messages=HI["messages"])
    await client.chat.completions.create(model="critic", messages=HI["messages"])
    assert house.engine.requests[-1]["model"] == "second"


async def test_health_metrics_and_the_boot_id(house: House) -> None:
    http = house.http()
    for route in ("/healthz", "/readyz", "/metrics", "/r/x/1/v1/models", "/nothing"):
        assert (await http.get(route)).headers["x-agl-boot"] == house.app.boot
    assert (await http.get("/healthz")).status_code == 200
    assert (await http.get("/readyz")).status_code == 200
    runs = await http.get("/api/runs", headers=bearer(SERVER_KEY))
    assert (runs.status_code, runs.headers["x-agl-boot"]) == (200, house.app.boot)
    assert (await http.get("/api/runs")).status_code == 401
    assert house.gateway().boot != house.app.boot


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_drops_the_connection_is_asked_again(house: House, stream: bool) -> None:
    claim = await house.claim()
    house.engine.drop = 2
    reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json={**HI, "stream": stream})
    assert reply.status_code == 200
    assert len({request["request_id"] for request in house.engine.requests}) == 1
    assert len(house.engine.requests) == 3


async def test_a_call_that_failed_leaves_its_noise_to_the_next_try(house: House) -> None:
    claim = await house.claim()
    http = house.http()
    house.engine.refusals = [(500, {"error": {"message": "broken"}})]
    url = f"{path(claim)}/v1/chat/completions"
    assert (await http.post(url, json=HI)).status_code == 502
    assert (await http.post(url, json=HI)).status_code == 200
    assert len({request["sampling_params"]["seed"] for request in house.engine.requests}) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_stays_away_is_a_503(house: House, stream: bool) -> None:
    claim = await house.claim()
    await house.engine.close()
    http = house.http(house.gateway(patience_s=0.1))
    reply = await http.post(f"{path(claim)}/v1/chat/completions", json={**HI, "stream": stream})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unreachable")


async def test_a_policy_that_moved_is_followed(house: House) -> None:
    claim = await house.claim()
    http = house.http()
    await house.serve_policy(endpoints=["http://127.0.0.1:1"])
    body = {"resources": [{"run_id": house.run_id, "name": "default", "kind": "policy", "value": {}}]}
    url = f"{path(claim)}/v1/chat/completions"
    value = {"model": "policy", "endpoints": [house.engine.url], "tokenizer": str(house.folder), "seed": 7}
    body["resources"][0]["value"] = value
    assert (await house.http(house.gateway(patience_s=0)).post(url, json=HI)).status_code == 503
    assert (await http.post("/api/put_resources", json=body, headers=bearer(SERVER_KEY))).status_code == 200
    assert (await http.post(url, json=HI)).status_code == 200


async def test_a_run_without_a_policy_says_so(house: House) -> None:
    empty = House(house.store, house.engine, house.renderer, house.folder)
    empty.run_id = (await house.store.create_run("no policy", {})).id
    claim = await empty.claim()
    reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json=HI)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_policy")
    value = {"url": "http://127.0.0.1:9/v1", "models": ["*-5", "small-1"]}
    await house.store.put_resources([Resource(run_id=empty.run_id, name="hosted", kind="external", value=value)])
    named = await house.http(house.gateway()).post(f"{path(claim)}/v1/chat/completions", json={**HI, "model": "gpt-9"})
    assert "no policy serves this run yet, and 'gpt-9' is none of its external models: *-5, small-1" in named.text


async def test_a_prompt_that_is_too_long_names_both_lengths(house: House) -> None:
    claim = await house.claim()
    message = "the prompt has 600 tokens, and the context of the model 512"
    house.engine.refusals = [(400, {"error": {"message": message, "type": "invalid_request_error", "code": None}})]
    with pytest.raises(openai.BadRequestError) as error:
        await house.openai(claim).chat.completions.create(**HI)
    assert (error.value.code, error.value.body["message"]) == ("context_length_exceeded", message)  # type: ignore[index]


async def test_what_an_engine_refuses_is_told_by_the_requests_own_field(house: House) -> None:
    claim = await house.claim()
    holds = "token_ids holds 7; the model's vocabulary has ids 0 to 6"  # whatever the tokenizer of the gateway knows
    for route, body, said, message, param in (
        ("chat/completions", {}, "sampling_params.seed must be whole", "seed must be whole", "seed"),
        ("completions", {"prompt": [7]}, holds, holds.replace("token_ids", "prompt"), "prompt"),
        ("tokens/generate", {"prompt_ids": [7]}, holds, holds.replace("token_ids", "prompt_ids"), "prompt_ids"),
        ("tokens/logprobs", {"token_ids": [7]}, holds, holds, "token_ids"),
        ("responses", {"input": "hi"}, "the prompt exceeds the context", "the prompt exceeds the context", "input"),
    ):
        house.engine.refusals = [(400, {"error": {"message": said, "code": None}})]
        given = HI if route == "chat/completions" else {"model": "policy", **body}
        error = (await house.http().post(f"{path(claim)}/v1/{route}", json=given)).json()["error"]
        assert (error["message"], error["param"]) == (message, param)
    told = {"message": "token_id(s) [99999] in logit_bias contain out-of-vocab token ids", "param": "logit_bias"}
    house.engine.refusals = [(400, {"error": told})]  # as vLLM says it
    error = (await house.http().post(f"{path(claim)}/v1/chat/completions", json=HI)).json()["error"]
    assert (error["message"], error["param"]) == (told["message"], "logit_bias")


@pytest.mark.parametrize(
    "body", [{}, {"choices": []}, {"choices": [{"token_ids": [1], "logprobs": {"content": []}}]}, [1], {"choices": 3}]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_talks_nonsense_is_a_502(house: House, body: Any, stream: bool) -> None:
    claim = await house.claim()
    house.engine.raw = json.dumps(body)
    reply = await house.http().post(f"{path(claim)}/v1/chat/completions", json={**HI, "stream": stream})
    assert (reply.status_code, reply.json()["error"]["type"]) == (502, "server_error")


async def test_an_engine_that_dies_in_the_middle_of_a_stream_ends_it_with_an_error(house: House) -> None:
    claim = await house.claim()
    house.engine.die_after = 2
    with pytest.raises(openai.APIError, match="was lost in the middle of a completion"):
        async for _ in await house.openai(claim).chat.completions.create(**HI, stream=True):
            pass
    assert [call.finish_reason for call in await house.store.calls([claim.rollout.id])] == ["abandoned"]
