"""What a step makes of AIR's rewards: counted or not, measured either way, and refused where nothing would read them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_policy_update import TalkingEngine, config, trajectory

import build
from agentlightning.adapters.trajectories import JUDGE
from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.rewards import RewardPolicy
from agentlightning.errors import ConfigError
from agentlightning.records import Call, Consumed, Reward, Rollout, Step
from agentlightning.trainer.load_trajectories import AirTally
from agentlightning.trainer.policies import TrainedPolicy
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.schedules import algorithms_of
from agentlightning.trainer.step import StepPlanner
from agentlightning.training_types import Trajectory

RULES = {"tool_error": -0.5, "tool_success": 0.25}
STEPS = LightningRL(credit="step_rewards", minibatches=1)


def marked(one: Trajectory, *values: float) -> Trajectory:
    """With a reward of AIR on each call; 0 for none."""
    calls = [
        replace(call, reward=value, rewards={"air.tool_error": value}) if value else call
        for call, value in zip(one.transitions, values, strict=True)
    ]
    return replace(one, transitions=calls)


PLAIN = [trajectory("a0", 1.0), trajectory("a1", 0.0), trajectory("a2", 0.0)]
GROUP = [PLAIN[0], marked(PLAIN[1], -0.5, 0), marked(PLAIN[2], -0.5, -0.5)]


def planner(table: dict[str, Any], algorithm: LightningRL = STEPS) -> StepPlanner:
    none: Any = None
    return StepPlanner(
        policies={"default": TrainedPolicy(config=config(air=table), algorithm=algorithm, value={})},
        run_id="run",
        folder=Path("none"),
        store=none,
        engine=TalkingEngine(),  # type: ignore[arg-type]
        progress=Silent(),
        learning_rate=1.0,
    )


async def test_rewards_are_differences_of_a_potential() -> None:
    # Φ of the last calls is -0.5 in a1 and a2: returns from the first calls are the final rewards alone, those from the last
    # calls [1, 0.5, 0.5]; the second reward of a2 is of the end, whose potential is 0.
    plain = LightningRL(credit="step_rewards", advantage="dr_grpo", aggregation="token_mean", minibatches=1)
    plan, _ = await planner({"rules": RULES}, plain).plan_policy("default", 1, [GROUP])
    assert [one.credit for one in plan.calls] == pytest.approx([2 / 3, 1 / 3, -1 / 3, -1 / 6, -1 / 3, -1 / 6])


def rollout(name: str, group: str, reward: float | None, attempt: int = 1) -> Rollout:
    return build.rollout(name, reward, group_id=group, attempt=attempt)


def said(owner: Rollout, value: float, rule: str = "tool_error", attempt: int = 1, call: str = "c") -> Reward:
    name = f"{owner.id}.{call}.{rule}.{attempt}"
    return build.reward(owner, value, name, attempt=attempt, name=f"air.{rule}", call_id=call, source="air")


CALL = build.call(build.rollout("one"), "c", suffix_ids=[1], sampled_ids=[2])


def test_rules_that_credit_would_ignore_are_an_error_at_start() -> None:
    ignored = config(air={"rules": RULES})
    with pytest.raises(ConfigError, match=r"credit = 'uniform' ignores step rewards"):
        algorithms_of(ignored)
    algorithms_of(config(air={"rules": RULES}, algorithm={"credit": "gigpo"}))
    algorithms_of(config(air={"rules": RULES}, algorithm={"advantage": "gae"}))
    with pytest.raises(ConfigError, match=r"air\.rules\.tool_eror: no such rule"):
        algorithms_of(config(air={"rules": {"tool_eror": -1.0}}, algorithm={"credit": "step_rewards"}))


class OneStepBefore:
    """A store with one closed step, whose one rollout has a reward of AIR on its call."""

    async def steps(self, run_id: str, after: int, limit: int) -> list[Step]:
        assert (after, limit) == (0, 1)
        return [Step(run_id=run_id, step=1, state="closed", consumed=[Consumed(rollout_id="one", outcome="trained")])]

    async def rollouts(self, query: Any) -> list[Rollout]:
        return [rollout("one", "g", 1.0)]

    async def calls(self, ids: Any) -> list[Call]:
        return [CALL]

    async def rewards(self, ids: Any) -> list[Reward]:
        return [said(rollout("one", "g", 1.0), -0.5)]


async def test_a_credit_rule_that_looks_back_sees_differences_of_a_potential_too(tmp_path: Path) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text(
        "from agentlightning.algorithms.credit import credit_rule\n\n"
        "@credit_rule('back', each='step', needs=('history',))\n"
        "def back(groups, evidence, *, history: int = 1):\n"
        "    earlier = evidence.history[0][0].transitions[0].reward\n"
        "    return [[[one.reward * earlier] * len(one.transitions) for one in group] for group in groups]\n"
    )
    algorithm = LightningRL(credit=f"{rule}:back", advantage="reinforce", minibatches=1)
    looking = replace(planner({"rules": RULES}, algorithm), store=OneStepBefore())  # type: ignore[arg-type]
    plan, _ = await looking.plan_policy("default", 2, [PLAIN])
    found = [row.advantages for ofone in plan.minibatches for row in ofone if row.rollout_id == "a0"]
    assert not any(one for row in found for one in row)  # the last call's reward is given back at the end: 0


def test_reward_weights_leave_airs_own_weights_alone_unless_they_name_its_rules() -> None:
    one = marked(replace(trajectory("a0", 1.0), rewards={"answer": 0.5}), -0.5, 0)
    for weights, step in (({"answer": 2.0}, -0.5), ({"answer": 2.0, "air.tool_error": 0.0}, 0.0)):
        [[[weighed]], _] = RewardPolicy(weights=weights).settle([[one]])
        assert (weighed.reward, weighed.transitions[0].reward) == (1.0, step)


def test_a_step_says_how_often_each_rule_spoke_and_what_it_gave_a_call() -> None:
    good, bad = rollout("good", "g", 1.0), rollout("bad", "g", 0.0, attempt=2)
    tally = AirTally(RULES)
    tally.add([good], [CALL] * 2, [said(good, 0.25, "tool_success")])
    tally.add([bad], [CALL] * 2, [said(bad, -0.5, attempt=2), said(bad, -0.5, attempt=2, call="d"), said(bad, -0.5)])
    assert tally.metrics() == {
        "air/tool_error/reward_mean": -0.25,
        "air/tool_error/share": 0.5,
        "air/tool_success/reward_mean": 0.0625,
        "air/tool_success/share": 0.25,
    }


def test_rewards_of_others_calls_of_judges_and_rewards_that_are_no_number_are_not_airs() -> None:
    good, bad, unknown = (rollout(name, "g", own) for name, own in (("a", 1.0), ("b", 0.0), ("c", math.nan)))
    tally = AirTally({"tool_error": -1.0})
    told = [said(bad, -0.25), said(unknown, -0.5), replace(said(good, -0.75), source="emitted")]
    tally.add([good, bad, unknown], [CALL, CALL, CALL, replace(CALL, agent=JUDGE)], told)
    assert tally.metrics() == {
        "air/tool_error/reward_mean": -0.25,
        "air/tool_error/share": pytest.approx(2 / 3),
    }
