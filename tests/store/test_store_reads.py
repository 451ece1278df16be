"""Reads beside one another: what calls and leases need goes on while lists take long, and no read takes for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from postgres_server import PostgresServer
from store_samples import a_call, a_worker, claimed, ending

from agentlightning.errors import StoreError
from agentlightning.records import Claim, Metric, Resource
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.store.scan import MAX_CALLS, read_calls, read_rollouts
from agentlightning.store.sql.store import SqlLightningStore

DEADLINE_S = 20.0
LISTS = 8
"""More than there are threads for them."""


@pytest.fixture(params=["sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqlLightningStore]:
    """A store with threads that read."""
    url = f"sqlite:///{tmp_path}/agl.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    async with SqlLightningStore(url) as opened:
        yield opened


async def what_calls_and_leases_need(store: LightningStore, claim: Claim) -> None:
    """Everything that a server asks a store for while an agent works."""
    rollout = claim.rollout
    assert (await store.rollouts(RolloutQuery(ids=[rollout.id])))[0].state == "running"
    several = RolloutQuery(ids=[rollout.id, *(f"of-another-worker-{number}" for number in range(100))])
    assert [found.id for found in await store.rollouts(several)] == [rollout.id]  # whose are the leases of a heartbeat?
    assert [call.id for call in await store.calls([rollout.id], rollout.attempt)] != []
    assert [run.id for run in await store.runs([rollout.run_id])] == [rollout.run_id]
    assert len(await store.runs(limit=1)) == 1
    assert len(await store.resources(rollout.run_id)) == 1
    assert len(await store.wait_resources(rollout.run_id, {})) == 1
    assert await store.heartbeat(a_worker(rollout.run_id), [claim.lease]) == [True]


async def test_calls_and_leases_are_served_while_long_lists_occupy_every_thread_for_lists(
    store: SqlLightningStore,
) -> None:
    [claim] = await claimed(store)
    run_id = claim.rollout.run_id
    await store.append_calls([a_call(claim)])
    await store.put_resources([Resource(run_id=run_id, name="default", kind="policy", value={})])
    release = threading.Event()
    lists = [asyncio.create_task(store._read((lambda _: release.wait(DEADLINE_S), (), {}))) for _ in range(LISTS)]
    try:
        async with asyncio.timeout(DEADLINE_S / 2):
            await asyncio.sleep(0)
            await what_calls_and_leases_need(store, claim)
    finally:
        release.set()
    assert await asyncio.gather(*lists) == [True] * LISTS


async def test_a_read_that_takes_too_long_ends_with_a_sentence_and_pages_of_it_do_not(tmp_path: Path) -> None:
    async with open_store(f"sqlite:///{tmp_path}/agl.db?read_timeout=0") as store:
        run = await store.create_run("r", {})
        await store.log_metrics(
            [Metric(run_id=run.id, step=step, name="loss", value=float(step)) for step in range(20_000)]
        )
        with pytest.raises(StoreError, match=r"agl\.db: a read took longer than it may.*\?read_timeout=SECONDS"):
            await store.metrics(run.id)
        assert (await store.runs([run.id]))[0].id == run.id
        assert len(await store.follow_metrics(run.id, limit=10)) == 10


async def test_a_statement_that_waits_for_ever_ends_with_a_sentence(
    postgres: PostgresServer, postgres_url: str
) -> None:
    async with open_store(f"{postgres_url}?timeout=60&read_timeout=0.2") as store, asyncio.timeout(DEADLINE_S):
        run = await store.create_run("r", {})
        with postgres.connect(postgres_url.rpartition("/")[2]) as other, other.transaction():
            other.execute("LOCK TABLE metrics IN ACCESS EXCLUSIVE MODE")
            with pytest.raises(StoreError, match="a read took longer than it may"):
                await store.metrics(run.id)
        assert await store.metrics(run.id) == []


async def test_a_portion_is_as_large_as_its_calls_allow(store: LightningStore) -> None:
    claims: list[Claim] = await claimed(store, 5)
    for claim in claims:
        await store.append_calls([a_call(claim) for _ in range(MAX_CALLS // 2 + 1)])
    await store.finish([ending(claim) for claim in claims])
    portions = [portion async for portion in read_rollouts(store, RolloutQuery(run_id=claims[0].rollout.run_id))]
    assert [len(portion) for portion in portions] == [1] * 5
    assert len(await read_calls(store, portions[0])) == MAX_CALLS // 2 + 1
