"""The doctor finds nothing in what the verbs wrote, whatever happened, and everything that they could not have written."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import (
    Clock,
    a_call,
    a_reward,
    a_run,
    a_span,
    a_worker,
    claimed,
    ending,
    new_id,
    some,
    sql_store,
)

from agentlightning.records import (
    Checkpoint,
    Claim,
    Consumed,
    Metric,
    Resource,
    RetryPolicy,
    Rollout,
    Step,
    VersionSpan,
)
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.doctor import DoctorProgress, Finding, examine
from agentlightning.store.invariants import (
    RolloutRecord,
    check_record,
    check_step_list,
    check_step_order,
    check_versions,
)


async def found(store: LightningStore, clock: Clock) -> list[Finding]:
    return [finding async for finding in examine(store, now_ns=clock)]


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


async def test_a_run_that_learns_from_the_record_has_checkpoints_without_steps(
    store: LightningStore, clock: Clock
) -> None:
    for run_id, config in (("offline", {"data": {"from_run": ["online"]}}), ("online", {"data": {"from_run": []}})):
        await store.create_run("a run", config, run_id)
        await store.put_checkpoint(Checkpoint(run_id=run_id, step=1, path="/there", version=0))
    assert [finding.run_id for finding in await found(store, clock)] == ["online"]


async def test_nothing_is_wrong_with_an_empty_store(store: LightningStore, clock: Clock) -> None:
    assert await found(store, clock) == []


async def test_nothing_is_wrong_with_what_the_verbs_wrote(store: LightningStore, clock: Clock) -> None:
    run_ids = [await a_run(store), await a_run(store)]
    for run_id in run_ids:
        await eventful(store, clock, run_id)
    seen = DoctorProgress()

    def on_progress(checked: DoctorProgress) -> None:
        nonlocal seen
        seen = checked

    assert [finding async for finding in examine(store, None, on_progress, clock)] == []
    assert (seen.runs, seen.rollouts, seen.steps) == (2, 20, 8)
    assert seen.calls > 20


async def test_the_doctor_does_not_mind_that_others_work(store: LightningStore, clock: Clock) -> None:
    run_id = await a_run(store)
    await store.enqueue(some(run_id, 150))

    async def work(name: str) -> None:
        while claims := await store.claim(a_worker(run_id, name), limit=7):
            await store.append_calls([a_call(claim) for claim in claims])
            await store.finish([ending(claim, rewards=(a_reward(claim, 1.0),)) for claim in claims])

    async def learn() -> None:
        step = after = 0
        while after < 150:
            news = await store.wait(run_id, after, min(10, 150 - after))
            after += len(news)
            step += 1
            await store.open_step(run_id, step, [Consumed(rollout_id=one.id, outcome="trained") for one in news])
            await store.close_step(run_id, step, step)

    working = asyncio.gather(learn(), *(work(name) for name in "abc"))
    while not working.done():
        assert await found(store, clock) == []
    await working
    assert await found(store, clock) == []


async def test_leases_that_nobody_gave_up_are_noted(store: LightningStore, clock: Clock) -> None:
    await claimed(store, 2)
    assert await found(store, clock) == []
    clock.advance(600)
    [finding] = await found(store, clock)
    assert finding.kind == "note"
    assert finding.sentence.startswith("2 leases ran out")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("UPDATE attempts SET state = 'running', finished_ns = NULL WHERE attempt = 1", "but attempt 1 is running"),
        ("DELETE FROM attempts WHERE attempt = 1", "attempts should be 1 to"),
        (
            "UPDATE rollouts SET finished_seq = 99 WHERE finished_seq = 2",
            "finished in place 3, and the one before in 1",
        ),
        ("UPDATE runs SET id = 'r2'; UPDATE rollouts SET run_id = 'r2'", "names run"),
        ("DELETE FROM calls WHERE parent_id IS NULL", "which its attempt does not have"),
        ("UPDATE calls SET logprobs = x'00000000'", "1 logprobs for 2 sampled ids"),
        ("UPDATE calls SET prompt_tokens = 77", "77 prompt tokens, but 3 are recorded"),
        ('UPDATE calls SET versions = \'[{"version":9,"start":0,"end":2}]\'', "version 9 of 'default'"),
        ('UPDATE calls SET versions = \'[{"version":1,"start":0,"end":1}]\'', "not once which version"),
        ("UPDATE consumption SET rollout_id = 'gone' WHERE step_id = 1", "which does not exist"),
        (
            "UPDATE consumption SET rollout_id = (SELECT id FROM rollouts WHERE mode = 'eval') WHERE step_id = 1",
            "is for evaluation",
        ),
        ("DELETE FROM consumption WHERE step_id = 2; UPDATE steps SET step = 9 WHERE id = 2", "none between them"),
        ("UPDATE steps SET version = 2 WHERE version IS NOT NULL", "published version 2, and step 1 before it 2"),
        ("UPDATE rewards SET call_id = 'gone'", "names call gone"),
        ("UPDATE rollouts SET reward = 17 WHERE reward IS NOT NULL", "reward 17 is none of those recorded"),
        ("UPDATE checkpoints SET step = 50", "a checkpoint of step 50"),
    ],
)
async def test_damage_is_found(tmp_path: Path, clock: Clock, damage: str, said: str) -> None:
    store = sql_store(f"sqlite:///{tmp_path}/agl.db", clock)
    async with store:
        await eventful(store, clock, await a_run(store))
    with sqlite3.connect(tmp_path / "agl.db") as connection:
        connection.executescript("PRAGMA ignore_check_constraints = ON; DROP INDEX attempts_one_running;" + damage)
    connection.close()
    async with store:
        sentences = [finding.sentence for finding in await found(store, clock)]
    assert any(said in sentence for sentence in sentences), sentences


async def a_record(clock: Clock, **fields: object) -> RolloutRecord:
    async with sql_store("memory://", clock) as store:
        [claim] = await claimed(store)
        await store.append_calls([a_call(claim)])
        await store.finish([ending(claim, rewards=(a_reward(claim, 1.0),))])
        ids = [claim.rollout.id]
        [rollout] = await store.rollouts(RolloutQuery(ids=ids))
        record = RolloutRecord(
            rollout, await store.attempts(ids), await store.calls(ids), await store.spans(ids), await store.rewards(ids)
        )
    assert list(check_record(record, {})) == []
    return record


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rollout: replace(rollout, state="queued", finished_seq=None), "it is queued, but its last attempt"),
        (lambda rollout: replace(rollout, state="running", finished_seq=None), "it is running, but its last attempt"),
        (lambda rollout: replace(rollout, finished_seq=None), "its place in the order of finishing is None"),
        (lambda rollout: replace(rollout, state="running", outcome="trained"), "it is running, and was consumed"),
        (lambda rollout: replace(rollout, mode="eval", outcome="trained"), "it is for evaluation, and was consumed"),
        (lambda rollout: replace(rollout, lost=1), "it counts 1 lost attempts, but there are 0"),
        (lambda rollout: replace(rollout, calls=5), "5 calls were recorded when it finished, but there are 1"),
        (lambda rollout: replace(rollout, attempt=2), "its attempts should be 1 to 2, and are [1]"),
    ],
)
async def test_a_rollout_that_contradicts_its_record_is_found(
    clock: Clock, change: Callable[[Rollout], Rollout], said: str
) -> None:
    record = await a_record(clock)
    assert any(said in sentence for sentence in check_record(replace(record, rollout=change(record.rollout)), {}))


async def test_attempts_and_calls_that_cannot_be_are_found(clock: Clock) -> None:
    record = await a_record(clock)
    [attempt], [call], [reward] = record.attempts, record.calls, record.rewards

    def said(**fields: object) -> str:
        return "\n".join(check_record(replace(record, **fields), {}))  # type: ignore[arg-type]

    running = replace(attempt, state="running")
    assert "attempts [1, 2] are running at a time" in "\n".join(
        check_record(
            replace(
                record,
                rollout=replace(record.rollout, attempt=2),
                attempts=[running, replace(running, attempt=2)],
            ),
            {},
        )
    )
    assert "a call is recorded twice" in said(calls=[call, call])
    assert "no finite numbers" in said(calls=[replace(call, logprobs=[float("nan"), 0.0])])
    assert "attempt 7, which does not exist" in said(calls=[replace(call, attempt=7)])
    assert "is nan" in said(rewards=[reward, replace(reward, value=float("nan"))])
    two = [VersionSpan(version=1, start=0, end=1), VersionSpan(version=2, start=1, end=2)]
    assert said(calls=[replace(call, versions=two)]) == ""
    assert list(check_record(replace(record, calls=[replace(call, versions=two)]), {"default": 2})) == []


def test_steps_that_cannot_be_are_found() -> None:
    def step(number: int, state: str, version: int | None) -> Step:
        return Step(run_id="r", step=number, state=state, consumed=[], version=version)  # type: ignore[arg-type]

    assert list(check_step_order(step(1, "closed", 2), step(2, "closed", 3), 3)) == []
    assert list(check_step_order(step(1, "open", None), step(2, "open", None), 3)) == []
    assert "there twice" in "".join(check_step_order(step(1, "closed", 2), step(1, "closed", 3), 3))
    assert "before it is open" in "".join(check_step_order(step(1, "open", None), step(2, "closed", 3), 3))
    assert "the last that exists is 3" in "".join(check_step_order(None, step(1, "closed", 4), 3))
    assert "has no version" in "".join(check_step_order(None, step(1, "closed", None), 3))


def test_lists_and_versions_that_cannot_be_are_found(clock: Clock) -> None:
    consumed = Consumed(rollout_id=new_id(), outcome="trained")
    listed = Step(run_id="r", step=1, state="open", consumed=[consumed, consumed])
    said = list(check_step_list(listed, {}))
    assert "which does not exist" in said[0]
    assert said[1].endswith("twice")
    versions = [Resource(run_id="r", name="default", kind="policy", value={}, version=one) for one in (1, 2, 2, 1)]
    assert list(check_versions(versions)) == [
        "version 2 of resource 'default' was used twice",
        "version 1 of resource 'default' comes after version 2",
    ]


async def test_a_portion_is_as_large_as_its_calls_allow(store: LightningStore) -> None:
    from agentlightning.store.scan import MAX_CALLS, read_calls, read_rollouts

    claims: list[Claim] = await claimed(store, 5)
    for claim in claims:
        await store.append_calls([a_call(claim) for _ in range(MAX_CALLS // 2 + 1)])
    await store.finish([ending(claim) for claim in claims])
    portions = [portion async for portion in read_rollouts(store, RolloutQuery(run_id=claims[0].rollout.run_id))]
    assert [len(portion) for portion in portions] == [1] * 5
    assert len(await read_calls(store, portions[0])) == MAX_CALLS // 2 + 1
