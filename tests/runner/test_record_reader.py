"""Records of attempts that end at about the same time are read together, and a failure is told to all that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from agentlightning.errors import StoreError
from agentlightning.records import Call, Span
from agentlightning.runner.air import MAX_ROLLOUTS_PER_REQUEST, RecordReader


class SlowStore:
    """Answers with a call for each rollout that was asked about, once the gate is open."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.gate = asyncio.Event()
        self.fails: Exception | None = None

    async def calls(self, ids: Sequence[str]) -> list[Call]:
        self.asked.append(list(ids))
        await self.gate.wait()
        if self.fails:
            raise self.fails
        return [cast(Any, _Of(one)) for one in ids]

    async def spans(self, ids: Sequence[str]) -> list[Span]:
        return []


class _Of:
    def __init__(self, rollout_id: str) -> None:
        self.rollout_id = rollout_id


async def asking(reader: RecordReader, count: int) -> list[asyncio.Task[Any]]:
    asked = [asyncio.create_task(reader.latest(f"r{number}")) for number in range(count)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return asked


async def test_what_is_asked_for_while_a_request_is_under_way_goes_into_the_next_one() -> None:
    store = SlowStore()
    records = RecordReader(cast(Any, store))
    first = await asking(records, 1)
    rest = await asking(records, MAX_ROLLOUTS_PER_REQUEST + 1)
    store.gate.set()
    read = await asyncio.gather(*first, *rest)
    assert [len(ids) for ids in store.asked] == [1, MAX_ROLLOUTS_PER_REQUEST, 1]
    assert [calls[0].rollout_id for calls, _ in read] == [
        "r0",
        *(f"r{number}" for number in range(MAX_ROLLOUTS_PER_REQUEST + 1)),
    ]


async def test_a_failure_is_told_to_everyone_and_the_next_one_is_read_again() -> None:
    store = SlowStore()
    records = RecordReader(cast(Any, store))
    store.fails = StoreError("full disk")
    store.gate.set()
    for one in await asking(records, 2):
        with pytest.raises(StoreError, match="full disk"):
            await one
    store.fails = None
    [[calls, _]] = await asyncio.gather(*await asking(records, 1))
    assert [call.rollout_id for call in calls] == ["r0"]


async def test_a_fault_of_our_own_is_told_too_since_attempts_wait_for_the_answer() -> None:
    store = SlowStore()
    store.fails = KeyError("what")
    store.gate.set()
    for one in await asking(RecordReader(cast(Any, store)), 2):
        with pytest.raises(StoreError, match="KeyError: 'what'"):
            await one
