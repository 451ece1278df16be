"""Stored responses: fetched, continued and referred to."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_house import House, path
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.responses import Response

from agentlightning.records import Claim

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}


@pytest.fixture
async def run(house: House) -> Claim:
    return await house.claim()


@pytest.fixture
async def client(house: House, run: Claim) -> AsyncOpenAI:
    return house.openai(run)


async def made(client: AsyncOpenAI, **given: Any) -> Response:
    found: Response = await client.responses.create(**{"model": "policy", "input": "Hi", **given})
    return found


async def test_a_stored_response_is_fetched_as_it_was_given(client: AsyncOpenAI, house: House) -> None:
    house.say(CALL)
    first = await made(client, instructions="Be brief.", metadata={"a": "b"}, tools=[TOOL], max_output_tokens=99)
    assert (await client.responses.retrieve(first.id)).to_dict() == first.to_dict()


async def test_a_stored_response_is_fetched_from_a_gateway_that_was_started_again(
    client: AsyncOpenAI, house: House, run: Claim
) -> None:
    first = await made(client, metadata={"a": "b"})
    again = house.openai(run, house.gateway())
    assert (await again.responses.retrieve(first.id)).to_dict() == first.to_dict()


async def test_a_fetched_response_has_nothing_further_to_include(client: AsyncOpenAI) -> None:
    first = await made(client)
    with pytest.raises(BadRequestError, match=r"include.*: a stored response is returned as its request asked"):
        await client.responses.retrieve(first.id, include=["message.output_text.logprobs"])


@pytest.mark.parametrize("store", [None, True])
async def test_a_response_is_continued_by_its_id_where_it_is_stored(client: AsyncOpenAI, store: bool | None) -> None:
    first = await made(client, **({} if store is None else {"store": store}))
    second = await made(client, input="And?", previous_response_id=first.id)
    assert second.previous_response_id == first.id


async def test_a_response_that_was_not_to_be_stored_is_not_found(client: AsyncOpenAI, house: House, run: Claim) -> None:
    first = await made(client, store=False)
    item = {"type": "item_reference", "id": first.output[0].id}
    for again in (client, house.openai(run, house.gateway())):
        for attempt in (
            again.responses.retrieve(first.id),
            made(again, previous_response_id=first.id),
            made(again, input=[item]),
        ):
            with pytest.raises(NotFoundError):
                await attempt


async def test_a_response_without_input_continues_the_one_before(client: AsyncOpenAI, run: Claim, house: House) -> None:
    first = await made(client)
    given = {"model": "policy", "previous_response_id": first.id}
    second, counted = [
        await house.http().post(f"{path(run)}/v1/{route}", json=given)
        for route in ("responses", "responses/input_tokens")
    ]
    assert second.json()["usage"]["input_tokens"] == counted.json()["input_tokens"]
    one, two = await house.store.calls([run.rollout.id])
    assert (two.parent_id, two.fork_cause) == (one.id, None)


# --- item references ----------------------------------------------------------------------------------------------------


def reference(item_id: str | None) -> Any:
    return {"type": "item_reference", "id": item_id}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("restarted", [False, True])
async def test_a_conversation_of_references_continues_exactly(
    client: AsyncOpenAI, house: House, run: Claim, stream: bool, restarted: bool
) -> None:
    house.say("It is sunny. " + CALL, "The answer is 42.")
    user = {"role": "user", "content": "Hi"}
    if stream:
        *_, end = [event async for event in await client.responses.create(  # type: ignore[call-overload]
            model="policy", input=[user], tools=[TOOL], stream=True
        )]  # fmt: skip
        first = end.response
    else:
        first = await made(client, input=[user], tools=[TOOL])
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "21"}
    again = house.openai(run, house.gateway()) if restarted else client
    given = [user, *(reference(item.id) for item in first.output), result]
    await made(again, input=given, tools=[TOOL])
    one, two = await house.store.calls([run.rollout.id])
    assert (two.parent_id, two.fork_cause) == (one.id, None)


def input_item(made_first: Response) -> str:
    """Id of the first item of a response's input."""
    return f"msg_{made_first.id.removeprefix('resp_')}_in_0"


@pytest.mark.parametrize(
    ("count", "said"),
    [(150, "items of at most 8388608 bytes in all"), (1025, "at most 1024 references to items, got 1025")],
)
async def test_references_to_more_than_a_request_could_hold_are_refused_before_they_are_read(
    client: AsyncOpenAI, count: int, said: str
) -> None:
    first = await made(client, input="the weather " * 5000)
    with pytest.raises(BadRequestError, match=said) as refused:
        await made(client, input=[reference(input_item(first))] * count)
    assert refused.value.param == "input"


async def test_a_reference_to_nothing_is_not_found(client: AsyncOpenAI, house: House, run: Claim) -> None:
    other = house.openai(await house.claim("other"))
    theirs = await made(other)
    mine = await made(client)
    missing = [f"{mine.output[0].id}_{number}" for number in ("1", "99", "9" * 5000)]
    for name in ("msg_1", "rs_01970000-1111-7222-8333-444455556666", theirs.output[0].id, *missing):
        with pytest.raises(NotFoundError, match=r"input\[0\]\.id"):
            await made(client, input=[reference(name)])
