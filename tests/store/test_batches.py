"""What is appended at the same time travels as one request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from agentlightning.errors import InputError, NotFoundError, StoreError
from agentlightning.store.batches import LARGEST, Batches


class Wire:
    """Remembers the requests; refuses those that hold what it does not like."""

    def __init__(self, dislikes: Sequence[int] = (), error: type[Exception] = InputError) -> None:
        self.requests: list[list[int]] = []
        self.batches = Batches(self._send)
        self.asked = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self._dislikes = set(dislikes)
        self._error = error

    async def _send(self, body: bytes, count: int) -> Sequence[bool]:
        numbers = json.loads(body)
        assert len(numbers) == count
        self.requests.append(numbers)
        self.asked.set()
        await self.open.wait()
        if self._dislikes & set(numbers):
            raise self._error("not this one")
        return [number % 2 == 0 for number in numbers]

    async def append(self, *numbers: int) -> Sequence[bool] | None:
        return await self.batches.append(json.dumps(numbers).encode(), len(numbers))


async def test_appends_of_one_turn_travel_together_and_each_hears_of_its_own() -> None:
    wire = Wire()
    assert await asyncio.gather(wire.append(1), wire.append(2, 3), wire.append(4)) == [[False], [True, False], [True]]
    assert wire.requests == [[1, 2, 3, 4]]


async def test_what_comes_while_a_batch_is_under_way_makes_the_next_one() -> None:
    wire = Wire()
    wire.open.clear()
    first = asyncio.ensure_future(wire.append(1))
    await wire.asked.wait()
    others = [asyncio.ensure_future(wire.append(number)) for number in (2, 3)]
    await asyncio.sleep(0)
    wire.open.set()
    await asyncio.gather(first, *others)
    assert wire.requests == [[1], [2, 3]]


async def test_only_those_that_are_at_fault_fail() -> None:
    wire = Wire(dislikes=[2, 5], error=NotFoundError)
    said = await asyncio.gather(*[wire.append(number) for number in range(8)], return_exceptions=True)
    assert [number for number, one in enumerate(said) if isinstance(one, NotFoundError)] == [2, 5]
    assert [one for one in said if not isinstance(one, Exception)] == [
        [True],
        [False],
        [False],
        [True],
        [True],
        [False],
    ]


async def test_an_error_that_is_nobodys_in_particular_is_everybodys() -> None:
    wire = Wire(dislikes=[2], error=StoreError)
    said = await asyncio.gather(*[wire.append(number) for number in range(4)], return_exceptions=True)
    assert all(isinstance(one, StoreError) for one in said)
    assert len(wire.requests) == 1


async def test_a_caller_that_gives_up_in_time_sends_nothing() -> None:
    wire = Wire()
    gone, stays = asyncio.ensure_future(wire.append(1)), asyncio.ensure_future(wire.append(2))
    await asyncio.sleep(0)  # both have appended, and nothing is sent yet
    gone.cancel()
    assert await stays == [True]
    assert wire.requests == [[2]]


async def test_large_appends_travel_in_several_requests() -> None:
    lengths: list[int] = []

    async def send(body: bytes, _: int) -> None:
        lengths.append(len(body))

    batches = Batches(send)
    elements = b'["' + b"x" * (LARGEST // 2) + b'"]'
    await asyncio.gather(*[batches.append(elements, 1) for _ in range(4)])
    assert len(lengths) == 4


async def test_closing_fails_what_is_under_way() -> None:
    wire = Wire()
    wire.open.clear()
    asked = [asyncio.ensure_future(wire.append(number)) for number in range(2)]
    await wire.asked.wait()
    asked.append(asyncio.ensure_future(wire.append(2)))
    await asyncio.sleep(0)
    await wire.batches.close()
    for one in asked:
        with pytest.raises(StoreError, match="closed while this was being sent"):
            await one
