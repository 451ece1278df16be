"""Credit: what a training step learned from each call, kept for screens as long as the records of its rollout."""

from __future__ import annotations

import math

import pytest
from store_samples import a_credit, a_run, claimed, ending

from agentlightning.errors import InputError, NotFoundError
from agentlightning.store.base import LightningStore


async def test_credit_is_read_by_rollout_as_it_was_recorded(store: LightningStore) -> None:
    first, second, other = await claimed(store, 3)
    credits = [
        a_credit(first, "a", return_=0.75, clip_share=0.5),
        a_credit(
            first,
            "b",
            token_advantages=[],
            token_ratios=[],
            token_entropies=[],
            clip_share=None,
            trained_tokens=0,
            weight=0.0,
        ),
        a_credit(second, "c", policy="writer", credit=-2.0, advantage=-0.125),
    ]
    await store.record_credit([*reversed(credits), a_credit(other, "d")])
    ids = sorted((first.rollout.id, second.rollout.id))
    assert await store.credit(ids) == sorted(credits, key=lambda each: (each.rollout_id, each.call_id))
    assert await store.credit([]) == []
    assert await store.credit(["nowhere"]) == []


async def test_credit_is_read_of_some_calls_alone(store: LightningStore) -> None:
    first, second = await claimed(store, 2)
    wanted = [a_credit(first, "b"), a_credit(second, "d")]
    await store.record_credit([a_credit(first, "a"), a_credit(first, "c"), *wanted])
    ids = [first.rollout.id, second.rollout.id]
    found = await store.credit(ids, ["d", "b", "b", "nobody"])
    assert {one.call_id: one for one in found} == {one.call_id: one for one in wanted}
    assert await store.credit(ids, []) == []


async def test_a_step_that_is_executed_again_replaces_its_credit(store: LightningStore) -> None:
    [claim] = await claimed(store)
    await store.record_credit([a_credit(claim, "a"), a_credit(claim, "b")])
    again = [a_credit(claim, "a", advantage=0.25), a_credit(claim, "b", token_ratios=[1.5, 1.0])]
    await store.record_credit(again)
    await store.record_credit(again)
    assert await store.credit([claim.rollout.id]) == again


async def test_credit_of_steps_that_are_too_old_is_dropped(store: LightningStore) -> None:
    first, _, third = claims = await claimed(store, 3)
    run_id, ids = first.rollout.run_id, sorted(claim.rollout.id for claim in claims)
    for step, claim in enumerate(claims, start=1):
        await store.record_credit([a_credit(claim, "a", step=step), a_credit(claim, "b", step=step)])
    await store.drop_credit(run_id, before=1)
    await store.drop_credit(await a_run(store), before=9)
    assert len(await store.credit(ids)) == 6
    await store.drop_credit(run_id, before=3)
    assert [credit.rollout_id for credit in await store.credit(ids)] == [third.rollout.id] * 2
    await store.drop_credit("nowhere", before=9)


async def test_credit_goes_with_the_records(store: LightningStore) -> None:
    [claim] = await claimed(store)
    run_id = claim.rollout.run_id
    await store.record_credit([a_credit(claim, "a", token_advantages=[0.5] * 1000, token_ratios=[1.0] * 1000)])
    await store.finish([ending(claim)])
    await store.drop_records([claim.rollout.id])
    assert await store.credit([claim.rollout.id]) == []
    await store.record_credit([a_credit(claim, "a")])
    await store.delete_runs([run_id])
    assert await store.credit([claim.rollout.id]) == []


async def test_credit_of_nobody_and_numbers_that_are_none_are_refused(store: LightningStore) -> None:
    mine, other = await claimed(store), await claimed(store)
    stray = a_credit(mine[0], "a", run_id=other[0].rollout.run_id)
    for wrong in (stray, a_credit(mine[0], "a", rollout_id="nowhere"), a_credit(mine[0], "a", run_id="nowhere")):
        with pytest.raises(
            NotFoundError, match=f"credit: there is no rollout {wrong.rollout_id} in run {wrong.run_id}"
        ):
            await store.record_credit([a_credit(mine[0], "b"), wrong])
    for name in ("credit", "advantage", "return_", "weight", "clip_share"):
        with pytest.raises(InputError, match="that of call a has others"):
            await store.record_credit([a_credit(mine[0], "a", **{name: math.nan})])
    assert await store.credit([mine[0].rollout.id]) == []
    await store.record_credit([])


async def test_a_few_thousand_calls_are_recorded_at_once(store: LightningStore) -> None:
    [claim] = await claimed(store)
    credits = [a_credit(claim, f"{number:05}", advantage=float(number)) for number in range(2500)]
    await store.record_credit(credits)
    assert await store.credit([claim.rollout.id]) == credits
