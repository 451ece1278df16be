"""One trainer of a run at a time, over hosts that share its store and no folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentlightning.cli.runs import state_of
from agentlightning.errors import ConflictError, NotFoundError, StoreError
from agentlightning.records import Run, RunState
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.run_lease import RunLease

DEADLINE_S = 600.0
"""Matters only where a test fails: what is waited for comes within tenths of a second."""


def lease(
    host: Path, notes: list[str] | None = None, *, renew_s: float = 0.01, watch_s: float = DEADLINE_S
) -> RunLease:
    note = [].append if notes is None else notes.append
    return RunLease(RunFolder(host, "run"), note, renew_s=renew_s, watch_s=watch_s)


async def for_ever() -> None:
    await asyncio.Event().wait()


async def test_a_run_that_another_host_trains_is_refused(store: LightningStore, tmp_path: Path) -> None:
    one, notes = lease(tmp_path / "one"), []
    await one.take(store)
    with pytest.raises(ConflictError, match=rf"run: .*:{tmp_path}/one/run is training this run; end that first"):
        await lease(tmp_path / "two", notes).take(store)
    assert f"{tmp_path}/one/run; waiting {DEADLINE_S:g} s" in notes[0]
    await one.aclose()


async def test_a_trainer_that_was_killed_is_succeeded_on_another_host(store: LightningStore, tmp_path: Path) -> None:
    one, two = lease(tmp_path / "one"), lease(tmp_path / "two", watch_s=0.05)
    await one.take(store)
    await one.aclose()
    await two.take(store)
    assert await two.during(asyncio.sleep(0, "trained")) == "trained"


@pytest.mark.parametrize(
    ("host", "state"), [("two", "interrupted"), ("two", "failed"), ("two", "finished"), ("one", "running")]
)
async def test_a_run_that_ended_or_whose_lock_says_so_is_not_waited_for(
    store: LightningStore, tmp_path: Path, host: str, state: RunState
) -> None:
    one, notes = lease(tmp_path / "one"), []
    await one.take(store)
    await one.aclose()
    await store.update_run("run", state=state)
    two = lease(tmp_path / host, notes)
    await two.take(store)
    await two.aclose()
    assert notes == []


async def test_who_was_away_and_was_succeeded_ends_and_the_run_goes_on(store: LightningStore, tmp_path: Path) -> None:
    """A laptop that slept: the one before comes back, records its own end, and the run is still running."""
    one, two = lease(tmp_path / "one", renew_s=0.2), lease(tmp_path / "two", watch_s=0.01)
    await one.take(store)
    await two.take(store)
    with pytest.raises(ConflictError, match=rf"run: .*:{tmp_path}/two/run trains this run now; this process ends"):
        await asyncio.wait_for(one.during(for_ever()), DEADLINE_S)
    await store.update_run("run", state="failed")
    async with asyncio.timeout(DEADLINE_S):
        while (await store.runs())[0].state != "running":
            await store.runs()
    await two.aclose()


async def test_the_training_of_a_run_that_was_deleted_ends(store: LightningStore, tmp_path: Path) -> None:
    one = lease(tmp_path / "one")
    await one.take(store)
    await store.delete_runs(["run"])
    with pytest.raises(NotFoundError, match="no such run"):
        await asyncio.wait_for(one.during(for_ever()), DEADLINE_S)


async def test_a_store_that_is_away_for_a_while_does_not_end_the_training(tmp_path: Path) -> None:
    class Away(InMemoryLightningStore):
        failures = 0

        async def runs(self, ids: object = None, limit: int | None = None) -> list[Run]:
            if 0 < self.failures < 3:
                self.failures += 1
                raise StoreError("away")
            return await super().runs(ids, limit)

    async with Away() as store:
        await store.create_run("run", {}, "run")
        one = lease(tmp_path / "one")
        await one.take(store)
        store.failures = 1
        (before,) = await InMemoryLightningStore.runs(store)

        async def renewed() -> None:
            run = before
            while run.summary == before.summary:
                (run,) = await InMemoryLightningStore.runs(store)

        await asyncio.wait_for(one.during(renewed()), DEADLINE_S)
        assert store.failures == 3


async def test_a_run_that_went_on_elsewhere_is_not_listed_as_killed_here(store: LightningStore, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "one", "run")
    with folder.held():
        pass  # a lock that nobody holds any more
    for host, state in (("one", "killed"), ("two", "running")):
        holder = lease(tmp_path / host, watch_s=0.01)
        await holder.take(store)
        await holder.aclose()
        (run,) = await store.runs()
        assert state_of(run, tmp_path / "one").partition(";")[0] == state
