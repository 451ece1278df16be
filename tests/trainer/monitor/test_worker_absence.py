"""A run whose workers are started elsewhere says that none comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agentlightning.records import NewRollout, WorkerStatus
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.monitor.load_watch import WorkerAbsence

Minute = Callable[[], Awaitable[None]]


async def said_in(
    store: LightningStore, run_id: str, *minutes: Minute, labels: tuple[str, ...] = ()
) -> list[list[str]]:
    """Sentences after each minute, in which this happens."""
    said: list[str] = []
    heard: list[list[str]] = []
    happens = iter(minutes)

    async def sleep(_: float) -> None:
        heard.append(said.copy())
        said.clear()
        minute = next(happens, None)
        if minute is None:
            raise asyncio.CancelledError
        await minute()

    with pytest.raises(asyncio.CancelledError):
        await WorkerAbsence(store, run_id, labels, said.append, sleep).watch()
    return heard[1:]


async def test_a_run_whose_rollouts_wait_says_once_that_no_worker_with_its_labels_comes() -> None:
    async with InMemoryLightningStore() as store:
        run_id = (await store.create_run("waits", {})).id

        async def enqueue() -> None:
            await store.enqueue([NewRollout(run_id=run_id, task={}, group_id="g", replica=n) for n in range(2)])

        async def claim() -> None:
            worker = WorkerStatus(id="w", run_id=run_id, host="h", pid=1, running=0, seen_ns=0)
            assert len(await store.claim(worker)) == 1

        async def nothing() -> None:
            pass

        minutes = (nothing, enqueue, nothing, claim, nothing)
        heard = await said_in(store, run_id, *minutes, labels=("gpu=no", "disk=ssd"))
    late = "rollouts wait, and no worker with gpu=no, disk=ssd has asked for work for 60 s"
    assert heard == [[], [f"2 {late}"], [], [], [f"1 {late}"]]
