"""Numbers of the store that many ask for: one read at a time, and none while its result is fresh."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from agentlightning.errors import StoreError
from agentlightning.gateway.statistics_cache import MAX_KEPT, StatisticsCache
from agentlightning.records import RunSize
from agentlightning.store.sql.store import InMemoryLightningStore


class SlowStore(InMemoryLightningStore):
    """A store whose sizes take until `ready`."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.away = False
        self.asked, self.ready = asyncio.Event(), asyncio.Event()

    async def sizes(self, run_ids: Sequence[str] | None = None) -> list[RunSize]:
        self.reads += 1
        self.asked.set()
        await self.ready.wait()
        if self.away:
            raise StoreError("the store is away")
        return await super().sizes(run_ids)


@pytest.fixture
async def store() -> AsyncIterator[SlowStore]:
    async with SlowStore() as opened:
        await opened.create_run("", {}, "run")
        yield opened


async def test_a_crowd_shares_one_read_and_a_caller_that_gives_up_does_not_end_it(store: SlowStore) -> None:
    cache = StatisticsCache(store, max_age_s=600)
    impatient = asyncio.create_task(cache.sizes())
    await store.asked.wait()
    crowd = [asyncio.create_task(cache.sizes()) for _ in range(5)]
    await asyncio.sleep(0)
    impatient.cancel()
    store.ready.set()
    assert [[size.run_id for size in await one] for one in crowd] == [["run"]] * 5
    assert [size.run_id for size in await cache.sizes()] == ["run"]
    assert store.reads == 1
    assert [size.run_id for size in await cache.sizes(["run"])] == ["run"]
    assert store.reads == 2


async def test_what_is_too_old_or_failed_is_read_again(store: SlowStore) -> None:
    store.ready.set()
    cache = StatisticsCache(store, max_age_s=0)
    await cache.sizes()
    await cache.sizes()
    assert store.reads == 2
    cache = StatisticsCache(store, max_age_s=600)
    store.away = True
    for _ in range(2):
        with pytest.raises(StoreError, match="away"):
            await cache.sizes()
    store.away = False
    assert len(await cache.sizes()) == 1
    assert store.reads == 5


async def test_callers_who_ask_for_ever_other_runs_fill_no_memory(store: SlowStore) -> None:
    store.ready.set()
    cache = StatisticsCache(store, max_age_s=600)
    for number in range(2 * MAX_KEPT):
        await cache.sizes([f"run{number}"])
    assert store.reads == 2 * MAX_KEPT
    await cache.sizes(["run0"])
    assert store.reads == 2 * MAX_KEPT
    assert len(cache._reads) == MAX_KEPT
