"""The end of data: records that are dropped, runs that are deleted."""

from __future__ import annotations

import asyncio

import pytest
from store_samples import a_call, a_credit, a_reward, a_run, a_span, a_worker, claimed, ending, finished, new_id, some

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.records import Checkpoint, Claim, Consumed, Metric, Resource
from agentlightning.store.base import LightningStore, RolloutQuery


async def full_run(store: LightningStore, count: int = 3) -> list[Claim]:
    """Claims of a run that has something of everything; its rollouts succeeded, and step 1 consumed the first."""
    claims = await claimed(store, count)
    run_id = claims[0].rollout.run_id
    for claim in claims:
        parent = a_call(claim)
        child = a_call(claim, parent_id=parent.id)
        await store.append_calls([parent, child])
        await store.append_spans([a_span(claim)])
        await store.record_rewards([a_reward(claim, 0.25, "emitted", call_id=child.id)])
    await store.finish([ending(claim, rewards=(a_reward(claim, 1.0),)) for claim in claims])
    await store.open_step(run_id, 1, [Consumed(rollout_id=claims[0].rollout.id, outcome="trained")])
    await store.record_credit([a_credit(claim, new_id()) for claim in claims])
    await store.close_step(run_id, 1, 1)
    await store.put_resources([Resource(run_id=run_id, name="default", kind="policy", value={})] * 2)
    await store.log_metrics([Metric(run_id=run_id, step=1, name="reward", value=1.0)])
    await store.put_checkpoint(Checkpoint(run_id=run_id, step=1, path="/checkpoint", version=1))
    return claims


async def everything(store: LightningStore, claims: list[Claim]) -> dict[str, object]:
    run_id = claims[0].rollout.run_id
    ids = [claim.rollout.id for claim in claims]
    return {
        "runs": await store.runs([run_id]),
        "rollouts": await store.rollouts(RolloutQuery(run_id=run_id)),
        "named": await store.rollouts(RolloutQuery(ids=ids)),
        "attempts": await store.attempts(ids),
        "calls": await store.calls(ids),
        "spans": await store.spans(ids),
        "rewards": await store.rewards(ids),
        "credit": await store.credit(ids),
        "resources": await store.resources(run_id, latest=False),
        "metrics": await store.metrics(run_id),
        "steps": await store.steps(run_id),
        "checkpoints": await store.checkpoints(run_id),
        "workers": await store.workers(run_id),
    }


async def test_dropped_records_leave_state_rewards_and_outcome(store: LightningStore) -> None:
    claims = await full_run(store)
    before = await everything(store, claims)
    ids = [claim.rollout.id for claim in claims]
    assert await store.drop_records(ids[:2]) == 4
    after = await everything(store, claims)
    for name in ("runs", "rollouts", "attempts", "resources", "metrics", "steps", "checkpoints", "workers"):
        assert after[name] == before[name]
    assert {call.rollout_id for call in await store.calls(ids)} == {ids[2]}
    assert {span.rollout_id for span in await store.spans(ids)} == {ids[2]}
    assert {credit.rollout_id for credit in await store.credit(ids)} == {ids[2]}
    rewards = await store.rewards(ids)
    assert [reward.value for reward in rewards] == [0.25, 1.0] * 3
    assert [reward.call_id is not None for reward in rewards] == [False, False, False, False, True, False]


async def test_records_of_every_attempt_are_dropped_and_dropping_again_drops_nothing(store: LightningStore) -> None:
    [claim] = await claimed(store)
    await store.append_calls([a_call(claim)])
    await store.finish([ending(claim, "lost")])
    [again] = await store.claim(a_worker(claim.rollout.run_id))
    await store.append_calls([a_call(again), a_call(again)])
    await store.finish([ending(again)])
    assert await store.drop_records([claim.rollout.id, claim.rollout.id]) == 3
    assert await store.drop_records([claim.rollout.id]) == 0
    assert await store.calls([claim.rollout.id], attempt=1) == []
    assert await store.drop_records([new_id()]) == 0
    assert await store.drop_records([]) == 0


async def test_records_of_live_rollouts_are_kept_and_so_are_those_named_with_them(store: LightningStore) -> None:
    claims = await finished(store, 1)
    run_id = claims[0].rollout.run_id
    await store.append_calls([a_call(claims[0])])
    await store.enqueue(some(run_id, 2, group_id="live"))
    [running] = await store.claim(a_worker(run_id))
    [queued] = await store.rollouts(RolloutQuery(run_id=run_id, states=["queued"]))
    for live, state in ((running.rollout.id, "running"), (queued.id, "queued")):
        with pytest.raises(ConflictError, match=f"{live} is {state}"):
            await store.drop_records([claims[0].rollout.id, live])
    assert len(await store.calls([claims[0].rollout.id])) == 1


