"""Summaries of finished rollouts and series of metrics: the same on every kind of store."""

from __future__ import annotations

from dataclasses import replace

import pytest
from invariants import violations
from store_samples import (
    Clock,
    a_call,
    a_reward,
    a_run,
    a_span,
    a_worker,
    claimed,
    ending,
    finished,
    one,
    some,
)

from agentlightning.errors import InputError, NotFoundError
from agentlightning.records import Consumed, Metric, NewRollout, RetryPolicy
from agentlightning.store.base import LightningStore
from agentlightning.store.gateway_events import REFUSED_CALLS
from agentlightning.store.summaries import RolloutSummary, SummaryQuery


async def summary(store: LightningStore, rollout_id: str) -> RolloutSummary:
    [row] = (await store.summaries(SummaryQuery(where=f"id = '{rollout_id}'"))).rows
    return row


async def found(store: LightningStore, where: str, run_id: str | None = None) -> list[int]:
    """Replicas of the rollouts that match, in order."""
    query = SummaryQuery(run_id=run_id, where=where, limit=1000)
    return sorted(row.replica for row in (await store.summaries(query)).rows)


async def test_a_rollout_that_succeeds_has_a_summary_of_its_last_attempt(store: LightningStore, clock: Clock) -> None:
    run_id = await a_run(store)
    task = {"id": "t1", "question": "how many\nstaff are there?  " + "x" * 200}
    retry = RetryPolicy(max_attempts=2)
    await store.enqueue([NewRollout(run_id=run_id, task=task, group_id="g", step=7, replica=3, retry=retry)])
    clock.advance(5)
    [first] = await store.claim(a_worker(run_id))
    await store.append_calls([a_call(first, agent="forgotten")])
    await store.finish([ending(first, "failed", error="ValueError: no")])
    assert (await store.summaries(SummaryQuery(run_id=run_id))).rows == []
    [claim] = await store.claim(a_worker(run_id))
    root = a_call(claim, agent="writer")
    judge = a_call(claim, suffix_ids=[], sampled_ids=[], logprobs=[], prompt_tokens=0, policy="", agent="judge")
    judge = replace(judge, usage={"prompt_tokens": 100, "sampled_tokens": 10, "estimated": True})
    forked = a_call(claim, fork_cause="edited", agent="writer")
    await store.append_calls([root, judge, forked])
    await store.append_calls([root])
    clock.advance(2.5)
    await store.finish([ending(claim, rewards=(a_reward(claim, 0.5),))])
    rollout, row = await one(store, claim.rollout.id), await summary(store, claim.rollout.id)
    assert row == RolloutSummary(
        id=rollout.id,
        run_id=run_id,
        mode="train",
        step=7,
        state="succeeded",
        group_id="g",
        replica=3,
        task_key=row.task_key,
        title=("how many staff are there? " + "x" * 200)[:100],
        reward=0.5,
        turns=3,
        prompt_tokens=106,
        sampled_tokens=14,
        forks=1,
        agents=["judge", "writer"],
        attempts=2,
        lost=0,
        refused=False,
        cause="policy",
        failure=None,
        outcome=None,
        created_ns=rollout.created_ns,
        finished_ns=clock.now_ns,
        finished_seq=1,
        duration_s=2.5,
    )


async def test_however_a_rollout_ends_it_has_a_summary(store: LightningStore, clock: Clock) -> None:
    run_id = await a_run(store)
    await store.enqueue(some(run_id, 5, retry=RetryPolicy(max_lost=1)))
    claims = await store.claim(a_worker(run_id), limit=4)
    await store.append_calls([a_call(claim) for claim in claims])
    await store.finish(
        [ending(claims[0], "failed", error='Traceback (most recent call last):\n  …\nKeyError: "x\0"\n')]
    )
    refused = a_span(claims[1], REFUSED_CALLS, attributes={"fields": "top_a", "count": 1}, started_ns=3)
    await store.append_spans([refused])
    await store.finish([ending(claims[1], "failed", error="400")])
    [waiting] = [each for each in await store.enqueue(some(run_id, 5)) if each.state == "queued"]
    await store.cancel([claims[2].rollout.id, waiting.id])
    clock.advance(1000)
    assert await store.expire_leases() == 1
    failed, not_served, cancelled, silent = [await summary(store, claim.rollout.id) for claim in claims]
    never = await summary(store, waiting.id)
    assert [row.state for row in (failed, not_served, cancelled, silent, never)] == [
        "failed", "failed", "cancelled", "failed", "cancelled",
    ]  # fmt: skip
    assert failed.failure == 'KeyError: "x�"'
    assert (not_served.refused, not_served.failure) == (True, "1 call refused: top_a 1")
    assert (cancelled.turns, cancelled.failure) == (1, "the rollout was cancelled")
    assert (silent.turns, silent.lost, silent.duration_s) == (1, 1, 1000.0)
    assert (never.turns, never.attempts, never.duration_s) == (0, 0, 0.0)
    assert {row.finished_seq for row in (failed, not_served, cancelled, silent, never)} == {1, 2, 3, 4, 5}
    assert await violations(store) == []


