"""Calls for models that are not trained: passed through in their own protocol, recorded, never learned from."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from exchange import Exchange, HeldStore
from external_house import HI, SECRET, failures, judge, post, recorded, serve
from external_server import ExternalServer
from gateway_house import House, path

from agentlightning.adapters.trajectories import trajectories
from agentlightning.records import ABANDONED, Claim

WEATHER = ("weather", '{"city": "Oslo"}')


TOOL = {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}}


# --- passed through -----------------------------------------------------------------------------------------------------


async def test_a_judge_answers_by_its_model_name_and_the_call_is_recorded(
    house: House, external: ExternalServer, claim: Claim
) -> None:
    reply = await judge(house, claim).chat.completions.create(model="gpt-4o-mini", messages=HI, temperature=0.25)
    assert (reply.id, reply.model, reply.choices[0].message.content) == (
        "chatcmpl-theirs",
        "gpt-4o-mini-2026",
        external.text,
    )
    (call,) = await recorded(house, claim)
    assert (call.policy, call.model, call.protocol) == ("", "gpt-4o-mini", "chat")
    assert (call.messages, call.completion) == (HI, {"role": "assistant", "content": external.text})
    assert call.usage == {"prompt_tokens": 11, "sampled_tokens": 7}
    assert (call.suffix_ids, call.sampled_ids, call.logprobs, call.versions) == ([], [], [], [])
    assert call.sampling.temperature == 0.25
    assert reply._request_id == call.id
    assert house.engine.requests == []


async def test_the_body_goes_out_as_it_came_and_the_answer_comes_back_as_it_was(
    house: House, external: ExternalServer, claim: Claim
) -> None:
    body = b'{ "model": "gpt-5-nano",\n "messages": [{"role":"user","content":"\\u0068i"}], "unheard_of": [1.0] }'
    reply = await house.http().post(f"{path(claim)}/v1/chat/completions", content=body)
    assert external.requests[0].body == body
    assert external.requests[0].path == "/v1/chat/completions"
    assert reply.content == json.dumps(json.loads(reply.content)).encode()  # spaces that orjson would not have written


async def test_a_stream_comes_through_chunk_by_chunk(house: House, external: ExternalServer, claim: Claim) -> None:
    stream = await judge(house, claim).chat.completions.create(
        model="gpt-5", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Itissunny."
    assert chunks[-1].usage is not None
    (call,) = await recorded(house, claim)
    assert (call.completion["content"], call.finish_reason) == ("Itissunny.", "stop")
    assert call.usage == {"prompt_tokens": 11, "sampled_tokens": 7}


async def test_what_is_known_of_a_stream_goes_on_at_once(house: House, external: ExternalServer, claim: Claim) -> None:
    external.gate = asyncio.Event()
    body = {"model": "gpt-5", "messages": HI, "stream": True}
    call = Exchange(house.app, claim.key, f"{path(claim)}/v1/chat/completions", body)
    await call.started.wait()
    assert b'"It"' in call.sent
    assert not call.task.done()
    external.gate.set()
    assert (await call.done()).endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_of_a_judge_are_recorded(
    house: House, external: ExternalServer, claim: Claim, stream: bool
) -> None:
    external.tool = WEATHER
    reply = await post(house, claim, tools=[{"type": "function", "function": TOOL}], stream=stream)
    assert reply.status_code == 200
    (call,) = await recorded(house, claim)
    function = {"name": WEATHER[0], "arguments": WEATHER[1]}
    assert call.completion["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]
    assert call.finish_reason == "tool_calls"
    assert call.tools is not None


async def test_embeddings_are_passed_through(house: House, external: ExternalServer, claim: Claim) -> None:
    reply = await judge(house, claim).embeddings.create(model="gpt-5-embed", input="hi", encoding_format="float")
    assert reply.data[0].embedding == [0.25, -0.5]
    (call,) = await recorded(house, claim)
    assert (call.protocol, call.policy, call.usage["prompt_tokens"]) == ("embeddings", "", 5)


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_are_passed_through(house: House, external: ExternalServer, claim: Claim, stream: bool) -> None:
    client = judge(house, claim)
    if stream:
        events = [event async for event in await client.responses.create(model="gpt-5", input="hi", stream=True)]
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    else:
        assert (await client.responses.create(model="gpt-5", input="hi")).output_text == external.text
    (call,) = await recorded(house, claim)
    assert (call.protocol, call.policy, call.completion["content"]) == ("responses", "", external.text)
    assert call.usage == {"prompt_tokens": 11, "sampled_tokens": 7}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tool", [None, WEATHER])
async def test_messages_are_passed_through(
    house: House,
    external: ExternalServer,
    claim: Claim,
    claude: AsyncAnthropic,
    stream: bool,
    tool: tuple[str, str] | None,
) -> None:
    external.tool = tool
    asked: Any = {"model": "claude-haiku", "max_tokens": 64, "messages": HI}
    if stream:
        async with claude.messages.stream(**asked) as events:
            message = await events.get_final_message()
    else:
        message = await claude.messages.create(**asked)
    block = message.content[0]
    (call,) = await recorded(house, claim)
    assert (call.protocol, call.policy, call.usage) == ("messages", "", {"prompt_tokens": 11, "sampled_tokens": 7})
    if tool is None:
        assert block.type == "text"
        assert block.text == call.completion["content"] == external.text
    else:
        assert block.type == "tool_use"
        function = call.completion["tool_calls"][0]["function"]
        assert (function["name"], json.loads(function["arguments"])) == (block.name, block.input)


async def test_another_name_is_sent_where_the_external_model_has_one(house: House, external: ExternalServer) -> None:
    await serve(house, "judge", url=external.url, models=["judge"], rename="vendor/large")
    claim = await house.claim()
    assert (await post(house, claim, model="judge", seed=3)).status_code == 200
    assert external.requests[0].json == {"model": "vendor/large", "messages": HI, "seed": 3}
    (call,) = await recorded(house, claim)
    assert call.model == "judge"


@pytest.mark.parametrize("given", [900 * '{"a": ' + "1" + 900 * "}", '{"a": [12345678901234567890123, 7]}'])
async def test_inputs_of_many_levels_and_long_integers_are_recorded_and_passed_on(
    house: House, external: ExternalServer, given: str
) -> None:
    external.tool = ("f", given)
    await serve(house, "user", url=external.url, models=["claude"], protocol="anthropic", rename="theirs")
    claim = await house.claim()
    body: Any = {"model": "claude", "max_tokens": 64, "messages": HI}
    url = f"{path(claim)}/v1/messages"
    reply = await house.http().post(url, json=body)
    assert (reply.status_code, given in reply.text) == (200, True)
    (call,) = await recorded(house, claim)
    assert call.completion["tool_calls"][0]["function"]["arguments"] == given.replace(" ", "")
    if "[" in given:
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}
        said = {"role": "assistant", "content": json.loads(reply.content)["content"]}
        body["messages"] = [*HI, said, {"role": "user", "content": [result]}]
        assert (await house.http().post(url, json=body)).status_code == 200
        assert given.replace(" ", "") in external.requests[1].body.decode()
        assert [one.continuation for one in await recorded(house, claim)] == ["first_turn", "continued"]


# --- the end waits for the record ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "model", "end", "text"),
    [
        ("chat/completions", "gpt-5", (b"[DONE]", b'"finish_reason": "stop"'), b"sunny."),
        ("messages", "claude-haiku", (b"message_stop", b"end_turn"), b"It is sunny."),
        ("responses", "gpt-5", (b"response.completed",), b"It is sunny."),
    ],
)
async def test_the_end_of_a_stream_is_held_until_the_call_is_durable(
    house: House, external: ExternalServer, claim: Claim, route: str, model: str, end: tuple[bytes, ...], text: bytes
) -> None:
    held = HeldStore(house.store)
    body = {"model": model, "messages": HI, "input": "hi", "max_tokens": 9, "stream": True}
    call = Exchange(house.gateway(held), claim.key, f"{path(claim)}/v1/{route}", body)  # type: ignore[arg-type]
    await held.asked.wait()
    assert text in call.sent
    assert not any(mark in call.sent for mark in end)
    held.allowed.set()
    sent = await call.done()
    assert all(mark in sent for mark in end)


async def test_a_stream_that_the_end_of_the_server_cuts_off_is_recorded_as_abandoned(
    house: House, external: ExternalServer, claim: Claim
) -> None:
    external.gate = asyncio.Event()
    body = {"model": "gpt-5", "messages": HI, "stream": True}
    call = Exchange(house.app, claim.key, f"{path(claim)}/v1/chat/completions", body)
    await call.started.wait()
    call.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call.task
    external.gate.set()
    (found,) = await recorded(house, claim)
    assert (found.finish_reason, found.completion["content"]) == (ABANDONED, "It")


# --- keys and headers ---------------------------------------------------------------------------------------------------


async def test_the_servers_key_goes_out_in_the_protocols_header_and_the_attempts_does_not(
    house: House, external: ExternalServer, claim: Claim
) -> None:
    headers = {
        "authorization": f"Bearer {claim.key}", "x-api-key": claim.key, "cookie": "a=b", "x-forwarded-for": "10.0.0.1",
        "openai-beta": "assistants=v2", "idempotency-key": "once",
    }  # fmt: skip
    url = f"{path(claim)}/v1/chat/completions"
    await house.http().post(url, json={"model": "gpt-5", "messages": HI}, headers=headers)
    body, url = {"model": "claude-x", "max_tokens": 9, "messages": HI}, f"{path(claim)}/v1/messages"
    await house.http().post(url, json=body)
    await house.http().post(url, json=body, headers={"anthropic-version": "2030-01-01", "anthropic-beta": "b"})
    seen, first, second = (seen.headers for seen in external.requests)
    assert seen["authorization"] == f"Bearer {SECRET}"
    assert (seen["openai-beta"], seen["idempotency-key"]) == ("assistants=v2", "once")
    assert claim.key not in str(seen)
    assert not seen.keys() & {"x-api-key", "cookie", "x-forwarded-for"}
    assert (first["x-api-key"], first["anthropic-version"]) == (SECRET, "2023-06-01")
    assert (second["anthropic-version"], second["anthropic-beta"]) == ("2030-01-01", "b")
    assert "authorization" not in first


async def test_a_missing_key_is_named_by_its_variable(
    house: House, external: ExternalServer, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_KEY")
    reply = await post(house, claim)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (502, "external_key_missing")
    assert "'judge'" in error["message"]
    assert "JUDGE_KEY" in error["message"]
    assert external.requests == []
    (span,) = await failures(house, claim)
    assert span.attributes["external"] == "judge"


async def test_an_external_model_that_repeats_the_key_does_not_tell_it_to_the_agent(
    house: House, external: ExternalServer, claim: Claim
) -> None:
    external.refusals = [web.json_response({"error": {"message": f"Incorrect API key: {SECRET}"}}, status=401)]
    reply = await post(house, claim)
    assert (reply.status_code, reply.json()["error"]["message"]) == (401, "Incorrect API key: [key]")
    assert SECRET not in str(await failures(house, claim))


# --- the record ---------------------------------------------------------------------------------------------------------


async def test_a_conversation_is_stored_once(house: House, external: ExternalServer, claim: Claim) -> None:
    messages: list[Any] = []
    for turn in range(5):
        messages.append({"role": "user", "content": f"question {turn}"})
        external.text = f"answer {turn}"
        reply = await judge(house, claim).chat.completions.create(model="gpt-5", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    calls = await recorded(house, claim)
    assert [len(call.messages) for call in calls] == [1] * 5
    assert [call.parent_id for call in calls] == [None, *(call.id for call in calls[:-1])]


async def test_external_calls_are_never_trained_on_and_do_not_fork_the_policys(
    house: House, external: ExternalServer, claim: Claim
) -> None:
    client = judge(house, claim)
    messages: list[Any] = list(HI)
    for _ in range(2):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        await client.chat.completions.create(model="gpt-4o-mini", messages=messages)
        messages.append({"role": "user", "content": "go on"})
    calls = await recorded(house, claim)
    assert [call.policy for call in calls] == ["default", "", "default", ""]
    assert [call.continuation for call in calls if call.policy] == ["first_turn", "continued"]
    rollout = replace(claim.rollout, attempt=1, reward=1.0)
    ((trajectory,), left_out) = trajectories([rollout], calls)
    assert [transition.call_id for transition in trajectory.transitions] == [calls[0].id, calls[2].id]
    assert left_out == {}


# --- which external model ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "key"), [("gpt-5-mini", "exact"), ("gpt-5-nano", "longer"), ("gpt-4", "shorter"), ("GPT-5-mini", None)]
)
async def test_a_name_counts_before_a_pattern_and_a_longer_pattern_before_a_shorter(
    house: House, external: ExternalServer, model: str, key: str | None
) -> None:
    for name, pattern in (("shorter", "gpt-*"), ("longer", "gpt-5-*"), ("exact", "gpt-5-mini")):
        await serve(house, name, url=external.url, models=[pattern], rename=name)
    claim = await house.claim()
    assert (await post(house, claim, model=model)).status_code == 200
    assert [seen.json["model"] for seen in external.requests] == ([key] if key else [])


async def test_models_lists_the_policy_and_the_external_models_that_have_a_name(house: House, claim: Claim) -> None:
    listed = await judge(house, claim).models.list()
    assert [model.id for model in listed.data] == ["policy", "gpt-4o-mini"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "http://h/v1"}, "models: is required"),
        ({"url": "http://h/v1", "models": ["pol*"]}, "would take the calls of the policy 'policy'"),
        ({"url": "http://h/v1", "models": ["gpt-5*"]}, "'gpt-5*' is a name of external."),
    ],
)
async def test_a_misconfigured_external_model_stops_the_runs_calls_with_a_reason(
    house: House, claim: Claim, settings: Any, message: str
) -> None:
    await serve(house, "wrong", **settings)
    reply = await post(house, claim, model="policy")
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "external_misconfigured")
    assert message in reply.json()["error"]["message"]


async def test_an_external_model_that_is_put_over_the_api_counts_at_once(
    house: House, external: ExternalServer, claim: Claim
) -> None:
    assert (await post(house, claim, model="late")).json()["choices"][0]["message"]["content"] == "It is sunny."
    assert len(house.engine.requests) == 1
    resource = {"run_id": house.run_id, "name": "late", "kind": "external"}
    value = {"url": external.url, "models": ["late"]}
    headers = {"authorization": "Bearer server-key"}
    body = {"resources": [{**resource, "value": value}]}
    answer = await house.http().post("/api/put_resources", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert (await post(house, claim, model="late")).status_code == 200
    assert len(external.requests) == 1


@pytest.mark.parametrize(
    ("asked", "kept"), [(7, 7), (7.0, 7), (1.5, None), (1e308, None), (2**70, None), (-1, None), (True, None)]
)
async def test_whatever_limit_an_agent_asks_for_its_record_can_be_read(
    house: House, claim: Claim, asked: Any, kept: int | None
) -> None:
    """A training step reads the calls of many rollouts at once: one that cannot be read would end it, and each resume."""
    await post(house, claim, max_tokens=asked, temperature=10**300)
    assert [call.sampling.max_tokens for call in await recorded(house, claim)] == [kept]
