"""The controller of a canary, over a real store: sessions end and are rewarded, and the routes follow by themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from uuid_utils import uuid7

from agentlightning.config.canary import CanaryConfig
from agentlightning.config.serve import ROUTES_RESOURCE, RoutesConfig
from agentlightning.gateway.sessions.routes import choose_version
from agentlightning.records import JSON, Finish, NewRollout, Reward
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.model_versions import ModelVersion
from agentlightning.store.open import open_store
from agentlightning.trainer.canary.controller import CanaryController, CanaryTrial, put_routes, read_figures, read_trial

RULE = CanaryConfig(reward_margin=0.2, error_margin=None, alpha=0.05, min_sessions=10, max_sessions=60)
CANARY = RoutesConfig(stable=40, canary=50, weight=0.5, rule=RULE)
DEADLINE_S = 60.0


@asynccontextmanager
async def serving(routes: RoutesConfig) -> AsyncIterator[tuple[LightningStore, str]]:
    """A store with a run that serves these routes, of a model with two versions."""
    async with open_store("memory://") as store:
        run = await store.create_run("serve support", {})
        for step in (40, 50):
            await store.register_model(
                ModelVersion(
                    name="support",
                    number=0,
                    run_id=run.id,
                    policy="default",
                    step=step,
                    resource_version=step,
                    parent=None,
                    base_model="tiny",
                    weights={"kind": "full", "url": "file:///w", "manifest_hash": "", "bytes": 1},
                )
            )
        await store.set_alias("support", "production", 40, {})
        await put_routes(store, run.id, routes)
        yield store, run.id


async def session(store: LightningStore, run_id: str, name: str, routes: RoutesConfig, *, fails: bool = False) -> int:
    """A session that ends with a reward: 1 with the stable version, and with the canary unless it `fails`."""
    number = choose_version(name, routes)
    claim = await store.open_session(
        NewRollout(
            run_id=run_id,
            task={"session": name, "key": "k", "model": f"support@{number}"},
            group_id=f"session:k:{name}",
            kind="session",
            step=number,
        ),
        600.0,
    )
    await store.record_feedback([posted(run_id, claim.rollout.id, float(not fails or number == 40))])
    await store.finish([Finish(lease=claim.lease, state="succeeded")])
    return number


def posted(run_id: str, rollout_id: str, value: float) -> Reward:
    return Reward(
        id=str(uuid7()),
        run_id=run_id,
        rollout_id=rollout_id,
        attempt=1,
        value=value,
        source="posted",
        created_ns=time.time_ns(),
    )


@asynccontextmanager
async def controlled(store: LightningStore, run_id: str, decisions: list[JSON]) -> AsyncIterator[None]:
    controller = asyncio.create_task(CanaryController(store, run_id, "support", on_decision=decisions.append).run())
    try:
        yield
    finally:
        controller.cancel()
        await asyncio.gather(controller, return_exceptions=True)


async def decided(
    store: LightningStore, run_id: str, decisions: list[JSON], act: Callable[[int], Awaitable[object]]
) -> JSON:
    """The first decision, while `act` goes on."""
    end = time.monotonic() + DEADLINE_S
    number = 0
    while not decisions:
        assert time.monotonic() < end, "nothing was decided"
        await act(number)
        number += 1
    return decisions[0]


async def test_a_canary_that_fails_is_rolled_back_for_new_sessions_with_its_numbers_in_the_audit_log() -> None:
    decisions: list[JSON] = []
    async with serving(CANARY) as (store, run_id), controlled(store, run_id, decisions):
        decision = await decided(
            store, run_id, decisions, lambda number: session(store, run_id, f"s{number}", CANARY, fails=True)
        )
        assert (decision["decision"], decision["canary"], decision["stable"]) == (
            "roll_back",
            "support@50",
            "support@40",
        )
        trial = await read_trial(store, run_id)
        assert (trial.routes.stable, trial.routes.canary, trial.routes.rule) == (40, None, None)
        entry = (await store.audit(run_id))[-1]
        assert (entry.action, entry.subject) == ("put_resources", ROUTES_RESOURCE)
        figures = entry.detail["reason"]["figures"]["reward"]
        assert figures["canary"]["mean"] == 0.0
        assert figures["stable"]["mean"] == 1.0
        assert figures["worse"]["wealth"] >= figures["worse"]["bound"] == 20
        [alias] = await store.aliases("support")
        assert (alias.alias, alias.number) == ("production", 40)


async def test_a_canary_that_is_no_worse_is_promoted_and_the_alias_moves() -> None:
    decisions: list[JSON] = []
    async with serving(CANARY) as (store, run_id), controlled(store, run_id, decisions):
        decision = await decided(store, run_id, decisions, lambda number: session(store, run_id, f"s{number}", CANARY))
        assert decision["decision"] == "promote"
        trial = await read_trial(store, run_id)
        assert (trial.routes.stable, trial.routes.canary) == (50, None)
        [alias] = await store.aliases("support")
        assert (alias.number, alias.previous) == (50, 40)
        moved = [one for one in await store.audit() if one.action == "set_alias"][-1]
        assert "figures" in str(moved.detail)


async def test_a_controller_that_begins_anew_counts_what_was_there_before_it() -> None:
    decisions: list[JSON] = []
    async with serving(CANARY) as (store, run_id):
        for number in range(60):
            await session(store, run_id, f"s{number}", CANARY, fails=True)
        counted = await read_figures(store, run_id, await read_trial(store, run_id))
        assert counted["verdict"] == "roll_back"
        async with controlled(store, run_id, decisions):
            decision = await decided(store, run_id, decisions, lambda _: asyncio.sleep(0.01))
        assert decision["decision"] == "roll_back"


async def test_sessions_of_before_the_canary_and_those_that_a_header_chose_are_not_counted() -> None:
    async with serving(RoutesConfig(stable=40)) as (store, run_id):
        await session(store, run_id, "before", RoutesConfig(stable=40))
        await put_routes(store, run_id, CANARY)
        names = [f"s{number}" for number in range(20)]
        by_weight = [name for name in names if choose_version(name, CANARY) == 50]
        for name in names:
            await session(store, run_id, name, CANARY)
        beta = next(f"beta{number}" for number in range(99) if choose_version(f"beta{number}", CANARY) == 40)
        await session(store, run_id, beta, RoutesConfig(stable=50))  # as a header gives it the canary
        figures = (await read_figures(store, run_id, await read_trial(store, run_id)))["figures"]["reward"]
        assert figures["canary"]["sessions"] == len(by_weight)
        assert figures["stable"]["sessions"] == len(names) - len(by_weight)


async def test_feedback_that_comes_after_the_end_of_a_session_is_counted_once() -> None:
    async with serving(CANARY) as (store, run_id):
        number = await session(store, run_id, "late", CANARY)
        [rollout] = [one.id for one in await store.rollouts(RolloutQuery(run_id=run_id))]
        again = Reward(
            id=str(uuid7()),
            run_id=run_id,
            rollout_id=rollout,
            attempt=1,
            value=0.0,
            source="posted",
            created_ns=time.time_ns(),
        )
        await store.record_feedback([again])
        figures = (await read_figures(store, run_id, await read_trial(store, run_id)))["figures"]["reward"]
        arm = figures["canary" if number == 50 else "stable"]
        assert arm == {"sessions": 1, "mean": 1.0}


@pytest.mark.parametrize(("undecided", "left"), [("hold", 50), ("roll_back", None)])
async def test_an_undecided_canary_is_held_or_rolled_back(undecided: str, left: int | None) -> None:
    rule = CanaryConfig(reward_margin=0.01, error_margin=None, min_sessions=3, max_sessions=5, undecided=undecided)
    routes = RoutesConfig(stable=40, canary=50, weight=0.5, rule=rule)
    decisions: list[JSON] = []
    async with serving(routes) as (store, run_id), controlled(store, run_id, decisions):
        decision = await decided(store, run_id, decisions, lambda number: session(store, run_id, f"s{number}", routes))
        assert (decision["decision"], decision["verdict"]) == (undecided, "undecided")
        assert (await read_trial(store, run_id)).routes.canary == left


@pytest.mark.parametrize("fails", [True, False])
async def test_of_two_controllers_at_once_one_decides(fails: bool) -> None:
    decisions: list[JSON] = []
    async with serving(CANARY) as (store, run_id):
        for number in range(120):
            await session(store, run_id, f"s{number}", CANARY, fails=fails)
        before = (await read_trial(store, run_id)).version
        async with controlled(store, run_id, decisions), controlled(store, run_id, decisions):
            await decided(store, run_id, decisions, lambda _: asyncio.sleep(0.01))
            await until_without_canary(store, run_id)
        trial = await read_trial(store, run_id)
        assert len(decisions) == 1
        # A promotion is its decision, then the routes that follow from it.
        assert (trial.routes.stable, trial.version - before) == ((40, 1) if fails else (50, 2))
        assert len([one for one in await store.audit() if one.action == "set_alias"]) == (1 if fails else 2)


async def test_a_promotion_whose_controller_was_killed_after_the_decision_is_gone_on_with() -> None:
    async with serving(CANARY) as (store, run_id):
        decided_routes = CANARY.model_copy(update={"reason": {"decision": "promote", "verdict": "promote"}})
        await put_routes(store, run_id, decided_routes)
        async with controlled(store, run_id, []):
            trial = await until_without_canary(store, run_id)
        assert (trial.routes.stable, trial.routes.reason) == (50, decided_routes.reason)
        [alias] = await store.aliases("support")
        assert alias.number == 50


async def until_without_canary(store: LightningStore, run_id: str) -> CanaryTrial:
    end = time.monotonic() + DEADLINE_S
    while (trial := await read_trial(store, run_id)).routes.canary is not None:
        assert time.monotonic() < end, "the canary is still there"
        await store.wait_resources(run_id, {ROUTES_RESOURCE: trial.version}, 5.0)
    return trial
