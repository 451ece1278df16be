from __future__ import annotations

import math
from dataclasses import replace

import pytest

import build
from agentlightning.algorithms.rewards import RewardPolicy
from agentlightning.training_types import Trajectory


def rollout(name: str, reward: float = 0.0, steps: dict[str, float] | None = None, **named: float) -> Trajectory:
    steps = steps or {}
    call = build.transition(f"{name}/0", reward=sum(steps.values()), rewards=steps)
    return Trajectory(rollout_id=name, group_id="g", reward=reward, transitions=[call], rewards=named)


WEIGHTS = {"answer": 1.0, "format": 0.2}


def test_named_rewards_are_weighed_into_one() -> None:
    one = rollout("a", 9.0, {"format": 1.0, "other": 5.0}, answer=1.0, format=0.5, other=7.0)
    [[[weighed]], _] = RewardPolicy(weights=WEIGHTS).settle([[one]])
    assert weighed.reward == pytest.approx(1.1)
    assert weighed.transitions[0].reward == pytest.approx(0.2)


def test_without_weights_the_settled_reward_counts_as_it_is() -> None:
    one = rollout("a", 0.7, {"format": 1.0}, answer=1.0)
    assert RewardPolicy().settle([[one]]) == ([[one]], set())


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_reward_that_is_missing_or_no_finite_number_is_never_zero(value: float | None) -> None:
    named = {"answer": 1.0} if value is None else {"answer": 1.0, "format": value}
    group = [rollout("a", **named), rollout("b", answer=0.0, format=1.0)]
    [kept], unknown = RewardPolicy(weights=WEIGHTS).settle([group])
    assert ([one.rollout_id for one in kept], unknown) == (["b"], {"a"})


def test_a_final_or_a_step_reward_that_is_no_number_is_not_known() -> None:
    group = [rollout("a", math.nan), rollout("b", 1.0), rollout("c", 1.0, {"format": math.nan})]
    assert RewardPolicy().settle([group])[1] == {"a", "c"}


def test_a_failed_rollout_has_the_reward_that_the_run_gives_for_it() -> None:
    failed = replace(rollout("a", 0.0), failed=True)
    assert RewardPolicy(weights=WEIGHTS).settle([[failed]])[0] == [[failed]]
