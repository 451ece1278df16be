"""What a step's plan and the engine's ratios say of each call, and that no more of it is kept than may be."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loop_doubles import Countdown, Crash, Crashing, RememberingEngine, agents, loop

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.lightning_rl import UpdatePlan
from agentlightning.records import CallCredit
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.step import CreditRecorder, RowNumbers, TrainedCall, call_credits, clip_share, named_rows
from agentlightning.training_types import Loss, TokenNumbers, Trajectory
from build import transition

LOSS = Loss(clip_low=0.2, clip_high=0.28)


def trajectory(name: str, reward: float, forced: bool = False) -> Trajectory:
    """Two calls, the second of which continues the first, so that both are one row: 1 10 20* 2 30*."""
    first = transition(f"{name}/0", sampled_ids=[10, 20])
    decoding = {"forced": [(0, 1)]} if forced else {}
    second = transition(f"{name}/1", suffix_ids=[2], sampled_ids=[30, 31], parent=first, decoding=decoding)
    return Trajectory(rollout_id=name, group_id="g", reward=reward, transitions=[first, second])


def plan_of(*trajectories: Trajectory, **settings: Any) -> UpdatePlan:
    return LightningRL(minibatches=1, aggregation="token_mean", **settings).plan([trajectories], seed=0)


def credit_of(plan: UpdatePlan, ratios: RowNumbers) -> dict[str, CallCredit]:
    return {one.call_id: one for one in call_credits(plan, ratios, "run", 3, "white")}


def test_each_call_has_its_credit_advantage_weight_and_the_ratios_of_its_own_tokens() -> None:
    plan = plan_of(trajectory("a", 1.0), trajectory("b", 0.0))
    [rows] = plan.minibatches
    ratios = {
        name: TokenNumbers([100.0 * (name[0] == "a") + at for at in places], [at / 10 for at in places])
        for name, row in named_rows(rows).items()
        for places in [range(len(row.tokens))]
    }
    found = credit_of(plan, ratios)
    assert sorted(found) == ["a/0", "a/1", "b/0", "b/1"]
    one = found["a/1"]
    assert (one.run_id, one.step, one.rollout_id, one.policy) == ("run", 3, "a", "white")
    assert (one.credit, one.return_, one.trained_tokens) == (1.0, None, 2)
    assert one.advantage == pytest.approx(0.7071, abs=1e-3)
    assert one.weight == pytest.approx(2 / 8)
    assert one.token_advantages == [one.advantage] * 2
    assert one.token_ratios == [104.0, 105.0]  # tokens 4 and 5 of 1 10 20 2 30 31 less the prompt: see the row
    assert one.token_entropies == [0.4, 0.5]
    assert found["b/0"].token_ratios == [1.0, 2.0]
    assert found["b/0"].credit == 0.0


def test_forced_tokens_are_not_trained_and_count_in_no_mean() -> None:
    plan = plan_of(trajectory("a", 1.0, forced=True), trajectory("b", 0.0))
    one = credit_of(plan, {})["a/1"]
    assert (one.trained_tokens, len(one.token_advantages)) == (1, 2)
    assert one.weight == pytest.approx(1 / 7)


def test_with_a_critic_a_call_has_its_return_and_the_reward_that_it_earned() -> None:
    group = [trajectory("a", 1.0), trajectory("b", 0.0)]
    values = {call.call_id: [0.5, 0.5] for one in group for call in one.transitions}
    plan = LightningRL(advantage="gae", minibatches=1).plan([group], seed=0, values=values)
    found = credit_of(plan, {})
    assert [found[name].credit for name in ("a/0", "a/1", "b/1")] == [0.0, 1.0, 0.0]
    assert found["a/1"].return_ == pytest.approx(1.0, abs=0.05)
    assert found["b/1"].return_ == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize(
    ("loss", "advantage", "ratios", "expected"),
    [
        (LOSS, 1.0, [1.3, 0.5, 1.0, 1.0], 0.25),
        (LOSS, -1.0, [1.3, 0.5, 1.0, 1.0], 0.25),
        (replace(LOSS, dual_clip=3.0), -1.0, [4.0, 0.5, 1.0, 1.0], 0.5),
        (replace(LOSS, name="cispo"), 1.0, [1.3, 0.5, 1.0, 1.0], 0.5),
        (replace(LOSS, name="gspo"), 1.0, [2.0, 2.0, 1.0, 1.0], 1.0),
        (replace(LOSS, name="gspo"), 1.0, [1.1, 1.1, 1.0, 1.0], 0.0),
        (replace(LOSS, name="gspo"), -1.0, [0.0, 1.0, 1.0, 1.0], 1.0),
        (replace(LOSS, name="reinforce"), 1.0, [9.0] * 4, None),
    ],
)
def test_the_share_of_tokens_that_a_loss_cuts(
    loss: Loss, advantage: float, ratios: list[float], expected: float | None
) -> None:
    call = TrainedCall(mask=[True] * 4, advantages=[advantage] * 4, weights=[0.25] * 4, ratios=ratios)
    assert clip_share(loss, call) == expected
    assert clip_share(loss, replace(call, mask=[False] * 4)) is None
    assert clip_share(loss, replace(call, ratios=None)) is None


async def recorded(store: LightningStore) -> list[CallCredit]:
    rollouts = await store.rollouts(RolloutQuery(run_id="run", mode="train"))
    return await store.credit([rollout.id for rollout in rollouts])


async def test_a_run_that_is_killed_between_any_two_verbs_has_the_credit_of_every_call_once(
    store: LightningStore, tmp_path: Path
) -> None:
    async with agents(store, calls=2):
        for ticks in (60, 90, 120):
            countdown = Countdown(ticks)
            engine = RememberingEngine()
            with suppress(Crash):
                await loop(Crashing(store, countdown), Crashing(engine, countdown), tmp_path).run(resume=ticks > 60)
        await loop(store, RememberingEngine(), tmp_path).run(resume=True)
    steps = await store.steps("run")
    step_of = {one.rollout_id: step.step for step in steps for one in step.consumed}
    calls = [call for rollout_id in step_of for call in await store.calls([rollout_id])]
    found = await recorded(store)
    assert sorted(one.call_id for one in found) == sorted(call.id for call in calls)
    assert all(one.step == step_of[one.rollout_id] for one in found)
    assert len({one.step for one in found}) == len(steps)


async def test_only_the_latest_steps_keep_their_credit(store: LightningStore, tmp_path: Path) -> None:
    async with agents(store):
        await loop(store, RememberingEngine(), tmp_path).run(resume=False)
    await CreditRecorder(store=store, run_id="run", keep_steps=2).record(3, {}, {})
    assert {one.step for one in await recorded(store)} == {2, 3}


def test_a_number_that_is_not_finite_leaves_its_call_out() -> None:
    plan = plan_of(trajectory("a", 1.0), trajectory("b", 0.0))
    broken = replace(plan, calls=[replace(plan.calls[0], credit=math.nan), *plan.calls[1:]])
    assert plan.calls[0].call.call_id not in credit_of(broken, {})
    assert len(credit_of(broken, {})) == 3
