"""The gateway over a real vLLM server: exact prompts, true log-probabilities, versions, limits, through both faces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from vllm_house import VllmHouse, VllmServer, open_house, prompts, recomputed

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


async def test_the_face_of_an_engine_is_found_out(vllm_server: VllmServer) -> None:
    async with open_house(vllm_server, None) as house:
        claim = await house.claim()
        await say(house, claim, [{"role": "user", "content": "hi"}], False)
        assert house.app._engine_router._apis == {vllm_server.url: "generate"}


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
    from agentlightning.records import NewRollout, Sampling, WorkerStatus

    store, run_id = vllm_house.store, vllm_house.run_id
    warm = NewRollout(run_id=run_id, task={}, group_id="warm", replica=0, sampling=Sampling(temperature=0.5))
    await store.enqueue([warm])
    [claim] = await store.claim(WorkerStatus(id="w", run_id=run_id, host="h", pid=1, running=0, seen_ns=0))
    with pytest.raises(openai.ConflictError, match="raw log-probabilities"):
        await say(vllm_house, claim, [{"role": "user", "content": "hi"}], False)


async def test_weights_that_change_under_a_call_stamp_its_tokens(vllm_server: VllmServer) -> None:
    async with open_house(vllm_server, "generate") as house:
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
