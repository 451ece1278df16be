"""AIR's rewards as differences of a potential: Ng, Harada and Russell's shaping."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import build
from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.credit.gigpo import gigpo
from agentlightning.algorithms.credit.step_rewards import returns_to_go
from agentlightning.algorithms.critic import Gae
from agentlightning.algorithms.rewards import shaped_air
from agentlightning.training_types import Trajectory


def judged(name: str, reward: float, **rewards: list[float]) -> Trajectory:
    """A rollout whose calls have these rewards by name; ``air_RULE`` is AIR's."""
    count = len(next(iter(rewards.values())))
    calls = []
    for place in range(count):
        named = {key.replace("air_", "air."): values[place] for key, values in rewards.items() if values[place]}
        calls.append(build.transition(f"{name}/{place}", rewards=named, reward=sum(named.values())))
    return Trajectory(rollout_id=name, group_id="g", reward=reward, transitions=calls)


def shaped(one: Trajectory, gamma: float = 1.0) -> Trajectory:
    [[found]] = shaped_air([[one]], gamma)
    return found


def rewards(one: Trajectory) -> list[float]:
    return [call.reward for call in one.transitions]


def test_each_call_gets_what_the_potential_changed_by() -> None:
    one = judged("a", 1.0, air_tool_error=[-0.25, 0.0, -0.5])
    assert rewards(shaped(one)) == [-0.25, 0.0, 0.25]
    # γ = 0.5: 0.5 × -0.25 - 0, 0.5 × -0.25 + 0.25, 0 + 0.25
    assert rewards(shaped(one, gamma=0.5)) == [-0.125, 0.125, 0.25]


def test_the_discount_is_that_of_the_returns() -> None:
    assert LightningRL(credit={"type": "step_rewards", "gamma": 0.5}).call_gamma == 0.5
    assert LightningRL(credit="gigpo").call_gamma == 1.0  # it adds up a rollout's rewards without a discount
    assert LightningRL().call_gamma == 1.0
    assert LightningRL(advantage=Gae(call_gamma=0.8)).call_gamma == 0.8


def group_of_equal_rewards(reward: float) -> list[Trajectory]:
    errors = ([-0.2, 0.0, -0.2], [0.0, -0.2, 0.0], [0.0, 0.0, 0.0], [-0.2, -0.2, 0.0])
    retries = ([-0.1, -0.1, 0.0], [0.0, -0.1, -0.1], [0.0, -0.1, 0.0], [-0.1, 0.0, -0.1])
    return [
        judged(f"r{place}", reward, air_tool_error=error, air_retry=retry)
        for place, (error, retry) in enumerate(zip(errors, retries, strict=True))
    ]


@pytest.mark.parametrize("credit", ["step_rewards", "grouped_gae"])
def test_equal_rewards_differ_by_no_rounding_error_of_what_shaping_added(credit: str) -> None:
    algorithm = LightningRL(credit=credit, group_size=4)
    groups = shaped_air([group_of_equal_rewards(1.0)])
    undivided = replace(algorithm, advantage="dr_grpo").advantages(groups[0])
    for found, expected in zip(algorithm.advantages(groups[0]), undivided, strict=True):
        assert found == pytest.approx(expected)
    failures = shaped_air([group_of_equal_rewards(0.0)])
    assert replace(algorithm, advantage="maxrl").advantages(failures[0]) == [[0.0] * 3] * 4


def test_shaping_leaves_the_part_of_gigpo_that_compares_rollouts_as_it_is() -> None:
    [group] = shaped_air([group_of_equal_rewards(1.0)], LightningRL(credit="gigpo").call_gamma)
    for one in gigpo(group):
        assert one.score == pytest.approx(1.0)
        assert one.values == [one.score] * 3


@given(
    st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=5),
    st.sampled_from([0.5, 0.9, 1.0]),
    st.floats(-1, 1),
)
def test_from_any_state_on_shaping_changes_the_return_by_that_states_potential_alone(
    given_rewards: list[tuple[float, float]], gamma: float, final: float
) -> None:
    """Whatever is done from there on: the order of policies stays."""
    one = judged("a", final, air_tool_error=[a for a, _ in given_rewards], air_retry=[b for _, b in given_rewards])
    plain = returns_to_go(replace(one, transitions=[replace(call, reward=0.0) for call in one.transitions]), gamma)
    potential = 0.0
    for found, expected, call in zip(returns_to_go(shaped(one, gamma), gamma), plain, one.transitions, strict=True):
        assert found == pytest.approx(expected - potential, abs=1e-9)
        potential += sum(call.rewards.values())
