"""Weights that follow how much is decided at a call's place."""

from __future__ import annotations

import pytest

import build
from agentlightning.algorithms.credit import Evidence
from agentlightning.algorithms.credit.decisive import decisive, decisiveness
from agentlightning.algorithms.credit.keys import answer_key
from agentlightning.training_types import Trajectory


def rollout(name: str, reward: float, *actions: int) -> Trajectory:
    calls = [build.transition(f"{name}/{place}", sampled_ids=[action]) for place, action in enumerate(actions)]
    return Trajectory(rollout_id=name, group_id=name[0], reward=reward, transitions=calls)


FIRST = [rollout("a0", 1, 5, 7), rollout("a1", 1, 5, 8), rollout("a2", 0, 6, 7), rollout("a3", 0, 6, 8)]
"""The first call decides, the second does not."""


def test_a_place_that_decides_all_has_1_and_one_that_decides_nothing_0() -> None:
    assert decisiveness([FIRST], answer_key) == {0: 1.0, 1: 0.0}


def test_the_share_that_chance_gives_is_taken_off() -> None:
    # actions 5, 5, 6: SSW = 0.5 with 1 degree of freedom, SST = 2/3 with 2: 1 - 0.5 / (1/3) < 0
    group = [rollout("a0", 1, 5), rollout("a1", 0, 5), rollout("a2", 0, 6)]
    assert decisiveness([group], answer_key) == {0: 0.0}
    # rewards 1, 0.5, 0, 0: SSW = 0.125 with 2, SST = 0.6875 with 3
    group = [rollout("a0", 1, 5), rollout("a1", 0.5, 5), rollout("a2", 0, 6), rollout("a3", 0, 6)]
    assert decisiveness([group], answer_key)[0] == pytest.approx(1 - (0.125 / 2) / (0.6875 / 3))


def test_credit_follows_the_weights_and_they_have_mean_1() -> None:
    [[first, *_, last]] = decisive([FIRST], Evidence())
    assert first.values == pytest.approx([1.9, 0.1])
    assert last.values == [0.0, 0.0]
    assert last.shares == pytest.approx([1.9, 0.1])


def test_an_earlier_step_counts_where_this_one_tells_nothing() -> None:
    silent = [rollout("b0", 1, 1, 2), rollout("b1", 1, 3, 4)]
    assert decisive([silent], Evidence())[0][0].shares == [1.0, 1.0]
    assert decisive([silent], Evidence(history=[FIRST]))[0][0].shares == pytest.approx([1.9, 0.1])


def test_actions_that_never_repeat_tell_nothing_and_leave_uniform_credit() -> None:
    group = [rollout("a0", 1, 1, 2), rollout("a1", 0, 3, 4), rollout("a2", 1, 5, 6)]
    assert decisive([group], Evidence())[0][0].shares == [1.0, 1.0]