async def test_a_deleted_run_leaves_nothing_and_others_are_not_touched(store: LightningStore) -> None:
    gone, kept = await full_run(store), await full_run(store)
    before = await everything(store, kept)
    run_id = gone[0].rollout.run_id
    assert await store.delete_runs([run_id, "nowhere"]) == 1
    assert not any((await everything(store, gone)).values())
    assert await everything(store, kept) == before
    assert await store.count(run_id) == {}
    assert await store.delete_runs([run_id]) == 0
    assert await store.delete_runs([]) == 0


async def test_a_large_run_is_deleted_too(store: LightningStore) -> None:
    run_id = await a_run(store)
    await store.enqueue(some(run_id, 1234))
    claims = await store.claim(a_worker(run_id), limit=500)
    await store.append_calls([a_call(claim) for claim in claims])
    await store.finish([ending(claim) for claim in claims[:400]])
    assert await store.delete_runs([run_id]) == 1
    assert await store.rollouts(RolloutQuery(run_id=run_id)) == []
    assert await store.attempts([claim.rollout.id for claim in claims]) == []
    assert await store.runs() == []


async def test_a_run_of_a_deleted_ones_name_begins_anew(store: LightningStore) -> None:
    for _ in range(2):
        run = await store.create_run("again", {}, run_id="again")
        [resource] = await store.put_resources([Resource(run_id="again", name="default", kind="policy", value={})])
        assert resource.version == 1
        [rollout] = await store.enqueue(some(run.id, 1))
        [claim] = await store.claim(a_worker(run.id))
        assert claim.rollout.id == rollout.id
        await store.finish([ending(claim)])
        [done] = await store.wait(run.id, timeout_s=0)
        assert done.finished_seq == 1
        assert [resource.version for resource in await store.wait_resources(run.id, {}, timeout_s=0)] == [1]
        await store.delete_runs(["again"])


async def test_whoever_writes_to_a_deleted_run_hears_that_it_is_gone(store: LightningStore) -> None:
    claims = await full_run(store)
    claim, run_id = claims[0], claims[0].rollout.run_id
    await store.delete_runs([run_id])
    for refused in (
        store.append_calls([a_call(claim)]),
        store.append_spans([a_span(claim)]),
        store.record_rewards([a_reward(claim, 1.0)]),
        store.enqueue(some(run_id, 1)),
        store.claim(a_worker(run_id)),
        store.log_metrics([Metric(run_id=run_id, step=1, name="reward", value=1.0)]),
        store.put_resources([Resource(run_id=run_id, name="default", kind="policy", value={})]),
        store.open_step(run_id, 2, []),
    ):
        with pytest.raises(NotFoundError):
            await refused
    assert await store.finish([ending(claim)]) == [False]
    assert await store.cancel([claim.rollout.id]) == 0


async def test_whoever_waits_for_a_run_hears_that_it_is_deleted(store: LightningStore) -> None:
    run_id = await a_run(store)
    waiting = [
        asyncio.create_task(store.claim(a_worker(run_id), wait_s=60)),
        asyncio.create_task(store.wait(run_id, timeout_s=60)),
        asyncio.create_task(store.wait_resources(run_id, {}, timeout_s=60)),
        asyncio.create_task(store.follow_metrics(run_id, timeout_s=60)),
    ]
    while not await store.workers(run_id):
        pass
    await store.delete_runs([run_id])
    for task in waiting:
        with pytest.raises(NotFoundError):
            await task


async def test_a_run_is_deleted_while_others_write_to_it(store: LightningStore) -> None:
    run_id = await a_run(store)
    await store.enqueue(some(run_id, 400))

    async def work(name: str) -> None:
        while True:
            claims = await store.claim(a_worker(run_id, name), limit=5)
            for claim in claims:
                await store.append_calls([a_call(claim)])
                await store.log_metrics([Metric(run_id=run_id, step=1, name=name, value=1.0)])
            await store.finish([ending(claim) for claim in claims])

    workers = [asyncio.create_task(work(f"w{number}")) for number in range(4)]
    while len(await store.workers(run_id)) < 4:
        pass
    assert await store.delete_runs([run_id]) == 1
    for result in await asyncio.gather(*workers, return_exceptions=True):
        assert isinstance(result, NotFoundError)
    assert await store.rollouts(RolloutQuery(run_id=run_id)) == []
    assert await store.metrics(run_id) == []
    assert await store.workers(run_id) == []
