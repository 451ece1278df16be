"""Conformance: training steps, and that no rollout is consumed twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from store_samples import a_run, claimed, ending, finished

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.records import Claim, Consumed, ConsumedInputs, Metric, Outcome
from agentlightning.store.base import LightningStore, RolloutQuery


def eaten(claims: Sequence[Claim], outcome: Outcome = "trained") -> list[Consumed]:
    return [Consumed(rollout_id=claim.rollout.id, outcome=outcome) for claim in claims]


async def outcomes(store: LightningStore, run_id: str) -> list[Outcome | None]:
    return [rollout.outcome for rollout in await store.rollouts(RolloutQuery(run_id=run_id))]


async def test_steps_are_read_in_portions(store: LightningStore) -> None:
    run_id = await a_run(store)
    for number in range(1, 6):
        await store.open_step(run_id, number, [])
    assert [step.step for step in await store.steps(run_id, after=2, limit=2)] == [3, 4]
    assert [step.step for step in await store.steps(run_id, limit=1)] == [1]
    assert await store.steps(run_id, after=5) == []


async def test_an_open_step_keeps_its_list_in_order_and_sets_outcomes(store: LightningStore) -> None:
    claims = await finished(store, 4)
    run_id = claims[0].rollout.run_id
    order = [claims[2], claims[0], claims[1]]
    consumed = [*eaten(order[:2]), *eaten(order[2:], "zero_variance")]
    step = await store.open_step(run_id, 1, consumed)
    assert (step.state, step.version, step.consumed) == ("open", None, consumed)
    assert await outcomes(store, run_id) == ["trained", "zero_variance", "trained", None]
    unconsumed = await store.rollouts(RolloutQuery(run_id=run_id, unconsumed=True))
    assert [rollout.id for rollout in unconsumed] == [claims[3].rollout.id]
    assert await store.steps(run_id) == [step]


async def test_opening_again_with_the_same_list_returns_the_step(store: LightningStore) -> None:
    claims = await finished(store, 2)
    run_id = claims[0].rollout.run_id
    step = await store.open_step(run_id, 1, eaten(claims))
    assert await store.open_step(run_id, 1, eaten(claims)) == step
    for other in (eaten(claims[::-1]), eaten(claims, "stale"), eaten(claims[:1]), []):
        with pytest.raises(ConflictError, match="another list"):
            await store.open_step(run_id, 1, other)


async def test_closing_a_step_records_its_version_once(store: LightningStore) -> None:
    claims = await finished(store)
    run_id = claims[0].rollout.run_id
    await store.open_step(run_id, 1, eaten(claims))
    closed = await store.close_step(run_id, 1, 7)
    assert (closed.state, closed.version) == ("closed", 7)
    assert await store.close_step(run_id, 1, 7) == closed
    with pytest.raises(ConflictError, match="version 7, not 8"):
        await store.close_step(run_id, 1, 8)
    with pytest.raises(ConflictError, match="closed"):
        await store.open_step(run_id, 1, eaten(claims))
    with pytest.raises(NotFoundError, match="step 2"):
        await store.close_step(run_id, 2, 8)


async def test_a_rollout_is_consumed_by_one_step_only(store: LightningStore) -> None:
    claims = await finished(store, 3)
    run_id = claims[0].rollout.run_id
    await store.open_step(run_id, 1, eaten(claims[:2]))
    with pytest.raises(ConflictError, match="consumed by step 1 already"):
        await store.open_step(run_id, 2, eaten(claims[1:]))
    assert len(await store.steps(run_id)) == 1
    assert (await outcomes(store, run_id))[2] is None


async def test_concurrent_steps_never_share_a_rollout(store: LightningStore) -> None:
    claims = await finished(store, 3)
    run_id = claims[0].rollout.run_id
    results = await asyncio.gather(
        *[store.open_step(run_id, step, eaten(claims)) for step in range(1, 6)], return_exceptions=True
    )
    assert sum(not isinstance(result, Exception) for result in results) == 1
    assert len(await store.steps(run_id)) == 1


async def test_only_finished_training_rollouts_of_the_run_can_be_consumed(store: LightningStore) -> None:
    done = await finished(store)
    run_id = done[0].rollout.run_id
    evaluated = await finished(store, mode="eval")
    running = await claimed(store)
    elsewhere = await finished(store)
    for claims, said in (
        (evaluated, "belongs to run|evaluation"),
        (running, "running|belongs"),
        (elsewhere, "belongs"),
    ):
        with pytest.raises(ConflictError, match=said):
            await store.open_step(run_id, 1, [*eaten(done), *eaten(claims)])
    with pytest.raises(ConflictError, match="evaluation"):
        await store.open_step(evaluated[0].rollout.run_id, 1, eaten(evaluated))
    with pytest.raises(ConflictError, match="running, not finished"):
        await store.open_step(running[0].rollout.run_id, 1, eaten(running))
    with pytest.raises(ConflictError, match="twice"):
        await store.open_step(run_id, 1, eaten([*done, *done]))
    with pytest.raises(NotFoundError, match="unknown"):
        await store.open_step(run_id, 1, [Consumed(rollout_id="unknown", outcome="trained")])
    with pytest.raises(NotFoundError, match="nowhere"):
        await store.open_step("nowhere", 1, [])
    assert await store.steps(run_id) == []
    assert await outcomes(store, run_id) == [None]


async def test_failed_and_cancelled_rollouts_are_finished_and_get_outcomes(store: LightningStore) -> None:
    claims = await claimed(store, 2)
    run_id = claims[0].rollout.run_id
    await store.finish([ending(claims[0], "failed")])
    await store.cancel([claims[1].rollout.id])
    await store.open_step(run_id, 1, [*eaten(claims[:1], "invalid"), *eaten(claims[1:], "overprovisioned")])
    assert await outcomes(store, run_id) == ["invalid", "overprovisioned"]


async def test_reopening_gives_back_the_lists_of_later_steps_in_order(store: LightningStore) -> None:
    claims = await finished(store, 4)
    run_id = claims[0].rollout.run_id
    for step in (1, 2, 3):
        await store.open_step(run_id, step, eaten(claims[step - 1 : step]))
        await store.close_step(run_id, step, step)
        await store.log_metrics([Metric(run_id=run_id, step=step, name="loss", value=step)])
    await store.open_step(run_id, 4, eaten(claims[3:]))
    reopened = await store.reopen_steps(run_id, after=1)
    assert [(step.step, step.state, step.version) for step in reopened] == [
        (2, "open", None),
        (3, "open", None),
        (4, "open", None),
    ]
    assert [step.consumed for step in reopened] == [eaten(claims[number : number + 1]) for number in (1, 2, 3)]
    assert await store.reopen_steps(run_id, after=1) == reopened
    assert [metric.abandoned for metric in await store.metrics(run_id)] == [False, True, True]
    assert await store.open_step(run_id, 2, reopened[0].consumed) == reopened[0]
    assert (await store.close_step(run_id, 2, 9)).version == 9
    assert [step.state for step in await store.steps(run_id)] == ["closed", "closed", "open", "open"]


async def test_steps_of_runs_are_apart(store: LightningStore) -> None:
    a, b = await finished(store), await finished(store)
    await store.open_step(a[0].rollout.run_id, 1, eaten(a))
    await store.open_step(b[0].rollout.run_id, 1, eaten(b))
    assert [step.step for step in await store.reopen_steps(a[0].rollout.run_id, after=0)] == [1]
    assert [step.consumed for step in await store.steps(b[0].rollout.run_id)] == [eaten(b)]


async def test_a_step_keeps_the_records_that_it_learns_from(store: LightningStore) -> None:
    claims = await finished(store, 2)
    run_id = claims[0].rollout.run_id
    inputs = ConsumedInputs(attempt=1, calls=["a", "b.1"], rewards=["r"], agents=[("b.1", "writer ü")], replayed=["c"])
    listed = [replace(eaten(claims[:1])[0], inputs=inputs), *eaten(claims[1:], "stale")]
    step = await store.open_step(run_id, 1, listed)
    assert step.consumed == listed
    assert await store.open_step(run_id, 1, listed) == step
    with pytest.raises(ConflictError, match="another list"):
        await store.open_step(run_id, 1, [replace(listed[0], inputs=replace(inputs, calls=["a"])), listed[1]])
    await store.close_step(run_id, 1, 7)
    assert await store.reopen_steps(run_id, after=0) == await store.steps(run_id) == [step]
