"""The records that a step learns from: as they are found the first time, and exactly those ever after."""

from __future__ import annotations

from dataclasses import replace

import pytest
from record_doubles import record

from agentlightning.adapters.trajectories import trajectories
from agentlightning.errors import ConflictError
from agentlightning.records import Call, Reward, Rollout, Span
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.load_trajectories import read_inputs


async def one(store: LightningStore, *calls: dict[str, object]) -> tuple[Rollout, list[Call]]:
    first, *_ = await record(store, tasks=1, calls=calls or ({},))
    [rollout] = await store.rollouts(RolloutQuery(ids=[first]))
    return rollout, await store.calls([first])


async def test_a_call_that_was_not_delivered_is_context(store: LightningStore) -> None:
    rollout, [shown, unread, cut] = await one(
        store,
        {"finished_ns": 1},
        {"finished_ns": 2, "delivered": False},
        {"finished_ns": 3, "finish_reason": "abandoned"},
    )
    found = await read_inputs(store, [rollout], {})
    assert [call.id for call in found.calls] == [shown.id, unread.id, cut.id]
    assert [call.id for call in found.delivered] == found.consumed[rollout.id].calls == [shown.id]
    [kept], _ = trajectories([rollout], found.calls, found.rewards)
    assert [transition.call_id for transition in kept.transitions] == [shown.id]


async def test_marks_that_come_later_change_nothing(store: LightningStore) -> None:
    rollout, [shown, unread] = await one(store, {"finished_ns": 1}, {"finished_ns": 2, "delivered": False})
    first = await read_inputs(store, [rollout], {})
    await store.mark_delivered(rollout.id, 1, [unread.id], True)
    await store.mark_delivered(rollout.id, 1, [shown.id], False)
    again = await read_inputs(store, [rollout], first.consumed)
    assert again == first


async def test_a_name_that_a_later_span_gives_changes_nothing(store: LightningStore) -> None:
    rollout, [call] = await one(store, {"span_id": "s1"})
    first = await read_inputs(store, [rollout], {})
    span = Span(
        id="s1",
        run_id=rollout.run_id,
        rollout_id=rollout.id,
        attempt=1,
        name="work",
        attributes={"gen_ai.agent.name": "writer"},
        started_ns=1,
        finished_ns=2,
    )
    await store.append_spans([span])
    assert await read_inputs(store, [rollout], first.consumed) == first
    named = await read_inputs(store, [rollout], {})
    assert [one.agent for one in named.calls] == ["writer"]
    assert named.consumed[rollout.id].agents == [(call.id, "writer")]
    await store.append_spans([replace(span, id="s0")])
    assert await read_inputs(store, [rollout], named.consumed) == named


async def test_a_record_that_is_gone_is_named(store: LightningStore) -> None:
    rollout, [call] = await one(store)
    fixed = (await read_inputs(store, [rollout], {})).consumed
    inputs = fixed[rollout.id]
    for changed, said in (
        (replace(inputs, calls=["c1", "c2", call.id]), "2 records that are gone, c1 first"),
        (replace(inputs, rewards=["r1"]), "1 records that are gone, r1 first"),
        (replace(inputs, attempt=2), "attempt 2, its latest one is 1"),
    ):
        with pytest.raises(ConflictError, match=rf"rollout {rollout.id}: a step of run source learned from {said}"):
            await read_inputs(store, [rollout], {rollout.id: changed})


async def test_what_a_rollout_is_rescored_with_does_not_count(store: LightningStore) -> None:
    rollout, _ = await one(store)
    first = await read_inputs(store, [rollout], {})
    later = {"run_id": rollout.run_id, "rollout_id": rollout.id, "attempt": 1, "value": 9.0}
    await store.record_rewards([Reward(**later, id="r9", source="rescored")])  # type: ignore[arg-type]
    assert await read_inputs(store, [rollout], {}) == first
