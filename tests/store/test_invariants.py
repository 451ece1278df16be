"""The invariants hold in whatever the methods wrote, and damage that they could not have written is found."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

from invariants import violations
from store_samples import (
    Clock,
    a_call,
    a_reward,
    a_run,
    a_span,
    a_worker,
    ending,
    some,
    sql_store,
)

from agentlightning.records import (
    Checkpoint,
    Consumed,
    Metric,
    Resource,
    RetryPolicy,
)
from agentlightning.store.base import LightningStore, RolloutQuery


async def eventful(store: LightningStore, clock: Clock, run_id: str) -> None:
    """Everything that may befall rollouts and steps."""
    await store.put_resources([Resource(run_id=run_id, name="default", kind="policy", value={})])
    retry = RetryPolicy(max_attempts=3)
    await store.enqueue(some(run_id, 8, retry=retry) + some(run_id, 2, group_id="held out", mode="eval"))
    claims = await store.claim(a_worker(run_id), limit=10)
    for claim in claims:
        root = a_call(claim)
        child = a_call(claim, parent_id=root.id, suffix_ids=[4], prompt_tokens=6)
        await store.append_calls([root, child])
        await store.append_spans([a_span(claim)])
        await store.record_rewards([a_reward(claim, 0.5, "emitted", call_id=child.id)])
    ends = ["succeeded", "failed", "lost", "timed_out", "succeeded", "succeeded", "succeeded", "succeeded"]
    await store.finish([ending(claim, end) for claim, end in zip(claims, ends, strict=False)])  # type: ignore[arg-type]
    clock.advance(31)  # the two for evaluation are lost
    again = await store.claim(a_worker(run_id), limit=3)
    await store.append_calls([a_call(again[0]), a_call(claims[1])])  # one comes late
    await store.finish([ending(again[0], rewards=(a_reward(again[0], 1.0),)), ending(again[1], "failed")])
    await store.cancel([again[2].rollout.id])
    done = await store.rollouts(RolloutQuery(run_id=run_id, mode="train", states=["succeeded"]))
    for number, rollout in enumerate(done[:4], 1):
        await store.open_step(run_id, number, [Consumed(rollout_id=rollout.id, outcome="trained")])
        [policy] = await store.put_resources([Resource(run_id=run_id, name="default", kind="policy", value={})])
        await store.close_step(run_id, number, policy.version)
        await store.log_metrics([Metric(run_id=run_id, step=number, name="reward", value=1.0)])
    await store.put_checkpoint(Checkpoint(run_id=run_id, step=1, path="/there", version=2))
    await store.reopen_steps(run_id, 1)
    [policy] = await store.put_resources([Resource(run_id=run_id, name="default", kind="policy", value={})])
    await store.close_step(run_id, 2, policy.version)
    await store.drop_records([done[0].id])


async def test_a_run_that_learns_from_the_record_has_checkpoints_without_steps(store: LightningStore) -> None:
    for run_id, config in (("offline", {"data": {"from_run": ["online"]}}), ("online", {"data": {"from_run": []}})):
        await store.create_run("a run", config, run_id)
        await store.put_checkpoint(Checkpoint(run_id=run_id, step=1, path="/there", version=0))
    assert await violations(store) == ["run online: there is a checkpoint of step 1, but no such step"]


async def test_nothing_is_wrong_with_what_the_methods_wrote(store: LightningStore, clock: Clock) -> None:
    for run_id in [await a_run(store), await a_run(store)]:
        await eventful(store, clock, run_id)
    assert await violations(store) == []


DAMAGE = (
    ("UPDATE attempts SET state = 'running', finished_ns = NULL WHERE attempt = 1", "but attempt 1 is running"),
    ("DELETE FROM attempts WHERE attempt = 1", "attempts should be 1 to"),
    ("UPDATE rollouts SET finished_seq = 99 WHERE finished_seq = 2", "finished in the places [1, 3"),
    ("UPDATE runs SET id = 'r2'; UPDATE rollouts SET run_id = 'r2'", "names run"),
    ("DELETE FROM calls WHERE parent_id IS NULL", "which its attempt does not have"),
    ("UPDATE calls SET logprobs = x'00000000'", "1 logprobs for 2 sampled ids"),
    ("UPDATE calls SET prompt_tokens = 77", "77 prompt tokens, but 3 are recorded"),
    ('UPDATE calls SET versions = \'[{"version":9,"start":0,"end":2}]\'', "version 9 of 'default'"),
    ('UPDATE calls SET versions = \'[{"version":1,"start":0,"end":1}]\'', "not once which version"),
    ("UPDATE consumption SET rollout_id = 'gone' WHERE step_id = 1", "which does not exist"),
    ("DELETE FROM consumption WHERE step_id = 2; UPDATE steps SET step = 9 WHERE id = 2", "none between them"),
    ("UPDATE steps SET version = 2 WHERE version IS NOT NULL", "published version 2, and step 1 before it 2"),
    ("UPDATE rewards SET call_id = 'gone'", "names call gone"),
    ("UPDATE rollouts SET reward = 17 WHERE reward IS NOT NULL", "reward 17 is none of those recorded"),
    ("UPDATE checkpoints SET step = 50", "a checkpoint of step 50"),
)


async def test_damage_is_found(tmp_path: Path, clock: Clock) -> None:
    whole = tmp_path / "whole.db"
    async with sql_store(f"sqlite:///{whole}", clock) as store:
        await eventful(store, clock, await a_run(store))
    for number, (damage, said) in enumerate(DAMAGE):
        file = shutil.copy(whole, tmp_path / f"{number}.db")
        with contextlib.closing(sqlite3.connect(file)) as connection:
            connection.executescript("PRAGMA ignore_check_constraints = ON; DROP INDEX attempts_one_running;" + damage)
        async with sql_store(f"sqlite:///{file}", clock) as store:
            sentences = await violations(store)
        assert any(said in sentence for sentence in sentences), (damage, sentences)
