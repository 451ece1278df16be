"""What a worker that stops tells a store that takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from agentlightning.runner.agent import LLM
from agentlightning.runner.execution import Execution
from agentlightning.runner.function import FunctionRunner
from agentlightning.runner.worker import Worker, WorkerOptions
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.types import JSON, Finish, NewRollout


class Slow(InMemoryLightningStore):
    """Takes ends only after other tasks have had many turns."""

    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        for _ in range(100):
            await asyncio.sleep(0)
        return await super().finish(finishes)


async def test_a_worker_without_grace_for_its_agents_still_reports_what_it_lost() -> None:
    begun = asyncio.Event()

    async def solve(task: JSON, llm: LLM) -> float:
        begun.set()
        await asyncio.Event().wait()
        return 1.0

    async with Slow() as store:
        run_id = (await store.create_run("stopped", {})).id
        [queued] = await store.enqueue([NewRollout(run_id=run_id, task={}, group_id="g")])
        with ThreadPoolExecutor(1) as threads:
            execution = Execution(
                store=store,
                server_url="http://127.0.0.1:9",
                model="policy",
                runner=FunctionRunner(solve, threads),
                reward=None,
                abandon_s=30.0,
            )
            worker = Worker(
                execution,
                WorkerOptions(run_id=run_id, worker_id="w", concurrency=1, grace_s=0.0),
                open_store=InMemoryLightningStore,
            )
            running = asyncio.create_task(worker.run())
            await begun.wait()
            worker.stop()
            assert await running == 0
        [attempt] = await store.attempts([queued.id])
    assert (attempt.state, attempt.error) == ("lost", "the worker was stopped")
