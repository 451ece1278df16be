"""News and numbers: waiting for resources and metrics, and what goes on in each run."""

from __future__ import annotations

import asyncio
import math

import pytest
from store_samples import Clock, a_run, a_worker, some

from agentlightning.errors import InputError, NotFoundError
from agentlightning.records import Metric, Resource
from agentlightning.store.base import MAX_FINISHED, LightningStore, RolloutQuery


def a_policy(run_id: str, name: str = "default", **fields: int) -> Resource:
    return Resource(run_id=run_id, name=name, kind="policy", value={"urls": ["http://engine"]}, **fields)


def a_metric(run_id: str, step: int, value: float = 1.0, name: str = "reward") -> Metric:
    return Metric(run_id=run_id, step=step, name=name, value=value)


async def test_versions_later_than_those_known_are_returned_at_once(store: LightningStore) -> None:
    run_id = await a_run(store)
    await store.put_resources([a_policy(run_id), a_policy(run_id), a_policy(run_id, "other")])
    assert [(found.name, found.version) for found in await store.wait_resources(run_id, {})] == [
        ("default", 2),
        ("other", 1),
    ]
    [found] = await store.wait_resources(run_id, {"default": 1, "other": 1, "gone": 7})
    assert found == (await store.resources(run_id, "default"))[0]


async def test_waiting_for_a_version_that_does_not_come_ends_with_nothing(store: LightningStore) -> None:
    run_id, other = await a_run(store), await a_run(store)
    await store.put_resources([a_policy(run_id), a_policy(other, "another")])
    assert await store.wait_resources(run_id, {"default": 1}, timeout_s=0.05) == []


async def test_a_new_version_wakes_those_who_wait_for_it(store: LightningStore) -> None:
    run_id = await a_run(store)
    await store.put_resources([a_policy(run_id)])
    waiting = [asyncio.create_task(store.wait_resources(run_id, {"default": 1}, timeout_s=30)) for _ in range(3)]
    while not await store.runs():  # as long as a round trip takes; what comes before they wait they see at once
        pass
    await store.put_resources([a_policy(run_id, step=5)])
    for task in waiting:
        [found] = await task
        assert (found.version, found.step) == (2, 5)


async def test_metrics_are_followed_in_the_order_of_their_arrival(store: LightningStore) -> None:
    run_id, other = await a_run(store), await a_run(store)
    await store.log_metrics([a_metric(run_id, 3), a_metric(run_id, 1), a_metric(other, 1)])
    await store.log_metrics([a_metric(run_id, 2, math.nan)])
    followed = await store.follow_metrics(run_id)
    assert [metric.step for metric in followed] == [3, 1, 2]
    assert math.isnan(followed[2].value)
    seqs = [metric.seq for metric in followed]
    assert seqs == sorted(set(seqs))
    assert seqs[0] > 0
    assert [metric.step for metric in await store.follow_metrics(run_id, after=seqs[0], limit=1)] == [1]
    assert await store.follow_metrics(run_id, after=seqs[2], timeout_s=0.05) == []
    assert sorted(metric.seq for metric in await store.metrics(run_id)) == seqs


async def test_a_new_metric_wakes_those_who_follow(store: LightningStore) -> None:
    run_id = await a_run(store)
    await store.log_metrics([a_metric(run_id, 1)])
    [first] = await store.follow_metrics(run_id)
    waiting = asyncio.create_task(store.follow_metrics(run_id, after=first.seq, timeout_s=30))
    await store.runs()
    await store.log_metrics([a_metric(run_id, 2)])
    assert [metric.step for metric in await waiting] == [2]


async def test_whoever_follows_portion_by_portion_misses_nothing_and_sees_nothing_twice(store: LightningStore) -> None:
    run_id = await a_run(store)

    async def write(name: str) -> None:
        for step in range(20):
            await store.log_metrics([a_metric(run_id, step, name=name), a_metric(run_id, step, name=name + "2")])

    async def follow() -> list[tuple[str, int]]:
        seen: list[tuple[str, int]] = []
        after = 0
        while len(seen) < 160:
            portion = await store.follow_metrics(run_id, after=after, timeout_s=30, limit=7)
            seen += [(metric.name, metric.step) for metric in portion]
            after = portion[-1].seq
        return seen

    writers = [write(name) for name in "abcd"]
    seen, *_ = await asyncio.gather(follow(), *writers)
    assert len(set(seen)) == len(seen) == 160


async def test_news_of_a_run_that_does_not_exist_are_refused(store: LightningStore) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        await store.wait_resources("nowhere", {}, timeout_s=30)
    with pytest.raises(NotFoundError, match="nowhere"):
        await store.follow_metrics("nowhere", timeout_s=30)
    with pytest.raises(InputError, match="limit"):
        await store.follow_metrics("nowhere", limit=0)


async def test_statistics_say_what_goes_on_in_each_running_run(store: LightningStore, clock: Clock) -> None:
    run_id = await a_run(store)
    assert (await store.statistics())[0].oldest_queued_s == 0
    await store.enqueue(some(run_id, 3, group_id="first"))
    clock.advance(20)
    await store.enqueue(some(run_id, 4, group_id="second"))
    await store.claim(a_worker(run_id, "w0"), limit=1, lease_s=30)
    await store.claim(a_worker(run_id, "w1"), limit=1, lease_s=300)
    clock.advance(21)
    [number] = await store.statistics()
    assert number.run_id == run_id
    assert (number.queued, number.running, number.expiring, number.workers) == (5, 2, 1, 2)
    assert number.oldest_queued_s == 41
    clock.advance(50)
    await store.heartbeat(a_worker(run_id, "w1"), [])
    clock.advance(5)
    assert (await store.statistics())[0].workers == 1


async def test_statistics_of_one_run_are_those_of_no_other(store: LightningStore) -> None:
    run_ids = [await a_run(store), await a_run(store)]
    await store.enqueue(some(run_ids[0], 2, group_id="g"))
    assert [(one.run_id, one.queued) for one in await store.statistics(run_ids[0])] == [(run_ids[0], 2)]
    await store.update_run(run_ids[0], "finished")
    assert await store.statistics(run_ids[0]) == await store.statistics("nowhere") == []
    assert [number.run_id for number in await store.statistics()] == run_ids[1:]


async def test_waiting_for_finished_rollouts_brings_a_bounded_number_at_a_time(store: LightningStore) -> None:
    run_id = await a_run(store)
    count = MAX_FINISHED + 5
    await store.enqueue(some(run_id, count))
    await store.cancel([rollout.id for rollout in await store.rollouts(RolloutQuery(run_id=run_id))])
    first = await store.wait(run_id, at_least=count)
    rest = await store.wait(run_id, after=first[-1].finished_seq or 0)
    assert [rollout.finished_seq for rollout in first + rest] == list(range(1, count + 1))
    assert len(first) == MAX_FINISHED