async def test_an_outcome_is_in_the_summary_once_a_step_has_consumed_the_rollout(store: LightningStore) -> None:
    claims = await finished(store, 3)
    run_id = claims[0].rollout.run_id
    assert await found(store, "outcome is null", run_id) == [0, 1, 2]
    listed = [Consumed(rollout_id=claims[0].rollout.id, outcome="stale")]
    await store.open_step(run_id, 1, [*listed, Consumed(rollout_id=claims[1].rollout.id, outcome="trained")])
    assert await found(store, "outcome = 'stale'", run_id) == [0]
    assert await found(store, "outcome in ('stale', 'trained')", run_id) == [0, 1]
    assert await violations(store) == []


async def test_rollouts_of_one_task_have_its_key_in_common_whatever_their_step(store: LightningStore) -> None:
    run_id = await a_run(store)
    tasks = [{"a": 1, "b": "x"}, {"b": "x", "a": 1}, {"a": 2, "b": "x"}]
    await store.enqueue([NewRollout(run_id=run_id, task=each, group_id=str(n), step=n) for n, each in enumerate(tasks)])
    claims = await store.claim(a_worker(run_id), limit=3)
    await store.finish([ending(claim) for claim in claims])
    first, same, other = [await summary(store, claim.rollout.id) for claim in claims]
    assert first.task_key == same.task_key != other.task_key
    rows = (await store.summaries(SummaryQuery(run_id=run_id, where=f"task_key = '{first.task_key}'"))).rows
    assert {row.step for row in rows} == {0, 1}


async def test_a_filter_finds_what_matches_in_the_order_asked_for(store: LightningStore, clock: Clock) -> None:
    run_id = await a_run(store)
    await store.enqueue([replace(each, step=each.replica * 10) for each in some(run_id, 8)])
    claims = await store.claim(a_worker(run_id), limit=8)
    await store.append_calls([a_call(claim, agent="writer") for claim in claims if claim.rollout.replica % 2])
    for claim in claims:
        clock.advance(1)
        rewards = (a_reward(claim, claim.rollout.replica / 10),) if claim.rollout.replica else ()
        await store.finish([ending(claim, rewards=rewards)])
    assert await found(store, "reward < 0.4 and step > 10 and agent = 'writer'", run_id) == [3]
    assert await found(store, "reward is null or reward >= 0.7", run_id) == [0, 7]
    assert await found(store, "not reward < 0.5", run_id) == [5, 6, 7]
    query = SummaryQuery(run_id=run_id, order_by="reward", limit=3)
    pages = [await store.summaries(query)]
    while pages[-1].next is not None:
        pages.append(await store.summaries(replace(query, after=pages[-1].next)))
    assert [[row.replica for row in page.rows] for page in pages] == [[7, 6, 5], [4, 3, 2], [1, 0]]
    upwards = await store.summaries(replace(query, descending=False, limit=8))
    assert [row.replica for row in upwards.rows] == [1, 2, 3, 4, 5, 6, 7, 0]
    newest = await store.summaries(SummaryQuery(run_id=run_id, limit=2))
    assert [row.replica for row in newest.rows] == [7, 6]


async def test_a_page_goes_on_where_the_last_ended_however_many_finish_meanwhile(
    store: LightningStore, clock: Clock
) -> None:
    run_id = await a_run(store)
    await store.enqueue(some(run_id, 6))
    claims = await store.claim(a_worker(run_id), limit=6)
    for claim in claims[:4]:
        clock.advance(1)
        await store.finish([ending(claim)])
    first = await store.summaries(SummaryQuery(run_id=run_id, limit=2))
    clock.advance(1)
    await store.finish([ending(claim) for claim in claims[4:]])
    second = await store.summaries(SummaryQuery(run_id=run_id, limit=2, after=first.next))
    assert [row.replica for row in (*first.rows, *second.rows)] == [3, 2, 1, 0]
    assert second.next is None


