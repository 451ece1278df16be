"""Sessions, the rollouts of users of a served model, on every store."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from invariants import violations
from store_samples import SECOND, Clock, a_call, a_reward, a_run, a_worker, claimed, ending, new_id, one

from agentlightning.errors import NotFoundError, RewardError
from agentlightning.records import Claim, NewRollout, Resource
from agentlightning.store.base import LightningStore
from agentlightning.store.summaries import SummaryQuery
from agentlightning.store.tokens import session_token


def a_session(run_id: str, name: str = "one", **fields: Any) -> NewRollout:
    return NewRollout(run_id=run_id, task={"session": name}, group_id=f"session:{name}", kind="session", **fields)


async def opened(store: LightningStore, name: str = "one", lease_s: float = 60.0) -> Claim:
    return await store.open_session(a_session(await a_run(store), name), lease_s)


async def summary_reward(store: LightningStore, claim: Claim) -> float | None:
    page = await store.summaries(SummaryQuery(run_id=claim.rollout.run_id))
    return {row.id: row.reward for row in page.rows}[claim.rollout.id]


async def test_a_session_opens_as_a_running_attempt(store: LightningStore, clock: Clock) -> None:
    claim = await opened(store)
    rollout = claim.rollout
    assert (rollout.state, rollout.attempt, rollout.replica, rollout.started_ns) == ("running", 1, 0, clock.now_ns)
    assert await one(store, rollout.id) == rollout
    [attempt] = await store.attempts([rollout.id])
    assert (attempt.state, attempt.worker_id, attempt.lease_expires_ns) == (
        "running",
        "gateway",
        clock.now_ns + 60 * SECOND,
    )
    assert await store.claim(a_worker(rollout.run_id)) == []
    assert await violations(store) == []


async def test_of_callers_at_the_same_time_all_get_the_same_session(store: LightningStore) -> None:
    run_id = await a_run(store)
    claims = await asyncio.gather(*(store.open_session(a_session(run_id, step=number), 60.0) for number in range(20)))
    assert len({(claim.rollout.id, claim.rollout.step, claim.key, claim.lease.token) for claim in claims}) == 1
    assert await store.count(run_id) == {("train", "running"): 1}


async def test_going_on_with_a_session_extends_its_lease(store: LightningStore, clock: Clock) -> None:
    claim = await opened(store)
    clock.advance(50)
    again = await store.open_session(a_session(claim.rollout.run_id), 60.0)
    assert again == claim
    clock.advance(50)
    assert await store.expire_leases() == 0
    clock.advance(11)
    assert await store.expire_leases() == 1


async def test_a_session_whose_lease_runs_out_has_succeeded_with_its_reward(
    store: LightningStore, clock: Clock
) -> None:
    claim = await opened(store)
    await store.append_calls([a_call(claim)])
    await store.record_feedback([a_reward(claim, 0.25, "posted")])
    clock.advance(61)
    assert await store.expire_leases() == 1
    ended = await one(store, claim.rollout.id)
    assert (ended.state, ended.reward, ended.calls, ended.lost, ended.error) == ("succeeded", 0.25, 1, 0, None)
    assert await store.wait(claim.rollout.run_id, timeout_s=0.0) == [ended]
    assert await summary_reward(store, claim) == 0.25
    assert await violations(store) == []


async def test_after_its_end_a_session_begins_anew(store: LightningStore) -> None:
    claim = await opened(store)
    assert await store.finish([ending(claim)]) == [True]
    later = await store.open_session(a_session(claim.rollout.run_id, step=7), 60.0)
    assert later.rollout.id != claim.rollout.id
    assert (later.rollout.replica, later.rollout.step, later.rollout.attempt) == (1, 7, 1)
    assert await store.finish([ending(claim)]) == [False]


async def test_any_gateway_may_finish_a_session(store: LightningStore) -> None:
    claim = await opened(store)
    if (secret := await store.signing_secret()) is not None:
        assert claim.lease.token == session_token(secret, claim.rollout.id)


async def test_a_session_pins_the_newest_prompt_templates(store: LightningStore) -> None:
    run_id = await a_run(store)
    prompt = Resource(run_id=run_id, name="system", kind="prompt_template", value={"text": "a"})
    await store.put_resources([prompt])
    await store.put_resources([prompt])
    claim = await store.open_session(a_session(run_id), 60.0)
    assert claim.rollout.prompts == {"system": 2}
    await store.put_resources([prompt])
    assert (await store.open_session(a_session(run_id), 60.0)).rollout.prompts == {"system": 2}
    old = await store.open_session(a_session(run_id, "other", prompts={"system": 1}), 60.0)
    assert old.rollout.prompts == {"system": 1}


async def test_feedback_that_comes_after_the_end_is_the_sessions_reward(store: LightningStore, clock: Clock) -> None:
    claim = await opened(store)
    await store.finish([ending(claim)])
    assert await summary_reward(store, claim) is None
    first, second = a_reward(claim, 1.0, "posted"), a_reward(claim, 0.0, "posted")
    await store.record_feedback([first])
    assert ((await one(store, claim.rollout.id)).reward, await summary_reward(store, claim)) == (1.0, 1.0)
    clock.advance(1)
    await store.record_feedback([second])
    await store.record_feedback([first])  # sent again: ids that exist are ignored
    assert ((await one(store, claim.rollout.id)).reward, await summary_reward(store, claim)) == (0.0, 0.0)
    assert [reward.id for reward in await store.rewards([claim.rollout.id])] == [first.id, second.id]
    assert await violations(store) == []


async def test_feedback_of_what_is_no_session_is_refused(store: LightningStore) -> None:
    [claim] = await claimed(store)
    with pytest.raises(NotFoundError, match=f"rollout {claim.rollout.id} is no session of run {claim.rollout.run_id}"):
        await store.record_feedback([a_reward(claim, 1.0, "posted")])
    session = await opened(store)
    with pytest.raises(NotFoundError, match="they name a call that is not recorded"):
        await store.record_feedback([a_reward(session, 1.0, "posted", call_id=new_id())])
    with pytest.raises(RewardError, match="expected a finite number"):
        await store.record_feedback([a_reward(session, math.nan, "posted")])
    assert await store.rewards([claim.rollout.id, session.rollout.id]) == []


async def test_a_session_needs_a_run_and_its_prompts(store: LightningStore) -> None:
    with pytest.raises(NotFoundError, match="no such run: nowhere"):
        await store.open_session(a_session("nowhere"), 60.0)
    with pytest.raises(NotFoundError, match="has no prompt template 'system' of version 3"):
        await store.open_session(a_session(await a_run(store), prompts={"system": 3}), 60.0)
