"""The gateway over a real vLLM server, through both faces: exact prompts, the server's own ids, true log-probabilities."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from vllm_house import VllmHouse, VllmServer, open_house, prompts, recomputed

from agentlightning.records import Claim, NewRollout, Sampling, WorkerStatus

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@dataclass
class Heard:
    """An answer, however it came."""

    content: str = ""
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)


async def say(house: VllmHouse, claim: Any, messages: list[Any], stream: bool, **settings: Any) -> Heard:
    client = house.openai(claim).chat.completions
    given: dict[str, Any] = {"model": "policy", "messages": messages, "max_tokens": 12, **settings}
    if not stream:
        choice = (await client.create(**given)).choices[0]
        listed = choice.logprobs.content if choice.logprobs else []
        return Heard(choice.message.content, choice.finish_reason, listed)
    heard = Heard()
    async for chunk in await client.create(**given, stream=True):
        for choice in chunk.choices:
            heard.content += choice.delta.content or ""
            heard.finish_reason = choice.finish_reason or heard.finish_reason
            heard.logprobs += choice.logprobs.content if choice.logprobs else []
    return heard


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a process of its own, with a deadline."""
    for _ in range(2400):
        if await condition():
            return
        await asyncio.sleep(0.025)
    raise AssertionError("it did not come to pass within 60 s")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_is_continued_token_for_token(vllm_house: VllmHouse, stream: bool) -> None:
    claim = await vllm_house.claim()
    messages: list[Any] = [{"role": "user", "content": "what is the weather?"}]
    for turn in range(4):
        choice = await say(vllm_house, claim, messages, stream, tools=TOOLS)
        messages.append({"role": "assistant", "content": choice.content})
        messages.append({"role": "user", "content": f"and today {turn}?"})
    calls = await vllm_house.calls(claim)
    assert [call.continuation for call in calls] == ["first_turn", *["continued"] * 3]
    full = prompts(calls)
    for call in calls:
        assert call.prompt_tokens == len(full[call.id])
        assert recomputed(vllm_house.server.models[0], full[call.id], call.sampled_ids) == pytest.approx(
            call.logprobs, abs=1e-4
        )


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_an_answer(vllm_house: VllmHouse, stream: bool) -> None:
    claim = await vllm_house.claim()
    letters = list("aeio")
    choice = await say(vllm_house, claim, [{"role": "user", "content": "hi"}], stream, stop=letters, max_tokens=200)
    assert not set(choice.content) & set(letters)
    [call] = await vllm_house.calls(claim)
    assert choice.finish_reason == "stop"
    assert len(call.sampled_ids) < 200


