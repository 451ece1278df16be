"""Tool calls over HTTP: whatever is sampled is recorded, given to the agent, and continued when it comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from exchange import Exchange, HeldStore
from gateway_house import House, path
from toy_model import write_tokenizer

from agentlightning.records import ABANDONED, Call, Claim

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "looks", "parameters": PARAMETERS}
HI = {"role": "user", "content": "hi"}

MEMBERS = """\
{%- for tool in tools or [] %}{{- tool | tojson }}{% endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {%- for key, value in call.function.arguments | items %}{{- key + '=' ~ value }}{% endfor %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""Writes the members of arguments, as Qwen3.5's template does."""


def tool_call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


async def post(house: House, claim: Claim, route: str, body: Any, status: int = 200) -> Any:
    content = body if isinstance(body, bytes) else json.dumps({"model": "policy", **body}).encode()
    headers = {"content-type": "application/json"}
    reply = await house.http().post(f"{path(claim)}/{route}", content=content, headers=headers)
    assert reply.status_code == status, reply.text
    return reply.json()


async def calls_of(house: House, claim: Claim) -> list[Call]:
    return await house.store.calls([claim.rollout.id])


def nested(levels: int) -> str:
    return '{"city": ' * (levels - 1) + "{}" + "}" * (levels - 1)


# --- the three ways in which a client sends a call back ---------------------------------------------------------------


async def chat_turns(house: House, claim: Claim) -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    body = {"tools": tools, "max_tokens": 9000}
    reply = await post(house, claim, "v1/chat/completions", {**body, "messages": [HI]})
    message = reply["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    await post(house, claim, "v1/chat/completions", {**body, "messages": [HI, message, result]})


async def anthropic_turns(house: House, claim: Claim) -> None:
    body = {"max_tokens": 9000, "tools": [{"name": "weather", "input_schema": PARAMETERS}]}
    reply = await post(house, claim, "v1/messages", {**body, "messages": [HI]})
    result = {"type": "tool_result", "tool_use_id": reply["content"][0]["id"], "content": "sunny"}
    answered = [HI, {"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]
    await post(house, claim, "v1/messages", {**body, "messages": answered})


async def google_turns(house: House, claim: Claim) -> None:
    hi = {"role": "user", "parts": [{"text": "hi"}]}
    body = {
        "tools": [{"functionDeclarations": [{"name": "weather", "parametersJsonSchema": PARAMETERS}]}],
        "generationConfig": {"maxOutputTokens": 9000},
    }
    route = "v1beta/models/policy:generateContent"
    reply = await post(house, claim, route, {**body, "contents": [hi]})
    said = reply["candidates"][0]["content"]
    result = {"name": "weather", "id": said["parts"][0]["functionCall"].get("id"), "response": {"result": "sunny"}}
    answered = [hi, said, {"role": "user", "parts": [{"functionResponse": result}]}]
    await post(house, claim, route, {**body, "contents": answered})


@pytest.mark.parametrize("levels", [3, 54, 254, 1100])
@pytest.mark.parametrize("turns", [chat_turns, anthropic_turns, google_turns])
async def test_a_call_with_nested_arguments_is_recorded_answered_and_continued(
    house: House, turns: Any, levels: int
) -> None:
    claim = await house.claim()
    house.say(tool_call(nested(levels)), "It is sunny.")
    await turns(house, claim)
    first, second = await calls_of(house, claim)
    assert first.completion["tool_calls"][0]["function"]["arguments"] == nested(levels)
    assert (second.continuation, second.parent_id) == ("continued", first.id)


NUMBERS = '{"city": 12345678901234567890123, "n": [-9223372036854775809, 1.5, 18446744073709551616, 7]}'


@pytest.mark.parametrize("turns", [chat_turns, anthropic_turns, google_turns])
async def test_integers_beyond_64_bits_are_given_to_the_agent_and_continued(house: House, turns: Any) -> None:
    claim = await house.claim()
    house.say(tool_call(NUMBERS), "It is sunny.")
    await turns(house, claim)
    first, second = await calls_of(house, claim)
    assert first.completion["tool_calls"][0]["function"]["arguments"] == NUMBERS
    assert (second.continuation, second.parent_id) == ("continued", first.id)


async def test_tools_with_their_keys_in_another_order_continue(house: House) -> None:
    claim = await house.claim()
    function = {**FUNCTION, "parameters": dict(reversed(PARAMETERS.items()))}
    again = dict(reversed({"type": "function", "function": dict(reversed(function.items()))}.items()))
    tools = [{"type": "function", "function": FUNCTION}]
    reply = await post(house, claim, "v1/chat/completions", {"messages": [HI], "tools": tools})
    messages = [HI, reply["choices"][0]["message"], HI]
    await post(house, claim, "v1/chat/completions", {"messages": messages, "tools": [again]})
    assert [call.continuation for call in await calls_of(house, claim)] == ["first_turn", "continued"]


# --- what is no object ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arguments", "status"), [("", 200), (" ", 200), ("{}", 200), ("[1]", 400), ("no", 400)])
async def test_arguments_of_a_template_that_writes_their_members(
    house: House, tmp_path: Path, arguments: str, status: int
) -> None:
    await house.serve_policy(tokenizer=str(write_tokenizer(tmp_path, MEMBERS)))
    claim = await house.claim()
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "sunny"}
    reply = await post(house, claim, "v1/chat/completions", {"messages": [HI, message, result]}, status)
    if status == 400:
        field = "messages[1].tool_calls[0].function.arguments"
        assert reply["error"]["param"] == field
        assert reply["error"]["message"] == f"{field}: expected a JSON object, got {arguments!r}"


# --- failures after sampling ------------------------------------------------------------------------------------------


async def test_a_call_that_fails_once_it_is_sampled_is_recorded_as_abandoned(house: House) -> None:
    claim = await house.claim()
    ids = house.renderer.encode("It is sunny.")
    logprobs = {"content": [{"logprob": -0.5} for _ in ids]}
    choice = {"token_ids": ids, "logprobs": logprobs, "finish_reason": "stop"}
    house.engine.raw = json.dumps({"choices": [choice]})  # without the prompt's log-probabilities
    await post(house, claim, "v1/chat/completions", {"messages": [HI], "prompt_logprobs": 1}, 502)
    [call] = await calls_of(house, claim)
    assert (call.finish_reason, call.sampled_ids, call.completion["content"]) == (ABANDONED, ids, "It is sunny.")
    house.engine.raw = None
    await post(house, claim, "v1/chat/completions", {"messages": [HI]})
    assert [call.continuation for call in await calls_of(house, claim)][1:] == ["first_turn"]


@pytest.mark.parametrize("n", [1, 2])
async def test_tokens_of_an_engine_that_is_lost_are_recorded_as_abandoned(house: House, n: int) -> None:
    claim = await house.claim()
    house.engine.die_after = 2
    url = f"{path(claim)}/v1/chat/completions"
    body = {"model": "policy", "messages": [HI], "stream": True, "n": n}
    assert "lost in the middle" in (await house.http().post(url, json=body)).text
    calls = await calls_of(house, claim)
    assert [call.finish_reason for call in calls] == [ABANDONED] * body.get("n", 1)
    assert max(len(call.sampled_ids) for call in calls) == 2
    assert all(len(call.sampled_ids) == len(call.logprobs) for call in calls)


class CutStore(HeldStore):
    """The first commit of calls comes to no end."""

    async def append_calls(self, calls: Sequence[Call]) -> None:
        if self.asked.is_set():
            self.allowed.set()
        await super().append_calls(calls)


STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("v1/chat/completions", {"messages": [HI], "stream": True}),
    "choices": ("v1/chat/completions", {"messages": [HI], "stream": True, "n": 3}),
    "completions": ("v1/completions", {"prompt": "hi", "stream": True}),
    "responses": ("v1/responses", {"input": "hi", "stream": True}),
    "messages": ("v1/messages", {"messages": [HI], "max_tokens": 99, "stream": True}),
    "google": (
        "v1beta/models/policy:streamGenerateContent?alt=sse",
        {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]},
    ),
}


@pytest.mark.parametrize("form", STREAMS)
async def test_a_call_that_the_end_of_the_server_cuts_off_is_recorded_as_abandoned(house: House, form: str) -> None:
    route, body = STREAMS[form]
    claim = await house.claim()
    house.engine.gate = asyncio.Event()
    exchange = Exchange(house.app, claim.key, f"{path(claim)}/{route}", {"model": "policy", **body})
    await exchange.started.wait()
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.task
    house.engine.gate.set()
    calls = await calls_of(house, claim)
    assert [call.finish_reason for call in calls] == [ABANDONED] * body.get("n", 1)
    assert max(len(call.sampled_ids) for call in calls) == house.engine.chunk


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("form", ["chat", "choices", "responses"])
async def test_a_call_whose_recording_is_cut_off_is_recorded(house: House, form: str, stream: bool) -> None:
    route, body = STREAMS[form]
    claim = await house.claim()
    store = CutStore(house.store)
    app = house.gateway(store)  # type: ignore[arg-type]
    exchange = Exchange(app, claim.key, f"{path(claim)}/{route}", {"model": "policy", **body, "stream": stream})
    await store.asked.wait()
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.task
    calls = await calls_of(house, claim)
    assert [call.finish_reason for call in calls] == ["stop"] * body.get("n", 1)


# --- halves of characters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b'"a \\ud83d b"', b'"a \xed\xa0\xbd b"', b'"a \\ude00 b"'])
async def test_half_a_character_becomes_the_replacement_character_and_is_recorded_so(house: House, text: bytes) -> None:
    claim = await house.claim()
    await post(house, claim, "v1/chat/completions", b'{"messages": [{"role": "user", "content": %s}]}' % text)
    [call] = await calls_of(house, claim)
    assert call.messages == [{"role": "user", "content": "a \ufffd b"}]
    assert house.renderer.decode(call.suffix_ids).count("a \ufffd b") == 1


async def test_a_sampled_call_with_half_a_character_is_continued_however_it_comes_back(house: House) -> None:
    claim = await house.claim()
    house.say(tool_call('{"city": "\\ud83d"}'), "It is sunny.")
    tools = [{"type": "function", "function": FUNCTION}]
    reply = await post(house, claim, "v1/chat/completions", {"messages": [HI], "tools": tools})
    message = reply["choices"][0]["message"]
    for arguments in ('{"city": "\\ud83d"}', '{"city": "\ufffd"}'):
        message["tool_calls"][0]["function"]["arguments"] = arguments
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": arguments}
        await post(house, claim, "v1/chat/completions", {"messages": [HI, message, result], "tools": tools})
    assert [call.continuation for call in await calls_of(house, claim)] == ["first_turn", "continued", "continued"]
