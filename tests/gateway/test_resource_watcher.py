"""Gateways hear of new resources instead of reading them again, and show what goes on in the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from gateway_house import House
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from agentlightning.errors import StoreError
from agentlightning.gateway.external_client import ExternalDirectory
from agentlightning.gateway.external_keys import ExternalKeys
from agentlightning.gateway.metrics import StoreMetrics
from agentlightning.gateway.resource_watcher import ResourceWatcher
from agentlightning.records import NewRollout, Resource, RunStatistics, WorkerStatus
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.sql.store import SqlLightningStore


class CountingStore(SqlLightningStore):
    """A store in memory that counts how often resources are read, and can be away."""

    def __init__(self) -> None:
        super().__init__("memory://")
        self.reads = 0
        self.away = False
        self.gate: asyncio.Event | None = None
        """Holds back what was read until it is set."""
        self.held = 0

    async def resources(
        self, run_id: str, name: str | None = None, latest: bool = True, version: int | None = None
    ) -> list[Resource]:
        self.reads += 1
        found = await super().resources(run_id, name, latest, version)
        if self.gate is not None:
            self.held += 1
            await self.gate.wait()
        return found

    async def wait_resources(self, run_id: str, after: Mapping[str, int], timeout_s: float = 30.0) -> list[Resource]:
        if self.away:
            raise StoreError("the store is away")
        return await super().wait_resources(run_id, after, 100 * timeout_s)  # so that only news end it

    async def statistics(self, run_id: str | None = None) -> list[RunStatistics]:
        if self.away:
            raise StoreError("the store is away")
        return await super().statistics(run_id)


@pytest.fixture
async def store() -> AsyncIterator[CountingStore]:
    async with CountingStore() as opened:
        await opened.create_run("", {}, "run")
        yield opened


def an_external_model(model: str) -> Resource:
    return Resource(run_id="run", name="judge", kind="external", value={"url": "http://x/v1", "models": [model]})


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.to_thread(int)  # let others work


async def names(watcher: ResourceWatcher) -> list[str]:
    return list(ExternalDirectory(ExternalKeys()).models("run", await watcher.resources("run")).exact)


async def test_resources_of_a_run_are_read_once_and_again_when_there_are_new_ones(store: CountingStore) -> None:
    await store.put_resources([an_external_model("a")])
    heard: list[str] = []
    watcher = ResourceWatcher(store, heard.append, BackgroundTasks())
    assert await names(watcher) == ["a"]
    await until(lambda: watcher.reports_changes("run"))
    assert await names(watcher) == ["a"]
    reads = store.reads
    for _ in range(20):
        assert await names(watcher) == ["a"]
    assert store.reads == reads
    heard.clear()
    await store.put_resources([an_external_model("b")])
    await until(lambda: heard == ["run"])
    assert await names(watcher) == ["b"]
    await watcher.close()


async def test_resources_that_change_while_they_are_read_are_read_again(store: CountingStore) -> None:
    watcher = ResourceWatcher(store, lambda _: None, BackgroundTasks())
    store.gate = asyncio.Event()
    reading = asyncio.create_task(watcher.resources("run"))
    await until(lambda: store.held)
    await store.put_resources([an_external_model("a")])
    watcher.forget("run")
    store.gate.set()
    assert [one.name for one in await reading] == ["judge"]
    await watcher.close()


async def test_a_run_that_is_deleted_is_followed_no_more(store: CountingStore) -> None:
    heard: list[str] = []
    watcher = ResourceWatcher(store, heard.append, BackgroundTasks())
    await watcher.resources("run")
    await store.put_resources([an_external_model("a")])
    await until(lambda: heard)
    assert watcher.reports_changes("run")
    await store.delete_runs(["run"])
    await until(lambda: not watcher.reports_changes("run"))
    await watcher.close()


async def test_a_policy_that_another_server_published_is_used_without_being_asked_for(house: House) -> None:
    claim = await house.claim()
    agent = house.openai(claim)

    async def is_seeded() -> bool:
        house.say("hello")
        question = str(time.monotonic_ns())  # the same one again would be a retry
        await agent.chat.completions.create(model="default", messages=[{"role": "user", "content": question}])
        return "seed" in house.engine.requests[-1]["sampling_params"]

    assert await is_seeded()
    await until(
        lambda: house.app._watcher.reports_changes(house.run_id)
    )  # from here on nothing is read again for its age
    await house.serve_policy(seed=None)  # straight into the store, past the application
    async with asyncio.timeout(20):  # less than a poll for news takes where there are none
        while await is_seeded():
            pass


async def test_metrics_show_what_goes_on_in_the_store(store: CountingStore) -> None:
    registry = CollectorRegistry()
    metrics = StoreMetrics(store, [], registry)
    await store.enqueue([NewRollout(run_id="run", task={}, group_id=str(number)) for number in range(3)])
    await store.claim(WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0), lease_s=5)
    await metrics.look()
    seen = generate_latest(registry).decode()
    assert "agl_store_up 1.0" in seen
    assert 'agl_store_queued{run="run"} 2.0' in seen
    assert 'agl_store_running{run="run"} 1.0' in seen
    assert 'agl_store_leases_expiring{run="run"} 1.0' in seen
    assert 'agl_store_workers{run="run"} 1.0' in seen
    assert 'agl_store_oldest_queued_seconds{run="run"} ' in seen
    assert float(seen.split("agl_store_write_seconds_count ")[1].split()[0]) >= 2
    assert float(seen.split("agl_store_write_group_sum ")[1].split()[0]) >= 2
    store.away = True
    await metrics.look()
    assert "agl_store_up 0.0" in generate_latest(registry).decode()
