from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.algorithms.advantage import ADVANTAGES, grpo


def test_grpo_of_one_success_in_four() -> None:
    # mean 0.25, sample deviation 0.5
    advantages = grpo([[1.0, 1.0], [0.0], [0.0], [0.0]], [1.0, 0.0, 0.0, 0.0])
    assert advantages == [pytest.approx([1.5, 1.5], abs=1e-3), *[pytest.approx([-0.5], abs=1e-3)] * 3]


def test_grpo_without_the_deviation_subtracts_the_mean() -> None:
    assert grpo([[1.0], [0.0], [0.0], [0.0]], [1.0, 0.0, 0.0, 0.0], False) == [[0.75], [-0.25], [-0.25], [-0.25]]


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7, 1.0, -3.3])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero(reward: float, size: int) -> None:
    assert grpo([[reward, reward]] * size, [reward] * size) == [[0.0, 0.0]] * size


def test_a_rollout_with_more_calls_weighs_no_more() -> None:
    few = grpo([[1.0], [0.0]], [1.0, 0.0])
    many = grpo([[1.0] * 9, [0.0]], [1.0, 0.0])
    assert many == [few[0] * 9, few[1]]


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=16))
def test_grpo_agrees_with_numpy(rewards: list[float]) -> None:
    values = np.array(rewards)
    expected = (values - values.mean()) / (values.std(ddof=1) + 1e-4)
    got = ADVANTAGES["grpo"]([[reward] for reward in rewards], rewards, True)
    np.testing.assert_allclose(np.array(got)[:, 0], expected, rtol=1e-6, atol=1e-6)
