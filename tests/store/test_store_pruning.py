"""Pruning: what is old goes, and nothing that a run could still ask for."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest
from store_samples import Clock, a_call, a_reward, a_run, a_worker, claimed, ending, one, some, sql_store

from agentlightning.records import Checkpoint, Consumed, Run, RunSize, RunState
from agentlightning.store.base import LightningStore
from agentlightning.store.retention import DAY_NS, Keep, choose, drop_old_records, find_doomed, keep_pruned, prune


def a_stored_run(number: int, days_old: float, state: RunState = "finished") -> Run:
    changed_ns = 100 * DAY_NS - int(days_old * DAY_NS)
    return Run(id=f"r{number}", name="", state=state, config={}, created_ns=0, updated_ns=changed_ns)


def sizes(**by_run: int) -> dict[str, RunSize]:
    return {name: RunSize(run_id=name, rollouts=1, calls=1, spans=0, bytes=size) for name, size in by_run.items()}


def chosen(runs: list[Run], keep: Keep, **by_run: int) -> list[str]:
    return [one.run.id for one in choose(runs, sizes(**by_run), keep, 100 * DAY_NS)]


RUNS = [
    a_stored_run(1, 50),
    a_stored_run(2, 40, "running"),
    a_stored_run(3, 30, "interrupted"),
    a_stored_run(4, 20, "failed"),
    a_stored_run(5, 1),
]


def test_runs_that_did_not_change_for_long_go_unless_they_are_running() -> None:
    assert chosen(RUNS, Keep(days=25)) == ["r1", "r3"]
    assert chosen(RUNS, Keep(days=60)) == []
    assert chosen(RUNS, Keep()) == []


def test_the_longest_unchanged_go_until_the_others_fit() -> None:
    held = {"r1": 10, "r2": 10, "r3": 10, "r4": 10, "r5": 10}
    assert chosen(RUNS, Keep(bytes=50), **held) == []
    assert chosen(RUNS, Keep(bytes=49), **held) == ["r1"]
    assert chosen(RUNS, Keep(bytes=25), **held) == ["r1", "r3", "r4"]
    assert chosen(RUNS, Keep(bytes=0), **held) == ["r1", "r3", "r4", "r5"]


def test_what_goes_by_age_counts_for_the_size() -> None:
    assert chosen(RUNS, Keep(days=45, bytes=40), r1=10, r2=10, r3=10, r4=10, r5=10) == ["r1"]


async def test_old_runs_are_deleted_and_others_stay(store: LightningStore, clock: Clock) -> None:
    old, running = await a_run(store), await a_run(store)
    await store.update_run(old, "finished")
    clock.advance(31 * 86_400)
    new = await a_run(store)
    await store.update_run(new, "finished")
    doomed = await find_doomed(store, Keep(days=30), clock())
    assert [(one.run.id, one.reason) for one in doomed] == [(old, "unchanged for 31 days")]
    assert ([one.run.id for one in (await prune(store, Keep(days=30), clock()))[0]]) == [old]
    assert {run.id for run in await store.runs()} == {running, new}


async def a_trained_run(store: LightningStore, covered: int) -> list[str]:
    """Ids of three rollouts with a call each, consumed by a step each, of which `covered` are in a checkpoint."""
    run_id = await a_run(store)
    await store.enqueue(some(run_id, 3))
    claims = await store.claim(a_worker(run_id), limit=3)
    await store.append_calls([a_call(claim) for claim in claims])
    await store.finish([ending(claim) for claim in claims])
    for number, claim in enumerate(claims, 1):
        await store.open_step(run_id, number, [Consumed(rollout_id=claim.rollout.id, outcome="trained")])
        await store.close_step(run_id, number, number)
    await store.put_checkpoint(Checkpoint(run_id=run_id, step=covered, path="/there", version=covered))
    return [claim.rollout.id for claim in claims]


async def test_records_go_that_no_crash_can_ask_for_again(store: LightningStore, clock: Clock) -> None:
    ids = await a_trained_run(store, covered=2)
    keep = Keep(record_days=7)
    assert await drop_old_records(store, keep, clock()) == 0
    clock.advance(8 * 86_400)
    assert await drop_old_records(store, keep, clock(), dry=True) == 2
    assert len(await store.calls(ids)) == 3
    assert await prune(store, keep, clock()) == ([], 2)
    assert [call.rollout_id for call in await store.calls(ids)] == ids[2:]
    assert await prune(store, keep, clock()) == ([], 0)


async def test_records_of_forks_that_a_step_s_credit_is_made_of_go_with_the_step_s(
    store: LightningStore, clock: Clock
) -> None:
    run_id = (await one(store, (await a_trained_run(store, covered=1))[0])).run_id
    kinds = ("credit", "task", "fork")
    new = [each for kind in kinds for each in some(run_id, 1, group_id=kind, kind=kind, mode="eval", step=1)]
    await store.enqueue([*new, *some(run_id, 1, group_id="later", kind="credit", mode="eval", step=2)])
    claims = await store.claim(a_worker(run_id), limit=4)
    await store.append_calls([a_call(claim) for claim in claims])
    await store.finish([ending(claim) for claim in claims])
    clock.advance(8 * 86_400)
    assert await drop_old_records(store, Keep(record_days=7), clock()) == 2
    left = await store.calls([claim.rollout.id for claim in claims])
    assert {call.rollout_id for call in left} == {claim.rollout.id for claim in claims[1:]}


async def test_a_run_that_the_store_refuses_to_delete_keeps_no_other(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "agl.db"
    async with sql_store(f"sqlite:///{path}", clock) as store:
        ids, other = await a_trained_run(store, covered=3), await a_run(store)
        refused = (await one(store, ids[0])).run_id
        [holder] = await claimed(store)
        await store.record_rewards([a_reward(holder, 1.0)])
        for run_id in (refused, other):
            await store.update_run(run_id, "finished")
        with contextlib.closing(sqlite3.connect(path)) as connection:  # as no method writes it
            query = "UPDATE rewards SET call_id = (SELECT id FROM calls WHERE rollout_id = ?)"
            connection.execute(query, (ids[0],))
            connection.commit()
        clock.advance(31 * 86_400)
        gone, dropped = await prune(store, Keep(days=30, record_days=7), clock())
        assert ([each.run.id for each in gone], dropped) == ([other], 2)
        assert {run.id for run in await store.runs()} == {refused, holder.rollout.run_id}
    assert f"run {refused} was not deleted" in caplog.text
    assert f"records of step 1 of run {refused} were not deleted" in caplog.text


async def test_a_server_prunes_when_it_starts(store: LightningStore) -> None:
    run_id = await a_run(store)
    await store.update_run(run_id, "finished")
    pruning = asyncio.create_task(keep_pruned(store, Keep(bytes=-1)))
    while await store.runs():  # each a round trip
        pass
    pruning.cancel()
    await asyncio.gather(pruning, return_exceptions=True)
