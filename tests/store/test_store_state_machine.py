"""The rollout state machine against a small model of it, over random histories."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from redis_server import RedisServer
from store_samples import Clock, a_run, a_worker, ending, some, sql_store

from agentlightning.errors import ConflictError
from agentlightning.records import FINAL_STATES, Claim, Consumed, RetryPolicy
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.redis.store import RedisLightningStore

LEASE_S = 30
RETRY = RetryPolicy(max_attempts=2, max_lost=2, retry_on=("failed",))


@dataclass
class Model:
    """What one rollout must look like."""

    state: str = "queued"
    attempt: int = 0
    lost: int = 0
    token: str | None = None
    expires_ns: int = 0
    step: int | None = None
    ends: list[str] = field(default_factory=list)

    def end(self, state: str) -> None:
        self.ends.append(state)
        self.token = None
        if state == "succeeded":
            self.state = state
        elif state == "lost":
            self.lost += 1
            self.state = "queued" if self.lost < RETRY.max_lost else "failed"
        else:
            used = sum(end in ("failed", "timed_out") for end in self.ends)
            self.state = "queued" if state in RETRY.retry_on and used < RETRY.max_attempts else "failed"


class RolloutMachine(RuleBasedStateMachine):
    claims = Bundle("claims")

    def __init__(self, store_with: Callable[[Clock], LightningStore]) -> None:
        super().__init__()
        self.store_with = store_with

    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.clock = Clock()
        self.store = self.store_with(self.clock)
        self.do(self.store.open())
        self.run_id = self.do(a_run(self.store))
        self.models: dict[str, Model] = {}
        self.steps = 0

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.do(self.store.close())
            self.runner.close()

    def do(self, work: Any) -> Any:
        return self.runner.run(work)

    def expire(self) -> int:
        overdue = [model for model in self.models.values() if model.token and model.expires_ns <= self.clock.now_ns]
        for model in overdue:
            model.end("lost")
        return len(overdue)

    @rule(count=st.integers(1, 3))
    def enqueue(self, count: int) -> None:
        new = some(self.run_id, count, group_id=f"g{len(self.models)}", retry=RETRY)
        for rollout in self.do(self.store.enqueue(new)):
            self.models[rollout.id] = Model()

    @rule(target=claims, limit=st.integers(1, 4))
    def claim(self, limit: int) -> Any:
        claims = self.do(self.store.claim(a_worker(self.run_id), limit=limit, lease_s=LEASE_S))
        queued = [rollout_id for rollout_id in sorted(self.models) if self.models[rollout_id].state == "queued"]
        assert [claim.rollout.id for claim in claims] == queued[:limit]
        for claim in claims:
            model = self.models[claim.rollout.id]
            model.state, model.attempt, model.token = "running", model.attempt + 1, claim.lease.token
            model.expires_ns = self.clock.now_ns + LEASE_S * 10**9
        return multiple(*claims)

    @rule(claim=claims)
    def heartbeat(self, claim: Claim) -> None:
        model = self.models[claim.rollout.id]
        holds = model.token == claim.lease.token
        assert self.do(self.store.heartbeat(a_worker(self.run_id), [claim.lease], lease_s=LEASE_S)) == [holds]
        if holds:
            model.expires_ns = self.clock.now_ns + LEASE_S * 10**9

    @rule(
        claim=st.one_of(claims, consumes(claims)), state=st.sampled_from(["succeeded", "failed", "timed_out", "lost"])
    )
    def finish(self, claim: Claim, state: Any) -> None:
        model = self.models[claim.rollout.id]
        holds = model.token == claim.lease.token
        assert self.do(self.store.finish([ending(claim, state)])) == [holds]
        if holds:
            model.end(state)

    @rule(claim=claims)
    def cancel(self, claim: Claim) -> None:
        model = self.models[claim.rollout.id]
        live = model.state in ("queued", "running")
        assert self.do(self.store.cancel([claim.rollout.id])) == live
        if model.state == "running":
            model.end("lost")
        if live:
            model.state = "cancelled"

    @rule(seconds=st.sampled_from([1, 10, 31]))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)
        if seconds != 10:
            assert self.do(self.store.expire_leases()) == self.expire()

    @rule(data=st.data())
    def consume(self, data: st.DataObject) -> None:
        if not self.models:
            return
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.models)), unique=True, max_size=3))
        fit = all(self.models[each].state in FINAL_STATES and self.models[each].step is None for each in chosen)
        consumed = [Consumed(rollout_id=each, outcome="trained") for each in chosen]
        try:
            self.do(self.store.open_step(self.run_id, self.steps + 1, consumed))
        except ConflictError:
            assert not fit
        else:
            assert fit
            self.steps += 1
            for each in chosen:
                self.models[each].step = self.steps

    @invariant()
    def store_and_model_agree(self) -> None:
        if not hasattr(self, "models"):
            return
        rollouts = self.do(self.store.rollouts(RolloutQuery(run_id=self.run_id)))
        assert [rollout.id for rollout in rollouts] == sorted(self.models)
        for rollout in rollouts:
            model = self.models[rollout.id]
            assert (rollout.state, rollout.attempt, rollout.lost) == (model.state, model.attempt, model.lost)
            assert (rollout.outcome == "trained") == (model.step is not None)
        final = [rollout.id for rollout in rollouts if rollout.state in FINAL_STATES]
        places = [rollout.finished_seq for rollout in self.do(self.store.wait(self.run_id, timeout_s=0))]
        assert places == list(range(1, len(final) + 1))
        attempts = self.do(self.store.attempts(sorted(self.models)))
        assert len(attempts) == sum(model.attempt for model in self.models.values())


HISTORIES = settings(
    max_examples=20,
    stateful_step_count=25,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_any_history_of_rollouts_follows_the_model() -> None:
    run_state_machine_as_test(lambda: RolloutMachine(lambda clock: sql_store("memory://", clock)), settings=HISTORIES)


@pytest.mark.slow
def test_any_history_of_rollouts_follows_the_model_on_redis(redis: RedisServer) -> None:
    def store_with(clock: Clock) -> LightningStore:
        return RedisLightningStore(redis.url(), now_ns=clock)

    run_state_machine_as_test(lambda: RolloutMachine(store_with), settings=HISTORIES)
