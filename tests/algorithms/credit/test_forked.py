"""Calls get the difference of two states' values, which are mean returns of forks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from credit_trajectories import trajectory
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.credit import Evidence
from agentlightning.algorithms.credit.forked import ForkEstimate, call_estimates, chosen_calls, forked
from agentlightning.errors import ConfigError
from agentlightning.training_types import Trajectory

GROUP = [trajectory("a", 1.0, "xyz"), trajectory("b", 0.0, "xw")]
RETURNS = {"a": {"a/1": [1.0, 0.0, 0.0], "a/2": [1.0, 1.0, 1.0]}}


@pytest.mark.parametrize(("prior", "expected"), [(0.0, [0.0, 0.5, 0.0]), (1.0, [0.0, 0.4, 0.1])])
def test_a_call_gets_the_value_of_the_state_after_it_less_that_of_the_state_before(
    prior: float, expected: list[float]
) -> None:
    [[first, second]] = forked([GROUP], Evidence(fork_returns=RETURNS), prior=prior)
    assert first.values == pytest.approx(expected)
    assert second.values == [-0.25, -0.25]  # without forks, all of its calls share its return less the group's mean
    assert (first.shares, second.shares) == ([0.0] * 3, [0.0] * 2)


def test_calls_between_two_states_with_a_value_share_the_difference() -> None:
    [[first, _]] = forked([GROUP], Evidence(fork_returns={"a": {"a/2": [0.0, 0.0, 0.0]}}), prior=0.0)
    assert first.values == pytest.approx([-0.125, -0.125, 0.75])  # V = 0.5, 0.25, 1


def test_the_sampling_variance_of_an_advantage_is_that_of_the_means_that_it_is_made_of() -> None:
    first, _ = call_estimates(GROUP, RETURNS, 0.0)
    # returns 1, 0 of the group: 0.5 / 2; 1, 1, 0, 0 before the second call: (1 / 3) / 4; then all equal
    assert [one.variance for one in first] == pytest.approx([0.25 + 1 / 12, 1 / 12, 0.0])
    [[drawn, *_], _] = call_estimates(GROUP, {"a": {"a/1": [1.0, 0.0, 0.0]}}, 1.0)
    assert drawn == ForkEstimate(pytest.approx(0.0), pytest.approx(0.25 + 0.8**2 / 12))


def test_calls_count_in_the_order_in_which_they_began() -> None:
    one = GROUP[0]
    turned = replace(one, transitions=[one.transitions[0], one.transitions[2], one.transitions[1]])
    [[credit, _]] = forked([[turned, GROUP[1]]], Evidence(fork_returns=RETURNS), prior=0.0)
    assert credit.values == pytest.approx([0.0, 0.0, 0.5])


def surprising(name: str, reward: float, surprise: list[float]) -> Trajectory:
    plain = trajectory(name, reward, "xyzw"[: len(surprise)])
    calls = [replace(call, logprobs=[-one]) for call, one in zip(plain.transitions, surprise, strict=True)]
    return replace(plain, transitions=calls)


def ids(one: Trajectory, group: list[Trajectory], calls: int, choose: str) -> list[str]:
    return [call.call_id for call in chosen_calls(one, group, calls, choose)]  # type: ignore[arg-type]


def test_the_calls_that_surprised_most_are_chosen_among_those_that_are_trained() -> None:
    one = surprising("a", 1.0, [0.1, 2.0, 0.5, 3.0])
    assert ids(one, [one], 2, "surprise") == ["a/3", "a/1"]
    assert ids(one, [one], 0, "surprise") == ["a/3", "a/1", "a/2", "a/0"]
    context = replace(one, transitions=[*one.transitions[:3], replace(one.transitions[3], trained=False)])
    assert ids(context, [context], 2, "surprise") == ["a/1", "a/2"]


def test_the_calls_before_which_returns_varied_most_are_chosen() -> None:
    told = [
        trajectory("a", 1.0, "xyz", states="012"),
        trajectory("b", 1.0, "xyz", states="013"),
        trajectory("c", 0.0, "xyz", states="043"),
    ]
    plain = [
        replace(one, transitions=[replace(call, messages=[], parent=None) for call in one.transitions]) for one in told
    ]
    # before b's calls: all three rollouts, 2/9; a and b, 0; b and c, 1/4
    assert ids(plain[1], plain, 0, "variance") == ["b/2", "b/0", "b/1"]
    # a's last state is its own alone: as uncertain as the whole group
    assert ids(plain[0], plain, 2, "variance") == ["a/0", "a/2"]


def test_settings_that_sample_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.credit_settings\.forks: expected .*1, got 0"):
        LightningRL(credit="forked", credit_settings={"forks": 0})


numbers = st.floats(-2.0, 2.0)


@given(
    st.lists(st.tuples(numbers, st.integers(1, 5)), min_size=1, max_size=4),
    st.dictionaries(
        st.tuples(st.integers(0, 3), st.integers(0, 4)), st.lists(numbers, min_size=1, max_size=4), max_size=8
    ),
    st.floats(0.0, 5.0),
)
def test_the_credits_of_a_rollout_add_up_to_its_return_less_the_value_of_the_first_state(
    rows: list[tuple[float, int]], forks: dict[tuple[int, int], list[float]], prior: float
) -> None:
    group = [trajectory(f"r{index}", reward, "x" * calls) for index, (reward, calls) in enumerate(rows)]
    returns: dict[str, dict[str, list[float]]] = {}
    for (index, call), found in forks.items():
        returns.setdefault(f"r{index}", {})[f"r{index}/{call}"] = found
    mean = math.fsum(reward for reward, _ in rows) / len(rows)
    for (reward, _), row in zip(rows, call_estimates(group, returns, prior), strict=True):
        assert math.fsum(one.value for one in row) == pytest.approx(reward - mean, abs=1e-9)
        assert all(one.variance >= 0 for one in row)
