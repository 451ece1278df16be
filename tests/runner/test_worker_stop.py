"""Workers and a store that takes its time: what they claim, watch and tell as they stop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest
from runner_bench import DEADLINE_S

from agentlightning.records import JSON, Claim, Finish, Lease, NewRollout, RetryPolicy, Rollout, WorkerStatus
from agentlightning.runner.agent import LLM
from agentlightning.runner.attempt import AttemptContext
from agentlightning.runner.execution import Execution
from agentlightning.runner.function import FunctionRunner
from agentlightning.runner.heartbeat import EXIT_REPLACE
from agentlightning.runner.worker import Worker, WorkerOptions
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.store.templates import TemplateReader


class Slow(InMemoryLightningStore):
    """Takes ends only after other tasks have had many turns."""

    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        for _ in range(100):
            await asyncio.sleep(0)
        return await super().finish(finishes)


class Late(InMemoryLightningStore):
    """Its answers to the first claim are longer on their way than half of a lease; then it renews the lease, or does not."""

    def __init__(self, held: bool) -> None:
        super().__init__()
        self._held = held
        self.asked = asyncio.Event()

    async def claim(
        self,
        worker: WorkerStatus,
        *,
        limit: int = 1,
        lease_s: float = 30.0,
        wait_s: float = 0.0,
    ) -> list[Claim]:
        claims = await super().claim(worker, limit=limit, lease_s=60.0, wait_s=wait_s)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.asked.wait(), 0.6 * lease_s)
        return claims

    async def heartbeat(self, worker: WorkerStatus, leases: Sequence[Lease], *, lease_s: float) -> list[bool]:
        self.asked.set()
        held = await super().heartbeat(worker, leases, lease_s=60.0)
        return held if self._held else [False for _ in held]


def an_execution(store: LightningStore, runner: FunctionRunner, abandon_s: float = 30.0) -> Execution:
    return Execution(
        store=store,
        server_url="http://127.0.0.1:9",
        model="policy",
        runner=runner,
        reward=None,
        abandon_s=abandon_s,
        templates=TemplateReader(store),
    )


@asynccontextmanager
async def working(
    store: LightningStore,
    solve: Callable[..., Any],
    *,
    abandon_s: float = 30.0,
    kind: type[Worker] = Worker,
    **options: Any,
) -> AsyncIterator[tuple[Worker, Rollout, asyncio.Task[int]]]:
    """A worker with one place, the rollout that waits for it, and its run."""
    retry = options.pop("retry", RetryPolicy())
    run_id = (await store.create_run("run", {})).id
    [queued] = await store.enqueue([NewRollout(run_id=run_id, task={}, group_id="g", retry=retry)])
    with ThreadPoolExecutor(1) as threads:
        execution = an_execution(store, FunctionRunner(solve, threads), abandon_s)
        settings = WorkerOptions(run_id=run_id, worker_id="w", concurrency=1, **options)
        worker = kind(execution, settings, open_store=InMemoryLightningStore)
        yield worker, queued, asyncio.create_task(worker.run())


@pytest.mark.parametrize("held", [True, False])
async def test_a_claim_whose_answer_was_long_on_its_way_is_worked_on_if_it_is_still_held(held: bool) -> None:
    begun = asyncio.Event()

    async def solve(task: JSON, llm: LLM) -> float:
        assert store.asked.is_set(), "not before the worker knew that it holds the rollout"
        begun.set()
        return 1.0

    async with Late(held) as store:
        async with working(store, solve, lease_s=1.0) as (worker, queued, running):
            await asyncio.wait_for((begun if held else store.asked).wait(), DEADLINE_S)
            worker.stop()
            assert await running == 0
        [attempt] = await store.attempts([queued.id])
    assert (attempt.state, begun.is_set()) == (("succeeded", True) if held else ("running", False))


@pytest.mark.parametrize("outlived", [True, False])
async def test_a_worker_that_starts_again_keeps_the_leases_of_agents_that_outlived_it(outlived: bool) -> None:
    async with InMemoryLightningStore() as store:
        run_id = (await store.create_run("again", {})).id
        await store.enqueue([NewRollout(run_id=run_id, task={}, group_id="g") for _ in range(2)])
        worker = Worker(
            an_execution(store, cast(Any, None)),
            WorkerOptions(run_id=run_id, worker_id="w", concurrency=1),
            open_store=InMemoryLightningStore,
            left=[] if outlived else None,
        )
        predecessor = worker.status()
        if predecessor.pid:
            predecessor = replace(predecessor, pid=predecessor.pid + 1)
        [claim] = await store.claim(predecessor)
        await store.claim(worker.status())
        assert await store.heartbeat(worker.status(), [claim.lease]) == [outlived]


class Failing(Worker):
    """Fails when its heartbeat looks at what acts for the first time."""

    looks = 0

    @property
    def acting(self) -> tuple[AttemptContext, ...]:
        self.looks += 1
        if self.looks == 1:
            raise RuntimeError("the first look fails")
        return super().acting


async def idle(task: JSON, llm: LLM) -> float:
    return 1.0


async def test_leases_are_watched_again_after_the_watch_has_failed() -> None:
    async with InMemoryLightningStore() as store, working(store, idle, kind=Failing) as (worker, _, running):
        assert isinstance(worker, Failing)
        deadline = time.monotonic() + DEADLINE_S
        while worker.looks < 2:
            assert time.monotonic() < deadline, "it was not watched again"
            await asyncio.sleep(0.01)
        worker.stop()
        assert await running == 0


class Away(InMemoryLightningStore):
    """Takes no end before it is back."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.back = asyncio.Event(), asyncio.Event()

    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        self.asked.set()
        await self.back.wait()
        return await super().finish(finishes)


@pytest.mark.parametrize("asynchronous", [True, False])
async def test_an_agent_that_could_not_be_interrupted_counts_as_acting_until_the_store_knows(
    asynchronous: bool,
) -> None:
    let_go = threading.Event()

    def plain(task: JSON, llm: LLM) -> float:
        let_go.wait(DEADLINE_S)
        return 1.0

    async def stubborn(task: JSON, llm: LLM) -> float:
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        return 1.0

    retry = RetryPolicy(timeout_s=0.05)
    async with Away() as store:
        options = {"abandon_s": 0.05, "drain_timeout_s": DEADLINE_S, "retry": retry}
        async with working(store, stubborn if asynchronous else plain, **options) as (worker, queued, running):
            await asyncio.wait_for(store.asked.wait(), DEADLINE_S)
            assert [attempt.lease.rollout_id for attempt in worker.acting] == [queued.id]
            store.back.set()
            assert await running == EXIT_REPLACE
            assert worker.acting == ()
            let_go.set()


async def test_a_worker_without_grace_for_its_agents_still_reports_what_it_lost() -> None:
    begun = asyncio.Event()

    async def solve(task: JSON, llm: LLM) -> float:
        begun.set()
        await asyncio.Event().wait()
        return 1.0

    async with Slow() as store:
        async with working(store, solve, drain_timeout_s=0.0) as (worker, queued, running):
            await begun.wait()
            worker.stop()
            assert await running == 0
        [attempt] = await store.attempts([queued.id])
    assert (attempt.state, attempt.error) == ("lost", "the worker was stopped")
