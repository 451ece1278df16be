"""variance_top_p: only the groups whose rewards differ most are learned from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.step_stats import most_varied
from agentlightning.errors import ConfigError
from agentlightning.training_types import Trajectory, Transition


def group(name: str, *rewards: float, step: float = 0.0) -> list[Trajectory]:
    return [
        Trajectory(
            rollout_id=f"{name}{place}",
            group_id=name,
            reward=reward,
            transitions=[
                Transition(
                    call_id=f"{name}{place}",
                    suffix_ids=[1],
                    sampled_ids=[2],
                    logprobs=[-1.0],
                    versions=[],
                    reward=step * place,
                )
            ],
        )
        for place, reward in enumerate(rewards)
    ]


GROUPS = [group("a", 1, 0), group("b", 1, 1), group("c", 1, 1, 1, 0), group("d", 0.5, 0)]
"""Variances 0.25, 0, 0.1875 and 0.0625."""


def names(groups: list[list[Trajectory]]) -> str:
    return "".join(one[0].group_id for one in groups)


def test_as_few_groups_are_kept_as_hold_the_share() -> None:
    kept = {share: names(most_varied(GROUPS, share, False)) for share in (0.5, 0.51, 0.875, 0.9, 1.0)}
    assert kept == {0.5: "a", 0.51: "ac", 0.875: "ac", 0.9: "acd", 1.0: "acd"}


def test_step_rewards_count_where_they_are_read() -> None:
    assert names(most_varied([group("a", 1, 1, step=1.0), group("b", 1, 0)], 0.5, True)) == "a"
    assert names(most_varied([group("a", 1, 1, step=1.0), group("b", 1, 0)], 0.5, False)) == "b"


def test_a_plan_trains_what_is_kept_and_reports_on_all() -> None:
    plan = LightningRL(variance_top_p=0.8, minibatches=1).plan(GROUPS, seed=0)
    assert {row.rollout_id[0] for rows in plan.minibatches for row in rows} == {"a", "c"}
    assert {plan.outcomes[key] for key in ("b0", "d0", "d1")} == {"zero_variance"}
    assert (plan.outcomes["a0"], plan.stats["kept_groups"]) == ("trained", 0.5)
    assert plan.stats["reward_mean"] == LightningRL().plan(GROUPS, seed=0).stats["reward_mean"]
    # the rollouts that are left out count in no weight
    assert sum(sum(row.weights) for row in plan.minibatches[0]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"group_size": 1, "advantage": "reinforce", "loss": "reinforce", "minibatches": 1},
            "has no effect with group_size",
        ),
        ({"dynamic_sampling": True}, "conflicts with dynamic_sampling"),
        ({"credit": "judge"}, "conflicts with credit = 'judge'"),
    ],
)
def test_it_is_refused_where_it_cannot_work(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.variance_top_p: {sentence}"):
        LightningRL(variance_top_p=0.9, **settings)


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), max_size=6),
    st.floats(0, 1, exclude_min=True),
)
def test_no_group_that_is_left_out_varies_more_than_one_that_is_kept(rewards: list[list[float]], share: float) -> None:
    groups = [group(f"g{place}-", *of_group) for place, of_group in enumerate(rewards)]
    kept = most_varied(groups, share, False)
    names_kept = {one[0].group_id for one in kept}
    spread = {
        one[0].group_id: sum((each.reward - sum(t.reward for t in one) / len(one)) ** 2 for each in one) / len(one)
        for one in groups
    }
    assert all(spread[name] > 0 for name in names_kept)
    for name, value in spread.items():
        assert name in names_kept or all(value <= spread[other] + 1e-12 for other in names_kept)