@pytest.mark.parametrize("stream", [False, True])
async def test_alternatives_are_the_likeliest_ones(vllm_house: VllmHouse, stream: bool) -> None:
    claim = await vllm_house.claim()
    asked = [{"role": "user", "content": "hi"}]
    choice = await say(vllm_house, claim, asked, stream, logprobs=True, top_logprobs=3)
    for token in choice.logprobs:
        values = [one.logprob for one in token.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert values[0] >= token.logprob - 1e-6


async def test_choices_are_calls_of_their_own(vllm_house: VllmHouse) -> None:
    claim = await vllm_house.claim()
    asked: Any = [{"role": "user", "content": "hi"}]
    reply = await vllm_house.openai(claim).chat.completions.create(model="policy", messages=asked, n=3, max_tokens=20)
    calls = await vllm_house.calls(claim)
    assert len({choice.message.content for choice in reply.choices}) == len(calls) == 3


async def test_a_prompt_that_is_too_long_is_the_agents_fault(vllm_house: VllmHouse) -> None:
    claim = await vllm_house.claim()
    with pytest.raises(openai.BadRequestError) as refused:
        await say(vllm_house, claim, [{"role": "user", "content": "sunny weather " * 400}], False)
    assert refused.value.code == "context_length_exceeded"


async def test_sampling_that_raw_logprobs_would_misstate_is_refused(vllm_house: VllmHouse) -> None:
    store, run_id = vllm_house.store, vllm_house.run_id
    warm = NewRollout(run_id=run_id, task={}, group_id="warm", replica=0, sampling=Sampling(temperature=0.5))
    await store.enqueue([warm])
    [claim] = await store.claim(WorkerStatus(id="w", run_id=run_id, host="h", pid=1, running=0, seen_ns=0))
    with pytest.raises(openai.ConflictError, match="raw log-probabilities"):
        await say(vllm_house, claim, [{"role": "user", "content": "hi"}], False)


async def test_weights_that_change_under_a_call_stamp_its_tokens(vllm_server: VllmServer) -> None:
    async with open_house(vllm_server) as house:
        claim = await house.claim()
        asked: Any = [{"role": "user", "content": "hi"}]
        await vllm_server.load(0, 1)
        call = asyncio.create_task(say(house, claim, asked, False, max_tokens=400))

        async def under_way() -> bool:
            return call.done() or await running(vllm_server)

        await until(under_way)
        await vllm_server.load(1, 2)
        await call
        await vllm_server.load(0, 3)
        [recorded] = await house.calls(claim)
        assert recorded.versions[-1].end == len(recorded.sampled_ids)
        if len(recorded.versions) > 1:  # random weights may end an answer before the new ones come
            first, second = recorded.versions
            assert (first.version, second.version) == (1, 2)
            assert first.end == second.start


async def test_a_client_that_goes_away_frees_the_engine(vllm_house: VllmHouse) -> None:
    vllm_house.app._policy_calls._grace_s = 0.0
    claim = await vllm_house.claim()
    client = vllm_house.openai(claim).chat.completions
    asked: Any = [{"role": "user", "content": "hi"}]
    with contextlib.suppress(RuntimeError):
        async for _ in await client.create(model="policy", messages=asked, stream=True, max_tokens=400):
            break

    async def free() -> bool:
        return not await running(vllm_house.server)

    await until(free)


async def running(server: VllmServer) -> bool:
    return await server.metric("vllm:num_requests_running") > 0


# --- the same ids as the server's own --------------------------------------------------------------------------------

GREEDY = Sampling(temperature=0.0)
ASKED: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 8,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
CHAT: dict[str, Any] = {
    **ASKED,
    "messages": [{"role": "user", "content": "what is the weather?"}],
    "logprobs": True,
    "top_logprobs": 2,
}
TEXT: dict[str, Any] = {**ASKED, "prompt": [17, 45, 300, 12], "logprobs": 2}


async def both(house: VllmHouse, claim: Claim, route: str, asked: dict[str, Any]) -> tuple[str, str]:
    """The server's own response, and the gateway's."""
    async with httpx.AsyncClient(timeout=120) as client:
        own = await client.post(f"{house.server.url}/v1/{route}", json={"model": "tiny", **asked})
    ours = await house.http(claim).post(route, json={"model": "policy", **asked})
    assert (own.status_code, ours.status_code) == (200, 200), f"{own.text}\n{ours.text}"
    return own.text, ours.text


def same_tables(own: list[Any], ours: list[Any]) -> None:
    """The same tokens at every place of the prompt, with the same ranks and texts."""
    assert own[0] is ours[0] is None
    for theirs, mine in zip(own[1:], ours[1:], strict=True):
        assert list(theirs) == list(mine)
        for index, entry in theirs.items():
            assert entry["rank"] == mine[index]["rank"]
            # A part of a character has a text only where vLLM finds the rest of it in the tokens before.
            assert mine[index]["decoded_token"] in ("", entry["decoded_token"])
            assert mine[index]["logprob"] == pytest.approx(entry["logprob"], abs=1e-4)


async def test_chat_has_the_same_ids_names_and_prompt_logprobs(vllm_house: VllmHouse) -> None:
    claim = await vllm_house.claim(sampling=GREEDY)
    answers = await both(vllm_house, claim, "chat/completions", {**CHAT, "prompt_logprobs": 2})
    own, ours = map(json.loads, answers)
    assert ours["prompt_token_ids"] == own["prompt_token_ids"]
    assert ours["choices"][0]["token_ids"] == own["choices"][0]["token_ids"]
    same_tables(own["prompt_logprobs"], ours["prompt_logprobs"])
    listed = [[entry["token"] for entry in body["choices"][0]["logprobs"]["content"]] for body in (own, ours)]
    assert listed[0] == listed[1]
    tops = [
        [{other["token"] for other in entry["top_logprobs"]} for entry in body["choices"][0]["logprobs"]["content"]]
        for body in (own, ours)
    ]
    assert tops[0] == tops[1]


async def test_completions_have_the_same_ids_names_and_prompt_logprobs(vllm_house: VllmHouse) -> None:
    claim = await vllm_house.claim(sampling=GREEDY)
    own, ours = map(json.loads, await both(vllm_house, claim, "completions", {**TEXT, "prompt_logprobs": 0}))
    theirs, mine = own["choices"][0], ours["choices"][0]
    for name in ("prompt_token_ids", "token_ids"):
        assert mine[name] == theirs[name]
    assert mine["logprobs"]["tokens"] == theirs["logprobs"]["tokens"]
    same_tables(theirs["prompt_logprobs"], mine["prompt_logprobs"])


@pytest.mark.parametrize(("route", "asked"), [("chat/completions", CHAT), ("completions", TEXT)])
async def test_streams_have_the_same_ids(vllm_house: VllmHouse, route: str, asked: dict[str, Any]) -> None:
    claim = await vllm_house.claim(sampling=GREEDY)
    own, ours = await both(vllm_house, claim, route, {**asked, "stream": True})
    assert joined(ours) == joined(own)


def joined(events: str) -> tuple[list[int], list[int]]:
    """Ids of the prompt by the first chunk, and of the completion by all of them."""
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    prompt = chunks[0].get("prompt_token_ids") or choices[0]["prompt_token_ids"]
    return prompt, [index for choice in choices for index in choice.get("token_ids") or ()]


async def test_tokens_are_sampled_and_scored_as_the_server_does_it(vllm_house: VllmHouse) -> None:
    claim = await vllm_house.claim(sampling=GREEDY)
    http = vllm_house.http(claim)
    sampled = (await http.post("tokens/generate", json={"prompt_ids": TEXT["prompt"], "max_tokens": 8})).json()
    [choice] = sampled["choices"]
    ids = [*TEXT["prompt"], *choice["token_ids"]]
    scored = (await http.post("tokens/logprobs", json={"token_ids": ids})).json()["logprobs"]
    assert scored[0] is None
    assert scored[len(TEXT["prompt"]) :] == pytest.approx(choice["logprobs"], abs=1e-4)
    (call,) = await vllm_house.calls(claim)
    assert (call.suffix_ids, call.sampled_ids) == (TEXT["prompt"], choice["token_ids"])
