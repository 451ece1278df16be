"""What is submitted at the same time is delivered as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentlightning.errors import InputError, StoreError
from agentlightning.store.coalescer import MAX_OVERLAPPING, Coalescer


class Wire:
    """Remembers the batches; refuses the numbers that it does not like, or all."""

    def __init__(self, dislikes: Sequence[int] = (), error: Exception | None = None, **limits: Any) -> None:
        self.batches: list[list[int]] = []
        self.coalescer = Coalescer[int, bool](self._deliver, **{"max_items": 100, **limits}, size=lambda number: number)
        self.delivering = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()
        self._dislikes = set(dislikes)
        self._error = error

    async def _deliver(self, numbers: list[int]) -> Sequence[bool | Exception]:
        self.batches.append(numbers)
        self.delivering.set()
        await self.open.wait()
        if self._error is not None:
            raise self._error
        return [InputError("not this one") if number in self._dislikes else number % 2 == 0 for number in numbers]

    async def submit(self, number: int) -> bool:
        return await self.coalescer.submit(number)


async def test_items_of_one_turn_are_one_batch_and_each_hears_of_its_own() -> None:
    wire = Wire()
    assert await asyncio.gather(wire.submit(1), wire.submit(2), wire.submit(4)) == [False, True, True]
    assert wire.batches == [[1, 2, 4]]


async def test_what_comes_while_a_batch_is_under_way_makes_the_next_one() -> None:
    wire = Wire()
    wire.open.clear()
    first = asyncio.ensure_future(wire.submit(1))
    await wire.delivering.wait()
    others = [asyncio.ensure_future(wire.submit(number)) for number in (2, 3)]
    await asyncio.sleep(0)
    wire.open.set()
    await asyncio.gather(first, *others)
    assert wire.batches == [[1], [2, 3]]


async def test_an_exception_among_the_outcomes_is_raised_to_its_own_submitter() -> None:
    wire = Wire(dislikes=[2, 5])
    outcomes = await asyncio.gather(*[wire.submit(number) for number in range(8)], return_exceptions=True)
    assert [number for number, one in enumerate(outcomes) if isinstance(one, InputError)] == [2, 5]


async def test_a_delivery_that_fails_fails_for_everybody_and_the_next_one_goes_on() -> None:
    wire = Wire(error=StoreError("away"))
    outcomes = await asyncio.gather(*[wire.submit(number) for number in range(4)], return_exceptions=True)
    assert all(isinstance(one, StoreError) for one in outcomes)
    assert len(wire.batches) == 1
    with pytest.raises(StoreError, match="away"):
        await wire.submit(5)


async def test_a_caller_that_gives_up_in_time_sends_nothing() -> None:
    wire = Wire()
    gone, stays = asyncio.ensure_future(wire.submit(1)), asyncio.ensure_future(wire.submit(2))
    await asyncio.sleep(0)  # both have submitted, and nothing is delivered yet
    gone.cancel()
    assert await stays is True
    assert wire.batches == [[2]]


async def test_batches_are_bounded_by_their_items_and_by_their_size() -> None:
    few, small = Wire(max_items=3), Wire(max_size=10)
    await asyncio.gather(*[few.submit(number) for number in range(7)])
    assert few.batches == [[0, 1, 2], [3, 4, 5], [6]]
    await asyncio.gather(*[small.submit(number) for number in (4, 4, 4, 50, 1)])
    assert small.batches == [[4, 4], [4], [50], [1]]


async def test_draining_waits_for_what_was_submitted() -> None:
    wire = Wire()
    asked = [asyncio.ensure_future(wire.submit(number)) for number in range(3)]
    await asyncio.sleep(0)
    await wire.coalescer.drain()
    assert all(one.done() for one in asked)
    await wire.coalescer.drain()


async def test_a_batch_that_hangs_holds_up_the_next_until_it_is_late_only() -> None:
    wire = Wire(late_s=0.0)
    wire.open.clear()
    hanging = asyncio.ensure_future(wire.submit(1))
    await wire.delivering.wait()
    wire.delivering.clear()
    others = [asyncio.ensure_future(wire.submit(number)) for number in (2, 3)]
    await wire.delivering.wait()
    assert (wire.batches, hanging.done()) == ([[1], [2, 3]], False)
    wire.open.set()
    await asyncio.gather(hanging, *others)
    await wire.coalescer.drain()


async def test_only_a_few_batches_overlap_and_the_first_that_ends_takes_what_waits() -> None:
    wire = Wire(late_s=0.0)
    wire.open.clear()
    asked = []
    for number in range(MAX_OVERLAPPING):
        wire.delivering.clear()
        asked.append(asyncio.ensure_future(wire.submit(number)))
        await wire.delivering.wait()
    for number in (8, 9):
        asked.append(asyncio.ensure_future(wire.submit(number)))
    for _ in range(3):
        await asyncio.sleep(0)  # the last one under way becomes late
    assert len(wire.batches) == MAX_OVERLAPPING
    wire.open.set()
    await asyncio.gather(*asked)
    assert wire.batches == [*([number] for number in range(MAX_OVERLAPPING)), [8, 9]]


async def test_what_is_submitted_while_it_closes_fails_and_what_comes_later_is_delivered() -> None:
    wire = Wire()
    wire.open.clear()
    asked = [asyncio.ensure_future(wire.submit(1))]
    await wire.delivering.wait()
    closing = asyncio.ensure_future(wire.coalescer.close(StoreError("closed while this was being sent")))
    await asyncio.sleep(0)
    asked.append(asyncio.ensure_future(wire.submit(2)))
    await closing
    for one in asked:
        with pytest.raises(StoreError, match="closed while this was being sent"):
            await one
    wire.open.set()
    assert await wire.submit(4) is True
