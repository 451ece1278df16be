"""The official Python SDKs drive every protocol: same text, well-formed events, no forks."""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

import anthropic
import openai
import pytest
from python_drivers import FUNCTION, chat, completions, messages, responses, threads
from sdk_house import ARGUMENTS, CONVERSATION, QUESTION, SdkHouse, check_record


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_every_api_hears_the_whole_conversation_which_is_recorded_token_for_token(
    sdk_house: SdkHouse, stream: bool
) -> None:
    by_id = functools.partial(responses, stored=True)
    for drive in (chat, responses, by_id, messages, threads):
        place = await sdk_house.place()
        assert await drive(place, stream) == CONVERSATION, drive
        check_record(await sdk_house.calls(place))
    place = await sdk_house.place()
    assert await completions(place, stream) == [" sunny, they say."] * 2
    check_record(await sdk_house.calls(place), turns=2)


async def test_protocols_may_be_mixed_in_one_conversation(sdk_house: SdkHouse) -> None:
    place = await sdk_house.place()
    assert await chat(place, False) == await messages(place, True) == CONVERSATION
    causes = {call.fork_cause for call in await sdk_house.calls(place)}
    assert causes == {None}


async def test_arguments_of_a_tool_call_come_piece_by_piece(sdk_house: SdkHouse) -> None:
    place = await sdk_house.place()
    async with openai.AsyncOpenAI(base_url=place.base_url, api_key=place.key) as client:
        tools: Any = [{"type": "function", "function": FUNCTION}]
        asked: Any = [{"role": "user", "content": QUESTION}]
        pieces = [
            call.function.arguments
            async for chunk in await client.chat.completions.create(
                model="policy", messages=asked, tools=tools, stream=True
            )
            for choice in chunk.choices
            for call in choice.delta.tool_calls or []
            if call.function and call.function.arguments
        ]
    assert len(pieces) > 5
    assert json.loads("".join(pieces)) == ARGUMENTS


async def test_tokens_are_counted_and_models_listed(sdk_house: SdkHouse) -> None:
    place = await sdk_house.place()
    async with anthropic.AsyncAnthropic(base_url=place.anthropic_base_url, api_key=place.key) as client:
        asked: Any = [{"role": "user", "content": QUESTION}]
        counted = await client.messages.count_tokens(model="policy", messages=asked)
        message = await client.messages.create(model="policy", max_tokens=200, messages=asked)
        assert counted.input_tokens == message.usage.input_tokens
        assert [model.id async for model in client.models.list()] == ["policy"]
    async with openai.AsyncOpenAI(base_url=place.base_url, api_key=place.key) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]


async def test_errors_are_the_sdks_own(sdk_house: SdkHouse) -> None:
    place = await sdk_house.place()
    asked: Any = [{"role": "user", "content": QUESTION}]
    wrong = "sk-agl-" + "A" * 44
    async with openai.AsyncOpenAI(base_url=place.base_url, api_key=wrong) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model="policy", messages=asked)
    async with openai.AsyncOpenAI(base_url=place.base_url, api_key=place.key) as client:
        with pytest.raises(openai.BadRequestError, match="bad_words"):
            await client.chat.completions.create(model="policy", messages=asked, extra_body={"bad_words": ["no"]})
        with pytest.raises(openai.BadRequestError, match="top_k"):
            await client.responses.create(model="policy", input="hi", extra_body={"top_k": "many"})
    async with anthropic.AsyncAnthropic(base_url=place.anthropic_base_url, api_key=wrong) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="policy", max_tokens=9, messages=asked)
    async with anthropic.AsyncAnthropic(base_url=place.anthropic_base_url, api_key=place.key) as client:
        with pytest.raises(anthropic.BadRequestError, match="top_k"):
            await client.messages.create(model="policy", max_tokens=9, messages=asked, extra_body={"top_k": 0.5})


async def test_an_sdks_retry_after_its_timeout_joins_the_call_it_left(sdk_house: SdkHouse) -> None:
    place = await sdk_house.place()
    sdk_house.engine.gate = asyncio.Event()
    sdk_house.engine.hold_whole = True
    tries: list[Any] = []

    async def note(request: Any) -> None:
        tries.append(request)

    http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [note]})
    async with openai.AsyncOpenAI(
        base_url=place.base_url, api_key=place.key, timeout=1.0, max_retries=8, http_client=http
    ) as client:
        asked: Any = [{"role": "user", "content": QUESTION}]
        call = asyncio.create_task(client.chat.completions.create(model="policy", messages=asked))
        while len(tries) < 2 or sdk_house.engine.requests == []:  # noqa: ASYNC110 - the SDK's clock
            await asyncio.sleep(0.02)
        sdk_house.engine.gate.set()
        assert (await call).choices[0].finish_reason == "stop"
    assert len(await sdk_house.calls(place)) == len(sdk_house.engine.requests) == 1