async def test_all_runs_are_one_list(store: LightningStore, clock: Clock) -> None:
    for count in (2, 3):
        clock.advance(1)
        await finished(store, count)
    first = await store.summaries(SummaryQuery(limit=3))
    rest = await store.summaries(SummaryQuery(limit=3, after=first.next))
    assert len({row.run_id for row in first.rows}) == 1
    assert (len(first.rows), len(rest.rows), rest.next) == (3, 2, None)


async def test_a_query_that_means_nothing_is_refused(store: LightningStore) -> None:
    [claim, *_] = await finished(store, 2)
    run_id = claim.rollout.run_id
    page = await store.summaries(SummaryQuery(run_id=run_id, limit=1))
    for query, said in (
        (SummaryQuery(where="reward >"), "where: reward: expected a number at position 9, got the end"),
        (SummaryQuery(limit=0), "limit: expected 1 to 1000, got 0"),
        (SummaryQuery(limit=1001), "limit: expected 1 to 1000, got 1001"),
        (SummaryQuery(after="nonsense"), "after: expected the `next` of a page in the same order"),
        (SummaryQuery(run_id=run_id, order_by="reward", after=page.next), "after: expected the `next` of a page in"),
    ):
        with pytest.raises(InputError, match=said):
            await store.summaries(query)


async def test_summaries_stay_when_records_are_dropped_and_go_with_their_run(store: LightningStore) -> None:
    claims = await claimed(store, 2)
    await store.append_calls([a_call(claim, agent="writer") for claim in claims])
    await store.finish([ending(claim) for claim in claims])
    run_id = claims[0].rollout.run_id
    before = await store.summaries(SummaryQuery(run_id=run_id))
    await store.drop_records([claim.rollout.id for claim in claims])
    assert await store.summaries(SummaryQuery(run_id=run_id)) == before
    await store.delete_runs([run_id])
    assert (await store.summaries(SummaryQuery())).rows == []


# --- series -----------------------------------------------------------------------------------------------------------


async def logged(store: LightningStore, run_id: str, name: str, values: list[float], first: int = 1) -> None:
    await store.log_metrics(
        [Metric(run_id=run_id, step=step, name=name, value=value) for step, value in enumerate(values, first)]
    )


async def test_a_short_series_is_all_of_its_values(store: LightningStore, clock: Clock) -> None:
    run_id = await a_run(store)
    await logged(store, run_id, "loss", [3.0, 2.0])
    await logged(store, run_id, "reward", [0.5])
    series = await store.series(run_id)
    assert [(point.step, point.value, point.low, point.high) for point in series["loss"]] == [
        (1, 3, 3, 3),
        (2, 2, 2, 2),
    ]
    assert series["loss"][0].created_ns == clock.now_ns
    assert list(await store.series(run_id, ["reward", "unknown"])) == ["reward"]


async def test_a_long_series_is_the_last_value_of_each_bucket_with_the_lowest_and_the_highest(
    store: LightningStore,
) -> None:
    run_id = await a_run(store)
    await logged(store, run_id, "loss", [float((step * 7) % 10) for step in range(100)], first=0)
    points = (await store.series(run_id, ["loss"], max_points=10))["loss"]
    assert [point.step for point in points] == [9, 19, 29, 39, 49, 59, 69, 79, 89, 99]
    assert {(point.value, point.low, point.high) for point in points} == {(3.0, 0.0, 9.0)}
    later = (await store.series(run_id, max_points=10, after_step=89))["loss"]
    assert [(point.step, point.value) for point in later] == [(step, (step * 7) % 10) for step in range(90, 100)]


async def test_a_series_leaves_out_what_a_crash_undid_and_what_is_no_number(store: LightningStore) -> None:
    run_id = await a_run(store)
    await logged(store, run_id, "loss", [1.0, 100.0, float("nan")])
    await store.reopen_steps(run_id, after=1)
    await logged(store, run_id, "loss", [2.0, float("inf")], first=2)
    points = (await store.series(run_id))["loss"]
    assert [(point.step, point.value) for point in points] == [(1, 1.0), (2, 2.0)]


async def test_a_series_of_no_run_or_of_no_points_is_refused(store: LightningStore) -> None:
    with pytest.raises(NotFoundError):
        await store.series("nowhere")
    with pytest.raises(InputError, match="max_points: expected 1 to 10000, got 0"):
        await store.series(await a_run(store), max_points=0)
    assert await store.series(await a_run(store)) == {}
