"""Conformance: the life of rollouts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from store_samples import Clock, a_call, a_reward, a_run, a_span, a_worker, claimed, ending, finished, some, states

from agentlightning.errors import InputError, NotFoundError
from agentlightning.store.base import BROKEN_SPANS, NO_CALLS, LightningStore, RolloutQuery, broken_warning
from agentlightning.types import Lease, RetryPolicy, Rollout, Sampling

DEADLINE_S = 20.0
"""For waits that are expected to end much sooner, by a push."""


async def one(store: LightningStore, rollout_id: str) -> Rollout:
    [rollout] = await store.rollouts(RolloutQuery(ids=[rollout_id]))
    return rollout


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


async def test_enqueueing_into_no_run_is_not_found_and_writes_nothing(store: LightningStore) -> None:
    run_id = await a_run(store)
    with pytest.raises(NotFoundError, match="nowhere"):
        await store.enqueue([*some(run_id, 1), *some("nowhere", 1)])
    assert await store.count(run_id) == {}


async def test_a_task_that_is_not_json_is_bad_input(store: LightningStore) -> None:
    run_id = await a_run(store)
    [new] = some(run_id, 1)
    new.task["number"] = object()
    with pytest.raises(InputError, match="JSON"):
        await store.enqueue([new])


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
    async with asyncio.timeout(DEADLINE_S):
        waiting = asyncio.create_task(store.claim(a_worker(run_id), wait_s=60))
        await asyncio.sleep(0)
        await store.enqueue(some(run_id, 1))
        assert len(await waiting) == 1


async def test_a_claim_that_waited_in_vain_is_empty(store: LightningStore) -> None:
    run_id = await a_run(store)
    assert await store.claim(a_worker(run_id), wait_s=0.01) == []


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
    [again] = await store.claim(worker)
    assert (again.rollout.id, again.rollout.attempt, again.rollout.lost) == (claim.rollout.id, 2, 1)
    first, second = await store.attempts([claim.rollout.id])
    assert (first.state, second.state) == ("lost", "running")
    assert first.error is not None
    assert "w0" in first.error


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


# --- how attempts end -------------------------------------------------------------------------------------------------


async def test_failures_are_retried_until_max_attempts(store: LightningStore) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_attempts=3))
    for state in ("failed", "timed_out"):
        await store.finish([ending(claim, state, error="boom")])
        queued = await one(store, claim.rollout.id)
        assert (queued.state, queued.error, queued.finished_seq) == ("queued", "boom", None)
        [claim] = await store.claim(a_worker(claim.rollout.run_id))
    await store.finish([ending(claim, "failed", error="at last", output="printed")])
    failed = await one(store, claim.rollout.id)
    assert (failed.state, failed.error, failed.finished_seq, failed.attempt) == ("failed", "at last", 1, 3)
    attempts = await store.attempts([claim.rollout.id])
    assert [attempt.state for attempt in attempts] == ["failed", "timed_out", "failed"]
    assert attempts[2].output == "printed"


async def test_an_end_that_the_policy_does_not_retry_fails_at_once(store: LightningStore) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_attempts=3, retry_on=("timed_out",)))
    await store.finish([ending(claim, "failed")])
    assert await states(store, [claim]) == ["failed"]


async def test_lost_attempts_use_up_no_attempt_but_have_a_cap(store: LightningStore) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_attempts=2, max_lost=3))
    ends = ["lost", "failed", "lost", "lost"]
    seen = []
    for number, state in enumerate(ends):
        await store.finish([ending(claim, state, error=state)])  # type: ignore[arg-type]
        rollout = await one(store, claim.rollout.id)
        seen.append((rollout.state, rollout.lost))
        if number < len(ends) - 1:
            [claim] = await store.claim(a_worker(claim.rollout.run_id))
    assert seen == [("queued", 1), ("queued", 1), ("queued", 2), ("failed", 3)]


async def test_a_success_after_a_failure_leaves_no_error(store: LightningStore) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_attempts=2))
    await store.finish([ending(claim, "failed", error="boom")])
    [claim] = await store.claim(a_worker(claim.rollout.run_id))
    await store.append_calls([a_call(claim)])
    await store.finish([ending(claim, rewards=(a_reward(claim, 1.0),))])
    rollout = await one(store, claim.rollout.id)
    assert (rollout.state, rollout.error, rollout.reward, rollout.warning) == ("succeeded", None, 1.0, None)


async def test_text_that_is_no_unicode_is_kept_readable(store: LightningStore) -> None:
    [claim] = await claimed(store)
    await store.finish([ending(claim, "failed", error="half \ud83d and nul \0", output="é")])
    error = (await one(store, claim.rollout.id)).error
    assert error is not None
    assert error.startswith("half ?")
    assert (await store.attempts([claim.rollout.id]))[0].output == "é"


async def test_cancelled_rollouts_are_finished_and_their_leases_stale(store: LightningStore) -> None:
    claims = await finished(store)
    run_id = claims[0].rollout.run_id
    queued, running = await store.enqueue(some(run_id, 2, group_id="h"))
    [claim] = await store.claim(a_worker(run_id))
    assert await store.cancel([queued.id, running.id, claims[0].rollout.id, "unknown"]) == 2
    assert await store.cancel([queued.id, running.id]) == 0
    assert await store.finish([ending(claim)]) == [False]
    assert await store.count(run_id) == {("train", "succeeded"): 1, ("train", "cancelled"): 2}
    assert [attempt.state for attempt in await store.attempts([claim.rollout.id])] == ["lost"]
    assert len(await store.wait(run_id, after=1)) == 2


async def test_finishes_of_many_callers_are_each_answered(store: LightningStore) -> None:
    claims = await claimed(store, 30)
    answers = await asyncio.gather(*[store.finish([ending(claim)]) for claim in [*claims, *claims]])
    assert sum(answer == [True] for answer in answers) == 30
    rollouts = await store.wait(claims[0].rollout.run_id, at_least=30)
    assert [rollout.finished_seq for rollout in rollouts] == list(range(1, 31))


# --- rewards at the end -----------------------------------------------------------------------------------------------


async def test_the_final_reward_is_the_return_value_over_what_was_emitted(store: LightningStore) -> None:
    [claim] = await claimed(store)
    await store.record_rewards([a_reward(claim, 0.25, "emitted")])
    await store.finish([ending(claim, rewards=(a_reward(claim, 0.75, "return"),))])
    assert (await one(store, claim.rollout.id)).reward == 0.75


async def test_the_last_emitted_reward_without_a_call_is_final(store: LightningStore) -> None:
    [claim] = await claimed(store)
    call = a_call(claim)
    await store.append_calls([call])
    last = (a_reward(claim, 0.2, "emitted"), a_reward(claim, 0.9, "emitted", call_id=call.id))
    await store.record_rewards([a_reward(claim, 0.1, "emitted")])
    await store.finish([ending(claim, rewards=last)])
    assert (await one(store, claim.rollout.id)).reward == 0.2


async def test_an_attempt_without_a_reward_has_none(store: LightningStore) -> None:
    [claim] = await claimed(store)
    await store.finish([ending(claim)])
    assert (await one(store, claim.rollout.id)).reward is None


async def test_contradictory_final_rewards_fail_the_attempt_with_the_sentence(store: LightningStore) -> None:
    [claim] = await claimed(store)
    rewards = (a_reward(claim, 1.0, "return"), a_reward(claim, 0.0, "function"))
    assert await store.finish([ending(claim, rewards=rewards)]) == [True]
    rollout = await one(store, claim.rollout.id)
    assert (rollout.state, rollout.reward) == ("failed", None)
    assert rollout.error is not None
    assert "function, return" in rollout.error


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_reward_that_is_no_number_fails_its_attempt_only(store: LightningStore, value: float) -> None:
    bad, good = await claimed(store, 2)
    finishes = [ending(bad, rewards=(a_reward(bad, value),)), ending(good, rewards=(a_reward(good, 1.0),))]
    assert await store.finish(finishes) == [True, True]
    assert await states(store, [bad, good]) == ["failed", "succeeded"]
    error = (await one(store, bad.rollout.id)).error
    assert error is not None
    assert "finite number" in error


async def test_only_rewards_of_the_successful_attempt_count(store: LightningStore) -> None:
    [claim] = await claimed(store, retry=RetryPolicy(max_attempts=2))
    await store.finish([ending(claim, "failed", rewards=(a_reward(claim, 0.5),))])
    [again] = await store.claim(a_worker(claim.rollout.run_id))
    await store.finish([ending(again)])
    rollout = await one(store, claim.rollout.id)
    assert (rollout.state, rollout.reward) == ("succeeded", None)
    assert [reward.attempt for reward in await store.rewards([claim.rollout.id])] == [1]


async def test_rewards_that_come_with_a_finish_belong_to_its_lease(store: LightningStore) -> None:
    mine, other = await claimed(store, 2)
    await store.finish([ending(mine, rewards=(a_reward(other, 1.0),))])
    assert [reward.rollout_id for reward in await store.rewards([mine.rollout.id, other.rollout.id])] == [
        mine.rollout.id
    ]


# --- attempts without a call ------------------------------------------------------------------------------------------


async def test_calls_are_counted_when_an_attempt_finishes(store: LightningStore) -> None:
    [claim] = await claimed(store)
    await store.append_calls([a_call(claim), a_call(claim)])
    await store.finish([ending(claim)])
    rollout = await one(store, claim.rollout.id)
    assert (rollout.calls, rollout.warning) == (2, None)


async def test_an_attempt_without_a_call_is_named_with_the_likely_cause(store: LightningStore) -> None:
    silent, diagnosed, misled = await claimed(store, 3)
    await store.append_spans([a_span(misled, "gateway.unknown_route", attributes={"path": "/chat/completions"})])
    await store.finish(
        [ending(silent), ending(diagnosed, diagnosis="HTTP_PROXY is set"), ending(misled, diagnosis="?")]
    )
    warnings = [(await one(store, claim.rollout.id)).warning or "" for claim in (silent, diagnosed, misled)]
    assert all(warning.startswith(NO_CALLS) for warning in warnings)
    assert "did not use the base URL" in warnings[0]
    assert "HTTP_PROXY is set" in warnings[1]
    assert "/chat/completions" in warnings[2]


async def test_a_failed_attempt_without_a_call_is_named_too_but_not_a_lost_one(store: LightningStore) -> None:
    failed, lost = await claimed(store, 2)
    await store.finish([ending(failed, "failed", error="404"), ending(lost, "lost")])
    assert (await one(store, failed.rollout.id)).warning is not None
    assert (await one(store, lost.rollout.id)).warning is None


async def test_a_span_that_only_looks_like_one_about_broken_spans_ends_nothing(store: LightningStore) -> None:
    [claim] = await claimed(store)
    await store.append_calls([a_call(claim)])
    for attributes in ({"resource.service.name": "agent"}, {"resource.service.name": "agent", "cycle": 1}):
        await store.append_spans([a_span(claim, BROKEN_SPANS, attributes=attributes)])
    await store.finish([ending(claim)])
    assert (await one(store, claim.rollout.id)).warning == broken_warning({"cycle": 1})


async def test_what_was_wrong_with_spans_is_summed_by_cause_into_the_warning(store: LightningStore) -> None:
    told, silent, other = await claimed(store, 3)
    await store.append_calls([a_call(told), a_call(other)])
    counted = a_span(told, BROKEN_SPANS, attributes={"cycle": 2})
    await store.append_spans([counted, a_span(told, BROKEN_SPANS, attributes={"cycle": 1, "absent_id": 4})])
    await store.append_spans([counted, a_span(silent, BROKEN_SPANS, attributes={"cycle": 1}), a_span(other)])
    await store.finish([ending(told), ending(silent), ending(other)])
    warnings = [(await one(store, claim.rollout.id)).warning for claim in (told, silent, other)]
    assert warnings[0] == broken_warning({"cycle": 3, "absent_id": 4})
    assert (warnings[1] or "").startswith(NO_CALLS)
    assert (warnings[1] or "").endswith("; " + broken_warning({"cycle": 1}))
    assert warnings[2] is None


async def test_what_air_saw_of_a_rollout_is_never_its_final_reward(store: LightningStore) -> None:
    given, unrewarded = await claimed(store, 2)
    await store.record_rewards([a_reward(given, 0.5, "emitted"), a_reward(given, -1.0, "air", name="air.retries")])
    await store.record_rewards([a_reward(unrewarded, -1.0, "air", name="air.retries")])
    await store.finish([ending(given, rewards=(a_reward(given, 1.0),)), ending(unrewarded)])
    assert [(await one(store, claim.rollout.id)).reward for claim in (given, unrewarded)] == [1.0, None]
    assert {reward.source for reward in await store.rewards([unrewarded.rollout.id])} == {"air"}


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


async def test_waiting_for_no_run_is_not_found(store: LightningStore) -> None:
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
