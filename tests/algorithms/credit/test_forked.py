"""Calls get the difference of two states' values, which are mean returns of forks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from credit_trajectories import trajectory
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.algorithms.credit import Evidence
from agentlightning.algorithms.credit.forked import ForkEstimate, call_estimates, chosen_calls, forked
from agentlightning.training_types import Trajectory

GROUP = [trajectory("a", 1.0, "xyz"), trajectory("b", 0.0, "xw")]
RETURNS = {"a": {"a/1": [1.0, 0.0, 0.0], "a/2": [1.0, 1.0, 1.0]}}


def test_a_call_gets_the_value_of_the_state_after_it_less_that_of_the_state_before() -> None:
    [[first, second]] = forked([GROUP], Evidence(fork_returns=RETURNS))
    assert first.values == pytest.approx([0.0, 0.4, 0.1])
    assert second.values == [-0.25, -0.25]  # without forks, all of its calls share its return less the group's mean
    assert (first.shares, second.shares) == ([0.0] * 3, [0.0] * 2)


def test_calls_between_two_states_with_a_value_share_the_difference() -> None:
    [[first, _]] = forked([GROUP], Evidence(fork_returns={"a": {"a/2": [0.0, 0.0, 0.0]}}))
    assert first.values == pytest.approx([-0.1, -0.1, 0.7])  # V = 0.5, (1 + 0.5) / 5, 1


def test_the_sampling_variance_of_an_advantage_is_that_of_the_means_that_it_is_made_of() -> None:
    first, _ = call_estimates(GROUP, RETURNS)
    # returns 1, 0 of the group: 0.5 / 2; 1, 1, 0, 0 before the second call, drawn by 4 / 5: (1 / 3) / 4; then all equal
    drawn = 0.8**2 / 12
    assert [one.variance for one in first] == pytest.approx([0.25 + drawn, drawn, 0.0])
    assert first[0] == ForkEstimate(pytest.approx(0.0), pytest.approx(0.25 + drawn))


def test_calls_count_in_the_order_in_which_they_began() -> None:
    one = GROUP[0]
    turned = replace(one, transitions=[one.transitions[0], one.transitions[2], one.transitions[1]])
    [[credit, _]] = forked([[turned, GROUP[1]]], Evidence(fork_returns=RETURNS))
    assert credit.values == pytest.approx([0.0, 0.1, 0.4])


def surprising(name: str, reward: float, surprise: list[float]) -> Trajectory:
    plain = trajectory(name, reward, "xyzw"[: len(surprise)])
    calls = [replace(call, logprobs=[-one]) for call, one in zip(plain.transitions, surprise, strict=True)]
    return replace(plain, transitions=calls)


def ids(one: Trajectory, calls: int) -> list[str]:
    return [call.call_id for call in chosen_calls(one, calls)]


def test_the_calls_that_surprised_most_are_chosen_among_those_that_are_trained() -> None:
    one = surprising("a", 1.0, [0.1, 2.0, 0.5, 3.0])
    assert ids(one, 2) == ["a/3", "a/1"]
    assert ids(one, 0) == ["a/3", "a/1", "a/2", "a/0"]
    context = replace(one, transitions=[*one.transitions[:3], replace(one.transitions[3], trained=False)])
    assert ids(context, 2) == ["a/1", "a/2"]


numbers = st.floats(-2.0, 2.0)


@given(
    st.lists(st.tuples(numbers, st.integers(1, 5)), min_size=1, max_size=4),
    st.dictionaries(
        st.tuples(st.integers(0, 3), st.integers(0, 4)), st.lists(numbers, min_size=1, max_size=4), max_size=8
    ),
)
def test_the_credits_of_a_rollout_add_up_to_its_return_less_the_value_of_the_first_state(
    rows: list[tuple[float, int]], forks: dict[tuple[int, int], list[float]]
) -> None:
    group = [trajectory(f"r{index}", reward, "x" * calls) for index, (reward, calls) in enumerate(rows)]
    returns: dict[str, dict[str, list[float]]] = {}
    for (index, call), found in forks.items():
        returns.setdefault(f"r{index}", {})[f"r{index}/{call}"] = found
    mean = math.fsum(reward for reward, _ in rows) / len(rows)
    for (reward, _), row in zip(rows, call_estimates(group, returns), strict=True):
        assert math.fsum(one.value for one in row) == pytest.approx(reward - mean, abs=1e-9)
        assert all(one.variance >= 0 for one in row)
