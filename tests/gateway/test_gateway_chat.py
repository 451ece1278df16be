"""What an agent with the OpenAI SDK sees, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest
from exchange import Exchange, HeldStore
from gateway_house import END, House, path
from openai.types.chat import ChatCompletionMessageParam

from agentlightning.records import Call, Sampling

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def user(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


async def recorded(house: House, rollout_id: str) -> list[Call]:
    return await house.store.calls([rollout_id])


def full_ids(calls: list[Call]) -> dict[str, tuple[list[int], list[int]]]:
    """(prompt ids, prompt and sampled ids) of each call."""
    found: dict[str, tuple[list[int], list[int]]] = {}
    for call in calls:
        prompt = (found[call.parent_id][1] if call.parent_id else []) + call.suffix_ids
        found[call.id] = prompt, prompt + call.sampled_ids
    return found


async def test_an_answer_has_the_protocols_shape_and_is_recorded(house: House) -> None:
    claim = await house.claim()
    answer = await house.openai(claim).chat.completions.create(model="policy", messages=[user("hi")], logprobs=True)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason, answer.model) == ("It is sunny.", "stop", "policy")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == "It is sunny."
    (call,) = await recorded(house, claim.rollout.id)
    assert answer.id == f"chatcmpl-{call.id}"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (call.prompt_tokens, len(call.sampled_ids))
    assert call.suffix_ids == house.engine.requests[0]["token_ids"]
    assert call.sampled_ids[-1] == END
    assert call.logprobs == [-0.5] * len(call.sampled_ids)
    assert [(span.version, span.start, span.end) for span in call.versions] == [(1, 0, len(call.sampled_ids))]
    assert (call.policy, call.protocol, call.parent_id, call.fork_cause) == ("default", "chat", None, None)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_never_forks(house: House, stream: bool) -> None:
    claim = await house.claim()
    client = house.openai(claim)
    house.say(CALL, f"Let me see.\n{CALL}", "It is sunny.")
    messages: list[Any] = [user("what is the weather?")]
    for _ in range(3):
        if stream:
            message = await streamed(client, messages)
        else:
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
            message = answer.choices[0].message.model_dump()
            assert answer.choices[0].finish_reason == ("tool_calls" if message["tool_calls"] else "stop")
        messages.append(message)
        for call in message.get("tool_calls") or []:
            assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "sunny"})
    assert messages[-1]["content"] == "It is sunny."
    calls = await recorded(house, claim.rollout.id)
    assert [call.fork_cause for call in calls] == [None] * 3
    assert [call.parent_id for call in calls] == [None, calls[0].id, calls[1].id]
    ids = full_ids(calls)
    for before, after in pairwise(calls):
        assert ids[after.id][0][: len(ids[before.id][1])] == ids[before.id][1]
    assert [ids[call.id][0] for call in calls] == [request["token_ids"] for request in house.engine.requests]


async def streamed(client: openai.AsyncOpenAI, messages: list[Any]) -> dict[str, Any]:
    """One streamed call, put together as agents do."""
    content, calls = "", dict[int, dict[str, Any]]()
    events = await client.chat.completions.create(
        model="policy", messages=messages, tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    usage = None
    async for event in events:
        usage = event.usage or usage
        for choice in event.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                known = calls.setdefault(call.index, call.model_dump(exclude={"index"}))
                if known["id"] is not None and call.id is None:
                    known["function"]["arguments"] += call.function.arguments
    assert usage is not None
    return {"role": "assistant", "content": content or None, **({"tool_calls": list(calls.values())} if calls else {})}


async def test_text_is_streamed_as_it_is_sampled(house: House) -> None:
    claim = await house.claim()
    house.say("héllo 日本 😀 wörld")
    events = await house.openai(claim).chat.completions.create(model="policy", messages=[user("hi")], stream=True)
    parts = [event.choices[0].delta.content or "" async for event in events]
    assert "".join(parts) == "héllo 日本 😀 wörld"
    assert len([part for part in parts if part]) > 5
    assert not any("�" in part for part in parts)


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_one_character_have_its_place_and_bytes_that_join_to_the_text(
    house: House, stream: bool
) -> None:
    text = "It 😀 is 日本"
    house.say(text)
    http, base = house.http(), f"{path(await house.claim())}/v1"
    asked: dict[str, Any] = {"model": "policy", "stream": stream, "max_tokens": 99}
    raw = await http.post(f"{base}/completions", json={**asked, "prompt": "hi", "logprobs": 1})
    chat = await http.post(f"{base}/chat/completions", json={**asked, "messages": [user("hi")], "logprobs": True})
    whole, said = ([chunk["choices"][0]["logprobs"] or {} for chunk in read(answer, stream)] for answer in (raw, chat))
    places = [place for part in whole for place in part.get("text_offset", [])]
    tokens = [token for part in whole for token in part.get("tokens", [])]
    parts = [text[place] for place, token in zip(places, tokens, strict=True) if "\ufffd" in token]
    assert "".join(parts) == "😀😀😀日日本本"
    assert all(text.startswith(token.strip("\ufffd"), place) for place, token in zip(places, tokens, strict=True))
    listed = [token["bytes"] for part in said for token in part.get("content", [])]
    assert b"".join(map(bytes, listed)).decode() == text


def read(answer: httpx.Response, stream: bool) -> list[Any]:
    """The chunks of a stream, or the whole response."""
    if not stream:
        return [answer.json()]
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


async def test_stop_strings_end_the_text_and_stay_in_the_record(house: House) -> None:
    claim = await house.claim()
    house.say("The answer is 42. I do not know")
    client = house.openai(claim)
    whole = await client.chat.completions.create(model="policy", messages=[user("hi")], stop=[" I do"])
    events = await client.chat.completions.create(model="policy", messages=[user("hi")], stop=" I do", stream=True)
    text = "".join([event.choices[0].delta.content or "" async for event in events])
    assert whole.choices[0].message.content == text == "The answer is 42."
    calls = await recorded(house, claim.rollout.id)
    assert house.renderer.decode(calls[0].sampled_ids) == "The answer is 42. I do not know"


async def test_the_rollouts_sampling_overrides_the_agents(house: House) -> None:
    claim = await house.claim(sampling=Sampling(temperature=0.0, top_p=0.9, max_tokens=3), mode="eval")
    answer = await house.openai(claim).chat.completions.create(
        model="policy", messages=[user("hi")], temperature=1.3, top_p=0.5, max_tokens=100
    )
    assert answer.choices[0].finish_reason == "length"
    (call,) = await recorded(house, claim.rollout.id)
    assert call.sampling == Sampling(temperature=0.0, top_p=0.9, max_tokens=3)
    parameters = house.engine.requests[0]["sampling_params"]
    assert (parameters["temperature"], parameters["top_p"], parameters["max_tokens"]) == (0.0, 0.9, 3)


async def test_noise_is_a_function_of_the_runs_seed_and_the_calls_place(house: House) -> None:
    async def seeds(group: str, replica: int, times: int) -> list[int]:
        client = house.openai(await house.claim(group, replica))
        before = len(house.engine.requests)
        for _ in range(times):
            await client.chat.completions.create(model="policy", messages=[user("hi")])
        return [request["sampling_params"]["seed"] for request in house.engine.requests[before:]]

    first = await seeds("g", 0, 2)
    assert len({*first, *await seeds("g", 1, 2), *await seeds("h", 0, 2)}) == 6
    claim = await house.claim("again")
    await house.openai(claim).chat.completions.create(model="policy", messages=[user("hi")])
    expected = house.engine.requests[-1]["sampling_params"]["seed"]
    other = House(house.store, house.engine, house.renderer, house.folder)
    await other.start()
    await other.openai(await other.claim("again")).chat.completions.create(model="policy", messages=[user("hi")])
    assert house.engine.requests[-1]["sampling_params"]["seed"] == expected
    await other.close()


async def test_a_restarted_gateway_continues_and_a_fork_is_recorded_with_its_cause_and_counted(house: House) -> None:
    claim = await house.claim()
    messages: list[Any] = [user("hi")]
    for number in range(3):
        client = house.openai(claim, app=house.gateway())
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message.model_dump(), user(f"and {number}?")]
    messages[1] = {"role": "assistant", "content": "edited"}
    await house.openai(claim).chat.completions.create(model="policy", messages=messages)
    calls = await recorded(house, claim.rollout.id)
    assert [call.parent_id for call in calls[:3]] == [None, calls[0].id, calls[1].id]
    assert [call.fork_cause for call in calls] == [None] * 3 + ["assistant_message_edited"]
    assert 'agl_forks_total{cause="assistant_message_edited"} 1.0' in await house.metrics()


async def test_an_sdks_retry_gets_the_recorded_answer(house: House) -> None:
    claim = await house.claim()
    body = {"model": "policy", "messages": [user("hi")]}
    url = f"{path(claim)}/v1/chat/completions"
    http = house.http()
    first = (await http.post(url, json=body)).json()
    retry = await http.post(url, json=body, headers={"x-stainless-retry-count": "1"})
    assert retry.json() == first
    lines = (await http.post(url, json={**body, "stream": True}, headers={"x-stainless-retry-count": "2"})).text
    assert first["id"] in lines
    assert lines.endswith("data: [DONE]\n\n")
    assert len(await recorded(house, claim.rollout.id)) == 1
    assert (await http.post(url, json=body)).json()["id"] != first["id"]


async def test_an_sdks_retry_joins_the_call_that_is_still_under_way(house: House) -> None:
    claim = await house.claim()
    house.engine.gate = asyncio.Event()
    url, body = f"{path(claim)}/v1/chat/completions", {"model": "policy", "messages": [user("hi")], "stream": True}
    first = Exchange(house.app, claim.key, url, body)
    await first.started.wait()
    second = Exchange(house.app, claim.key, url, body, {"x-stainless-retry-count": "1"})
    await asyncio.sleep(0)
    house.engine.gate.set()
    sent = (await first.done()) + (await second.done())
    ids = {json.loads(line[6:])["id"] for line in sent.split(b"\n") if line.startswith(b"data: {")}
    assert len(ids) == len(await recorded(house, claim.rollout.id)) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_the_end_of_an_answer_is_withheld_until_the_call_is_durable(house: House, stream: bool) -> None:
    claim = await house.claim()
    held = HeldStore(house.store)
    body = {"messages": [user("hi")], "stream": stream}
    call = Exchange(house.gateway(held), claim.key, f"{path(claim)}/v1/chat/completions", body)  # type: ignore[arg-type]
    await held.asked.wait()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in call.sent.decode().split("\n") if line]
    assert "".join(delta.get("content", "") for delta in deltas) == ("It is sunny." if stream else "")
    assert b"[DONE]" not in call.sent
    assert b'"finish_reason":"stop"' not in call.sent
    assert not call.task.done()
    held.allowed.set()
    sent = await call.done()
    assert sent.endswith(b"data: [DONE]\n\n") == stream
    assert b'"finish_reason":"stop"' in sent
