import asyncio

import pytest

from agentlightning.errors import EngineError, RunTakenError
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.processes import record_run_status


async def test_work_that_raises_leaves_its_run_as_failed_and_its_error_as_it_was() -> None:
    async with InMemoryLightningStore() as store:
        await store.create_run("test", {}, "run")
        with pytest.raises(EngineError, match="the learner ended"):
            async with record_run_status(store, "run"):
                raise EngineError("the learner ended")
        [run] = await store.runs(ids=["run"])
    assert run.state == "failed"


async def test_a_trainer_whose_run_another_one_took_says_nothing_of_how_it_ends() -> None:
    async with InMemoryLightningStore() as store:
        await store.create_run("test", {}, "run")
        await store.update_run("run", state="finished")
        with pytest.raises(RunTakenError):
            async with record_run_status(store, "run"):
                raise RunTakenError("run: another host trains this run now")
        [run] = await store.runs(ids=["run"])
    assert run.state == "finished"


async def test_work_that_is_cancelled_leaves_its_run_as_interrupted() -> None:
    async with InMemoryLightningStore() as store:
        await store.create_run("test", {}, "run")
        started = asyncio.Event()

        async def work() -> None:
            async with record_run_status(store, "run"):
                started.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        [run] = await store.runs(ids=["run"])
    assert run.state == "interrupted"


async def test_a_store_that_is_gone_does_not_hide_why_the_work_ended() -> None:
    store = InMemoryLightningStore()  # never opened: every verb raises StoreError
    with pytest.raises(EngineError, match="the learner ended"):
        async with record_run_status(store, "run"):
            raise EngineError("the learner ended")
