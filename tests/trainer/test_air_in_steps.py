"""What a step makes of AIR's rewards: counted or not, measured either way, and refused where nothing would read them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_policy_update import TalkingEngine, config, trajectory

import build
from agentlightning.adapters.trajectories import trajectories
from agentlightning.algorithms import LightningRL
from agentlightning.errors import ConfigError
from agentlightning.records import Call, Reward, Rollout
from agentlightning.trainer.policies import TrainedPolicy
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.schedules import algorithms_of, check_air
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


async def advantages(table: dict[str, Any], group: list[Trajectory]) -> list[list[float]]:
    plan, _ = await planner(table).plan_policy("default", 1, [group])
    rows = sorted(plan.minibatches[0], key=lambda row: (row.rollout_id, row.tokens))
    return [row.advantages for row in rows]


async def test_rewards_are_differences_of_a_potential() -> None:
    # Φ of the last calls is -0.5 in a1 and a2: returns from the first calls are the final rewards alone, those from the last
    # calls [1, 0.5, 0.5]; the second reward of a2 is of the end, whose potential is 0.
    plain = LightningRL(credit="step_rewards", advantage="dr_grpo", aggregation="token_mean", minibatches=1)
    plan, _ = await planner({"rules": RULES}, plain).plan_policy("default", 1, [GROUP])
    assert [one.credit for one in plan.calls] == pytest.approx([2 / 3, 1 / 3, -1 / 3, -1 / 6, -1 / 3, -1 / 6])


def test_a_final_reward_that_is_the_same_throughout_still_teaches_what_air_saw() -> None:
    group = [trajectory("a0", 0.0), marked(trajectory("a1", 0.0), -0.5, 0)]
    assert STEPS.plan([group], seed=0).outcomes == {"a0": "trained", "a1": "trained"}


# --- what is measured -----------------------------------------------------------------------------------------------------


def rollout(name: str, group: str, reward: float | None, attempt: int = 1) -> Rollout:
    return build.rollout(name, reward, group_id=group, attempt=attempt)


def said(owner: Rollout, value: float, rule: str = "tool_error", attempt: int = 1, call: str = "c") -> Reward:
    name = f"{owner.id}.{call}.{rule}.{attempt}"
    return build.reward(owner, value, name, attempt=attempt, name=f"air.{rule}", call_id=call, source="air")


CALL = build.call(build.rollout("one"), "c", suffix_ids=[1], sampled_ids=[2])


def calls(count: int) -> list[Call]:
    return [CALL] * count


# --- settings -------------------------------------------------------------------------------------------------------------


def test_rules_that_credit_would_ignore_are_an_error_at_start() -> None:
    ignored = config(air={"rules": RULES})
    with pytest.raises(ConfigError, match=r"credit = 'uniform' ignores step rewards"):
        algorithms_of(ignored)
    algorithms_of(config(air={"rules": RULES}, algorithm={"credit": "gigpo"}))
    algorithms_of(config(air={"rules": RULES}, algorithm={"advantage": "gae"}))


def test_a_rule_that_is_not_known_is_an_error_at_start() -> None:
    with pytest.raises(ConfigError, match=r"air\.rules\.tool_eror: no such rule"):
        algorithms_of(config(air={"rules": {"tool_eror": -1.0}}, algorithm={"credit": "step_rewards"}))


def test_airs_rewards_reach_their_calls() -> None:
    owner = replace(rollout("one", "g", 1.0), run_id="run")
    [made], _ = trajectories([owner], [CALL], [said(owner, -0.5)])
    assert (made.transitions[0].reward, made.rewards) == (-0.5, {})


STEP_READER = """
def earned(groups, credits):
    return [[[call.reward for call in one.transitions] for one in group] for group in groups]

"""


def test_an_advantage_of_one_s_own_may_read_step_rewards(tmp_path: Path) -> None:
    """AIR is not refused with it, on account of a credit rule that reads none."""
    file = tmp_path / "step_reader.py"
    file.write_text(STEP_READER)
    own = LightningRL(advantage=f"{file}:earned")
    check_air(config(air={"rules": RULES}), [own])
