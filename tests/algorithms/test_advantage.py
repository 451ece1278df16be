from __future__ import annotations

import statistics
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.algorithms.advantage import (
    ADVANTAGES,
    WHITENED,
    grpo,
    maxrl,
    rewards_to_go,
    whiten_batch,
)
from agentlightning.errors import RewardError

CENTRED = ["grpo", "dr_grpo", "rloo", "maxrl"]
"""Rules whose advantages say how much better than the group a rollout was."""


def flat(advantages: list[list[float]]) -> list[float]:
    return [value for rollout in advantages for value in rollout]


def of(rule: str, rewards: list[float]) -> list[float]:
    """Advantages of one group of one-call rollouts under uniform credit, the batch's part included."""
    values = ADVANTAGES[rule]([[reward] for reward in rewards], rewards)
    return flat(whole(rule, values))


def whole(rule: str, values: list[list[float]]) -> list[list[Any]]:
    """With the step's part; every call has one token."""
    return whiten_batch(values, [[1] * len(rollout) for rollout in values]) if rule in WHITENED else values


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),  # baselines 0, 1/3, 1/3, 1/3
        ("reinforce", [1.0, 0.0, 0.0, 0.0]),
        ("maxrl", [3.0, -1.0, -1.0, -1.0]),  # 0.75 / 0.25, -0.25 / 0.25
        ("reinforce_pp", [1.5, -0.5, -0.5, -0.5]),  # mean 0.25, sample deviation 0.5 of the batch
        ("reinforce_pp_baseline", [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_one_success_in_four_by_hand(rule: str, expected: list[float]) -> None:
    assert of(rule, [1.0, 0.0, 0.0, 0.0]) == pytest.approx(expected, abs=1e-6)


def test_calls_that_are_left_out_are_not_normalised() -> None:
    left_out = [[True, False], [True, False]]
    plain = whiten_batch([[1.0], [0.0]], [[1], [3]])
    assert whiten_batch([[0.0, 1.0], [[0.0, -0.1], 0.0]], [[5, 1], [2, 3]], left_out) == [
        [0.0, *plain[0]],
        [[0.0, 0.0], *plain[1]],
    ]


def test_a_step_is_normalised_over_the_tokens_of_all_its_groups() -> None:
    # one-call rollouts of two groups: [1, 0] and [5, 5]; batch mean 2.75, sample variance (3.0625 + 7.5625 + 2 × 5.0625) / 3
    deviation = 6.916666666666667**0.5
    assert whiten_batch([[1.0], [0.0], [5.0, 5.0]], [[1], [1], [1, 1]]) == [
        [pytest.approx(-1.75 / deviation)],
        [pytest.approx(-2.75 / deviation)],
        [pytest.approx(2.25 / deviation)] * 2,
    ]
    # tokens [1, 0, 0, 0]: mean 0.25, deviation 0.5; a number for a call and one for each of its tokens are the same
    assert whiten_batch([[1.0], [0.0]], [[1], [3]]) == [[pytest.approx(1.5)], [pytest.approx(-0.5)]]
    assert whiten_batch([[[1.0]], [[0.0, 0.0, 0.0]]], [[1], [3]]) == [
        [pytest.approx([1.5])],
        [pytest.approx([-0.5] * 3)],
    ]


def test_a_token_answers_for_the_penalties_from_it_to_the_end_of_the_rollout() -> None:
    assert rewards_to_go([[1.0, 1.0]], [[[0.1, 0.2], [0.3]]]) == [[pytest.approx([0.4, 0.5]), pytest.approx([0.7])]]


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(RewardError, match="maxrl expects rewards of at least 0, got -1"):
        maxrl([[1.0], [-1.0]], [1.0, -1.0])


@pytest.mark.parametrize("rule", CENTRED)
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1.0, 3.3])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero(rule: str, reward: float, size: int) -> None:
    assert ADVANTAGES[rule]([[reward, reward]] * size, [reward] * size) == [[0.0, 0.0]] * size


@pytest.mark.parametrize("rule", sorted(set(ADVANTAGES) - set(WHITENED)))
def test_a_rollout_with_more_calls_weighs_no_more(rule: str) -> None:
    def advantages(calls: int) -> list[list[float]]:
        return ADVANTAGES[rule]([[1.0] * calls, [0.0], [0.25]], [1.0, 0.0, 0.25])

    few, many = advantages(1), advantages(9)
    assert many[0] == pytest.approx(few[0] * 9)
    assert flat(many[1:]) == pytest.approx(flat(few[1:]))


@pytest.mark.parametrize("rule", sorted(set(ADVANTAGES) - {"reinforce", "reinforce_pp"}))
def test_a_call_without_a_share_is_compared_with_nothing(rule: str) -> None:
    [[left_out, counted], _] = ADVANTAGES[rule]([[0.0, 1.0], [0.0]], [1.0, 0.0], [[0.0, 1.0], [1.0]])
    assert left_out == 0.0
    assert counted > 0


rewards = st.lists(st.floats(0, 10).map(lambda value: round(value, 3)), min_size=2, max_size=12)


@pytest.mark.parametrize("rule", ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"])
@settings(deadline=None, max_examples=50)
@given(rewards, st.floats(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(rule: str, values: list[float], constant: float) -> None:
    if statistics.pstdev(values) < 0.01:  # there, what rounding leaves is divided by next to nothing
        return
    assert of(rule, [value + constant for value in values]) == pytest.approx(of(rule, values), abs=1e-6)


def test_what_a_rule_says_of_calls_is_not_blown_up_where_all_rollouts_earned_the_same() -> None:
    # the deviation of the rewards is 0 there, and says nothing of how the calls differ
    assert grpo([[0.25, -0.25], [0.0, 0.0]], [1.0, 1.0], [[0.0, 0.0], [0.0, 0.0]]) == [[0.25, -0.25], [0.0, 0.0]]
