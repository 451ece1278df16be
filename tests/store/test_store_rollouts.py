"""Conformance: the life of rollouts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from store_samples import Clock, a_call, a_reward, a_run, a_worker, claimed, ending, finished, one, some

from agentlightning.errors import InputError, NotFoundError
from agentlightning.records import Fork, Lease, Resource, RetryPolicy, Rollout, Sampling
from agentlightning.store.base import LightningStore, RolloutQuery

DEADLINE_S = 20.0
"""For waits that are expected to end much sooner, by a push."""


# --- forks ------------------------------------------------------------------------------------------------------------


async def test_a_fork_and_the_calls_that_it_repeats_are_kept(store: LightningStore) -> None:
    run_id = await a_run(store)
    fork = Fork(rollout_id="another", attempt=2, calls=3, root_id="the first")
    plain, forked = await store.enqueue([*some(run_id, 1), *some(run_id, 1, group_id="forks", fork=fork)])
    assert (plain.fork, forked.fork) == (None, fork)
    [_, claim] = await store.claim(a_worker(run_id), limit=2)
    assert claim.rollout.fork == fork
    calls = [a_call(claim, replayed_id="a call of it"), a_call(claim)]
    await store.append_calls(calls)
    assert [call.replayed_id for call in await store.calls([forked.id])] == ["a call of it", None]
    assert (await one(store, forked.id)).fork == fork


# --- prompts ----------------------------------------------------------------------------------------------------------


def a_template(run_id: str, name: str = "system") -> Resource:
    return Resource(run_id=run_id, name=name, kind="prompt_template", value={"format": "fstring", "template": "hi"})


async def test_the_first_claim_pins_the_newest_templates_and_retries_keep_them(store: LightningStore) -> None:
    run_id = await a_run(store)
    policy = Resource(run_id=run_id, name="default", kind="policy", value={})
    await store.put_resources([policy, a_template(run_id), a_template(run_id), a_template(run_id, "täglich")])
    [queued] = await store.enqueue(some(run_id, 1, retry=RetryPolicy(max_attempts=2)))
    assert queued.prompts == {}
    await store.put_resources([a_template(run_id)])
    [first] = await store.claim(a_worker(run_id))
    assert first.rollout.prompts == {"system": 3, "täglich": 1}
    await store.finish([ending(first, "failed")])
    await store.put_resources([a_template(run_id), a_template(run_id, "late")])
    [second] = await store.claim(a_worker(run_id))
    assert (second.lease.attempt, second.rollout.prompts) == (2, first.rollout.prompts)
    assert (await one(store, queued.id)).prompts == first.rollout.prompts


async def test_a_rollout_keeps_the_versions_that_it_was_enqueued_with(store: LightningStore) -> None:
    run_id = await a_run(store)
    await store.put_resources([a_template(run_id), a_template(run_id), a_template(run_id, "tools")])
    [queued] = await store.enqueue(some(run_id, 1, prompts={"system": 1}))
    assert queued.prompts == {"system": 1}
    assert (await one(store, queued.id)).prompts == {"system": 1}
    [claim] = await store.claim(a_worker(run_id))
    assert claim.rollout.prompts == {"system": 1, "tools": 1}


async def test_rollouts_of_a_run_without_templates_have_none_after_one_is_added(store: LightningStore) -> None:
    run_id = await a_run(store)
    await store.enqueue(some(run_id, 1, retry=RetryPolicy(max_attempts=2)))
    [first] = await store.claim(a_worker(run_id))
    await store.put_resources([a_template(run_id)])
    await store.finish([ending(first, "failed")])
    [second] = await store.claim(a_worker(run_id))
    assert (first.rollout.prompts, second.rollout.prompts) == ({}, {})


async def test_a_version_that_does_not_exist_is_refused_when_it_is_enqueued(store: LightningStore) -> None:
    run_id = await a_run(store)
    await store.put_resources([a_template(run_id), Resource(run_id=run_id, name="default", kind="policy", value={})])
    for name, version in (("system", 2), ("default", 1), ("other", 1)):
        with pytest.raises(NotFoundError, match=f"prompts: run {run_id} has no prompt template '{name}' of version"):
            await store.enqueue([*some(run_id, 1), *some(run_id, 1, group_id="bad", prompts={name: version})])
    assert await store.rollouts(RolloutQuery(run_id=run_id)) == []


# --- enqueue and list -------------------------------------------------------------------------------------------------


async def test_enqueued_rollouts_come_back_queued_in_the_order_given(store: LightningStore, clock: Clock) -> None:
    run_id = await a_run(store)
    new = some(run_id, 3, mode="eval", step=2, priority=1, sampling=Sampling(temperature=0, max_tokens=4))
    rollouts = await store.enqueue([new[2], new[0], new[1]])
    assert [rollout.replica for rollout in rollouts] == [2, 0, 1]
    first = rollouts[0]
    assert (first.state, first.attempt, first.lost, first.created_ns) == ("queued", 0, 0, clock.now_ns)
    assert (first.task, first.mode, first.step, first.priority) == ({"number": 2}, "eval", 2, 1)
    assert first.sampling == new[2].sampling
    assert first.retry == RetryPolicy()


async def test_enqueueing_again_returns_what_exists_unchanged(store: LightningStore) -> None:
    run_id = await a_run(store)
    first = await store.enqueue(some(run_id, 2))
    again = await store.enqueue(some(run_id, 3, priority=9))
    assert again[:2] == first
    assert again[2].priority == 9
    assert len(await store.rollouts(RolloutQuery(run_id=run_id))) == 3


async def test_concurrent_enqueues_of_the_same_rollouts_make_them_once(store: LightningStore) -> None:
    run_id = await a_run(store)
    results = await asyncio.gather(*[store.enqueue(some(run_id, 4)) for _ in range(8)])
    assert all(result == results[0] for result in results)
    assert await store.count(run_id) == {("train", "queued"): 4}


async def test_enqueueing_into_no_run_or_what_is_no_json_is_refused_and_writes_nothing(store: LightningStore) -> None:
    run_id = await a_run(store)
    [new] = some(run_id, 1)
    new.task["number"] = object()
    with pytest.raises(InputError, match="JSON"):
        await store.enqueue([new])
    with pytest.raises(NotFoundError, match="nowhere"):
        await store.enqueue([*some(run_id, 1), *some("nowhere", 1)])
    assert await store.count(run_id) == {}


async def test_rollouts_are_found_by_every_field_of_the_query(store: LightningStore) -> None:
    run_id = await a_run(store)
    a = await store.enqueue(some(run_id, 2, group_id="a"))
    b = await store.enqueue(some(run_id, 2, group_id="b", mode="eval", step=1))
    other = await store.enqueue(some(await a_run(store), 1))

    async def found(**fields: object) -> list[Rollout]:
        return await store.rollouts(RolloutQuery(**fields))  # type: ignore[arg-type]

    assert await found() == [*a, *b, *other]
    assert await found(run_id=run_id) == [*a, *b]
    assert await found(ids=[b[0].id, a[1].id, "unknown"]) == [a[1], b[0]]
    assert await found(ids=[]) == []
    assert await found(run_id=run_id, mode="eval") == b
    assert await found(run_id=run_id, group_ids=["a"]) == a
    assert await found(run_id=run_id, step=1) == b
    assert await found(run_id=run_id, states=["queued", "failed"]) == [*a, *b]
    assert await found(run_id=run_id, states=["running"]) == []
    assert await found(run_id=run_id, after=a[0].id, limit=2) == [a[1], b[0]]
    assert await found(run_id=run_id, newest_first=True, limit=2) == [b[1], b[0]]


# --- claim ------------------------------------------------------------------------------------------------------------


async def test_a_claim_starts_an_attempt_under_a_lease(store: LightningStore, clock: Clock) -> None:
    [claim] = await claimed(store)
    assert (claim.rollout.state, claim.rollout.attempt, claim.rollout.started_ns) == ("running", 1, clock.now_ns)
    assert (claim.lease.rollout_id, claim.lease.attempt) == (claim.rollout.id, 1)
    assert claim.key.startswith("sk-agl-")
    [attempt] = await store.attempts([claim.rollout.id])
    assert (attempt.state, attempt.worker_id, attempt.attempt) == ("running", "w0", 1)
    assert attempt.lease_expires_ns == clock.now_ns + 30 * 10**9


async def test_higher_priorities_are_claimed_first_then_first_come_first_served(store: LightningStore) -> None:
    run_id = await a_run(store)
    await store.enqueue(some(run_id, 2, group_id="low"))
    await store.enqueue(some(run_id, 2, group_id="high", priority=5))
    claims = await store.claim(a_worker(run_id), limit=3)
    assert [(claim.rollout.group_id, claim.rollout.replica) for claim in claims] == [
        ("high", 0),
        ("high", 1),
        ("low", 0),
    ]


async def test_a_worker_claims_only_from_its_run(store: LightningStore) -> None:
    run_id, other = await a_run(store), await a_run(store)
    await store.enqueue(some(run_id, 1))
    assert await store.claim(a_worker(other)) == []
    with pytest.raises(NotFoundError, match="nowhere"):
        await store.claim(a_worker("nowhere"))
    with pytest.raises(InputError, match="limit"):
        await store.claim(a_worker(run_id), limit=0)


async def test_no_rollout_is_claimed_twice_by_many_claimers(store: LightningStore) -> None:
    run_id = await a_run(store)
    await store.enqueue(some(run_id, 60))

    async def claim_all(number: int) -> list[str]:
        mine: list[str] = []
        while claims := await store.claim(a_worker(run_id, f"w{number}"), limit=1 + number % 3):
            mine += [claim.rollout.id for claim in claims]
        return mine

    taken = [rollout_id for mine in await asyncio.gather(*map(claim_all, range(8))) for rollout_id in mine]
    assert len(taken) == len(set(taken)) == 60


async def test_a_waiting_claim_is_woken_by_an_enqueue(store: LightningStore) -> None:
    run_id = await a_run(store)
    assert await store.claim(a_worker(run_id), wait_s=0.01) == []
    async with asyncio.timeout(DEADLINE_S):
        waiting = asyncio.create_task(store.claim(a_worker(run_id), wait_s=60))
        await asyncio.sleep(0)
        await store.enqueue(some(run_id, 1))
        assert len(await waiting) == 1


async def test_a_waiting_claim_is_woken_by_a_retry(store: LightningStore) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_attempts=2))
    async with asyncio.timeout(DEADLINE_S):
        waiting = asyncio.create_task(store.claim(a_worker(claim.rollout.run_id), wait_s=60))
        await asyncio.sleep(0)
        await store.finish([ending(claim, "failed")])
        [again] = await waiting
    assert (again.rollout.id, again.lease.attempt) == (claim.rollout.id, 2)


async def test_claiming_and_beating_record_the_worker(store: LightningStore, clock: Clock) -> None:
    run_id = await a_run(store)
    await store.claim(a_worker(run_id, "a"))
    clock.advance(1)
    await store.claim(a_worker(run_id, "b"))
    assert [(worker.id, worker.host) for worker in await store.workers(run_id)] == [("b", "here"), ("a", "here")]
    clock.advance(1)
    await store.heartbeat(a_worker(run_id, "a"), [])
    assert [worker.seen_ns for worker in await store.workers(run_id)] == [clock.now_ns, clock.now_ns - 10**9]
    assert len(await store.workers()) == 2


# --- leases -----------------------------------------------------------------------------------------------------------


async def test_an_expired_lease_is_given_up_and_the_rollout_claimed_again(store: LightningStore, clock: Clock) -> None:
    [claim] = await claimed(store)
    worker = a_worker(claim.rollout.run_id, "w1")
    clock.advance(29)
    assert await store.claim(worker) == []
    clock.advance(2)
    assert await store.claim(worker) == []  # whether its worker had the chance to renew it, only servers know
    assert await store.expire_leases(within_s=60) == 1
    [again] = await store.claim(worker)
    assert (again.rollout.id, again.rollout.attempt, again.rollout.lost) == (claim.rollout.id, 2, 1)
    first, second = await store.attempts([claim.rollout.id])
    assert (first.state, second.state) == ("lost", "running")
    assert first.error is not None
    assert "w0" in first.error


async def test_leases_are_left_alone_by_a_search_that_comes_too_late(store: LightningStore, clock: Clock) -> None:
    [claim] = await claimed(store)
    clock.advance(31)
    assert await store.expire_leases(within_s=-1.0) == 0  # the store was away in between
    assert await store.heartbeat(a_worker(claim.rollout.run_id), [claim.lease]) == [True]


async def test_heartbeats_keep_a_lease(store: LightningStore, clock: Clock) -> None:
    [claim] = await claimed(store)
    worker = a_worker(claim.rollout.run_id)
    for _ in range(4):
        clock.advance(20)
        assert await store.heartbeat(worker, [claim.lease]) == [True]
        assert await store.expire_leases() == 0
    clock.advance(31)
    assert await store.expire_leases() == 1
    assert await store.heartbeat(worker, [claim.lease]) == [False]


async def test_heartbeats_answer_for_each_lease(store: LightningStore) -> None:
    claims = await claimed(store, 4)
    await store.finish([ending(claims[0])])
    await store.cancel([claims[1].rollout.id])
    forged = Lease(rollout_id=claims[2].rollout.id, attempt=1, token="nö")
    unknown = Lease(rollout_id="unknown", attempt=1, token="no")
    leases = [claims[0].lease, claims[1].lease, forged, unknown, claims[3].lease]
    assert await store.heartbeat(a_worker(claims[0].rollout.run_id), leases) == [False, False, False, False, True]


async def test_a_stale_lease_changes_nothing(store: LightningStore, clock: Clock) -> None:
    [claim] = await claimed(store)
    clock.advance(31)
    assert await store.expire_leases() == 1
    [again] = await store.claim(a_worker(claim.rollout.run_id, "w1"))
    before = await one(store, claim.rollout.id)
    late = ending(claim, rewards=(a_reward(claim, 1.0),))
    assert await store.finish([late]) == [False]
    assert await one(store, claim.rollout.id) == before
    assert await store.rewards([claim.rollout.id]) == []
    assert await store.finish([ending(again)]) == [True]


async def test_finishing_twice_finishes_once(store: LightningStore) -> None:
    [claim] = await claimed(store)
    assert await store.finish([ending(claim), ending(claim, "failed")]) == [True, False]
    assert await store.finish([ending(claim, "failed")]) == [False]
    assert (await one(store, claim.rollout.id)).state == "succeeded"


async def test_a_lease_that_ran_out_but_was_not_given_up_still_finishes(store: LightningStore, clock: Clock) -> None:
    [claim] = await claimed(store)
    clock.advance(100)
    assert await store.finish([ending(claim)]) == [True]


# --- wait -------------------------------------------------------------------------------------------------------------


async def test_wait_returns_what_finished_after_the_cursor_in_order(store: LightningStore) -> None:
    claims = await claimed(store, 3)
    run_id = claims[0].rollout.run_id
    for claim in reversed(claims):
        await store.finish([ending(claim)])
    everything = await store.wait(run_id, at_least=3)
    assert [rollout.id for rollout in everything] == [claim.rollout.id for claim in reversed(claims)]
    assert [rollout.finished_seq for rollout in everything] == [1, 2, 3]
    assert await store.wait(run_id, after=2) == everything[2:]


async def test_wait_returns_as_soon_as_there_are_enough(store: LightningStore) -> None:
    claims = await claimed(store, 3)
    async with asyncio.timeout(DEADLINE_S):
        waiting = asyncio.create_task(store.wait(claims[0].rollout.run_id, at_least=3, timeout_s=60))
        await asyncio.sleep(0)
        for claim in claims:
            assert not waiting.done()
            await store.finish([ending(claim)])
        assert len(await waiting) == 3


async def test_wait_returns_what_there_is_after_its_timeout(store: LightningStore) -> None:
    claims = await finished(store, 2)
    assert len(await store.wait(claims[0].rollout.run_id, at_least=3, timeout_s=0.01)) == 2
    with pytest.raises(NotFoundError, match="nowhere"):
        await store.wait("nowhere", timeout_s=0.01)


async def test_a_wait_is_woken_when_a_lost_rollout_fails_for_good(store: LightningStore, clock: Clock) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_lost=1))
    async with asyncio.timeout(DEADLINE_S):
        waiting = asyncio.create_task(store.wait(claim.rollout.run_id, timeout_s=60))
        await asyncio.sleep(0)
        clock.advance(31)
        assert await store.expire_leases() == 1
        [rollout] = await waiting
    assert (rollout.state, rollout.lost) == ("failed", 1)


async def test_a_worker_that_starts_again_gives_up_what_its_predecessor_held(store: LightningStore) -> None:
    (claim,) = await claimed(store)
    worker = a_worker(claim.rollout.run_id)
    (again,) = await store.claim(replace(worker, pid=worker.pid + 1))
    assert (again.rollout.id, again.lease.attempt, again.rollout.lost) == (claim.rollout.id, 2, 1)
    assert await store.finish([ending(claim)]) == [False]


async def test_workers_of_one_name_on_two_hosts_leave_each_other_alone(store: LightningStore) -> None:
    (claim,) = await claimed(store)
    worker = a_worker(claim.rollout.run_id)
    assert await store.claim(replace(worker, host="elsewhere", pid=worker.pid + 1)) == []
    assert await store.heartbeat(worker, [claim.lease]) == [True]


async def test_a_successor_that_beats_before_its_first_claim_still_gives_up(store: LightningStore) -> None:
    (claim,) = await claimed(store)
    successor = replace(a_worker(claim.rollout.run_id), pid=2)
    assert await store.heartbeat(successor, []) == []
    (again,) = await store.claim(successor)
    assert again.lease.attempt == 2
