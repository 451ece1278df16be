"""Each rule by hand, and what holds for all of them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from credit_trajectories import trajectory
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.credit import CREDIT, Credit, Evidence
from agentlightning.algorithms.credit.step_rewards import returns_to_go
from agentlightning.training_types import Trajectory


def credit(name: str, group: list[Trajectory], **settings: Any) -> list[Credit]:
    rule = CREDIT[name]
    [found] = rule.credits(
        [group], Evidence(scores={one.rollout_id: one.reward for one in group}), rule.settings(settings)
    )
    return found


def values(name: str, group: list[Trajectory], **settings: Any) -> list[list[float]]:
    return [one.values for one in credit(name, group, **settings)]


def advantages(name: str, group: list[Trajectory], **settings: Any) -> list[list[float]]:
    """Under dr_grpo, so that numbers stay in units of the reward."""
    part: Any = {"type": name, **settings}
    return LightningRL(credit=part, advantage="dr_grpo").advantages(group)


def by_two_agents(*rows: tuple[str, float]) -> list[Trajectory]:
    return [trajectory(f"r{at}", reward, row, agents="AB", states="00") for at, (row, reward) in enumerate(rows)]


@pytest.mark.parametrize(
    ("name", "settings", "group", "expected"),
    [
        ("uniform", {}, [trajectory("a", 0.5, "xyz")], [[0.5, 0.5, 0.5]]),
        ("last", {}, [trajectory("a", 1.0, "xyz"), trajectory("b", 0.0, "x")], [[0.0, 0.0, 1.0], [0.0]]),
        ("discounted", {"gamma": 0.5}, [trajectory("a", 1.0, "xyz")], [[0.25, 0.5, 1.0]]),
        (  # agent A decides: 1 earns 1, 2 earns 0, whatever B does
            "counterfactual",
            {},
            by_two_agents(("11", 1.0), ("12", 1.0), ("21", 0.0), ("22", 0.0)),
            [[0.5, 0.0], [0.5, 0.0], [-0.5, 0.0], [-0.5, 0.0]],
        ),
        (  # of the third, nobody else did what A or B did: both are compared over the whole group, 0 with a mean of 2 / 3
            "counterfactual",
            {},
            by_two_agents(("11", 1.0), ("12", 1.0), ("23", 0.0)),
            [[1 / 3, 0.0], [1 / 3, 0.0], [-2 / 3, -2 / 3]],
        ),
        (  # B did not take part in the second
            "counterfactual",
            {},
            [trajectory("a", 1.0, "12", agents="AB"), trajectory("b", 0.0, "1", agents="A")],
            [[0.0, 0.5], [0.0]],
        ),
    ],
)
def test_the_credit_of_each_call_by_hand(
    name: str, settings: dict[str, Any], group: list[Trajectory], expected: list[list[float]]
) -> None:
    assert values(name, group, **settings) == [pytest.approx(row) for row in expected]


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [("last", {}, [[0.0, 0.5], [-0.5]]), ("discounted", {"gamma": 0.5}, [[0.25, 0.5], [-0.5]])],
)
def test_a_baseline_is_shared_out_as_the_credit_is(
    name: str, settings: dict[str, Any], expected: list[list[float]]
) -> None:
    assert advantages(name, [trajectory("a", 1.0, "xy"), trajectory("b", 0.0, "x")], **settings) == expected


def test_step_rewards_compare_what_was_still_earned_from_a_call_on() -> None:
    group = [trajectory("a", 0.0, "xy", steps=[1.0, 0.0]), trajectory("b", 0.0, "zy", steps=[0.0, 0.0])]
    assert advantages("step_rewards", group) == [[0.5, 0.0], [-0.5, 0.0]]


def test_a_final_reward_that_the_steps_add_up_to_counts_once() -> None:
    group = [trajectory("a", 1.0, "xy", steps=[0.75, 0.25]), trajectory("b", 0.25, "z", steps=[0.25])]
    # means of the calls: (1 + .25) / 2, and .25 / 2, since the rollout that ended earned nothing more
    assert advantages("step_rewards", group, final=0.0) == [[0.375, 0.125], [-0.375]]
    assert [one.score for one in credit("step_rewards", group, final=0.0)] == [1.0, 0.25]


def test_a_rollout_that_ended_keeps_its_final_reward_in_later_means() -> None:
    group = [trajectory("a", 1.0, "x"), trajectory("b", 0.0, "xy")]
    assert advantages("step_rewards", group) == [[0.5], [-0.5, -0.5]]


def test_gigpo_compares_calls_of_one_state_by_hand() -> None:
    group = [trajectory("a", 1.0, "x"), trajectory("b", 0.0, "y")]
    assert [one.bonus for one in credit("gigpo", group)] == [
        pytest.approx([0.5**0.5], abs=1e-5),
        pytest.approx([-(0.5**0.5)], abs=1e-5),
    ]


def test_gigpo_steps_are_those_of_its_authors(monkeypatch: pytest.MonkeyPatch) -> None:
    # gigpo_step_norm_reward of RAGEN's copy of verl-agent, epsilon 1e-6, discounted returns with γ = 0.9
    monkeypatch.setattr(sys.modules["agentlightning.algorithms.credit.gigpo"], "GAMMA", 0.9)
    group = [
        trajectory("a", 1.0, "123", states="sab"),
        trajectory("b", 0.0, "45", states="sa"),
        trajectory("c", 0.5, "678", states="sbs"),
    ]
    steps = [value for one in credit("gigpo", group) for value in one.bonus or []]
    assert steps == pytest.approx(
        [1.1412066, 0.7071057, 0.7071050, -1.2833898, -0.7071057, -0.0710916, -0.7071050, 0.2132747], abs=1e-6
    )


ALL = sorted(CREDIT)
BY_ROLLOUT = [name for name in ALL if name not in ("gigpo", "learned")]
"""gigpo compares calls of one state, learned spreads a rollout's reward over its calls."""
groups = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 1.0]), st.text("xyz", min_size=1, max_size=4), st.booleans()),
    min_size=2,
    max_size=6,
)


def drawn(rows: list[tuple[float, str, bool]]) -> list[Trajectory]:
    return [
        trajectory(f"r{index}", reward, actions, steps=[0.5 * step] * len(actions))
        for index, (reward, actions, step) in enumerate(rows)
    ]


def trained(name: str, group: list[Trajectory]) -> list[list[float]]:
    algorithm = LightningRL(rollouts="tree") if name == "tree" else LightningRL(credit=name)
    plan = algorithm._advantages([group], Evidence(scores={one.rollout_id: one.reward for one in group}))
    return [list(plan[one.rollout_id].advantages) for one in group]


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=30)
@given(groups, st.randoms(use_true_random=False))
def test_the_order_of_rollouts_does_not_matter(name: str, rows: list[tuple[float, str, bool]], random: Any) -> None:
    group = drawn(rows)
    other = list(group)
    random.shuffle(other)
    one = dict(zip([member.rollout_id for member in group], trained(name, group), strict=True))
    for member, row in zip(other, trained(name, other), strict=True):
        assert row == pytest.approx(one[member.rollout_id], abs=1e-6)


@pytest.mark.parametrize("name", [name for name in ALL if name != "gigpo"])  # whose returns are discounted
@settings(deadline=None, max_examples=30)
@given(groups, st.floats(-5, 5))
@example([(0.0, "x", False), (0.25, "xx", False), (0.25, "xx", False), (0.25, "xy", False)], 3.4049767349229)
def test_a_constant_added_to_all_rewards_changes_no_advantage(
    name: str, rows: list[tuple[float, str, bool]], constant: float
) -> None:
    one = trained(name, drawn(rows))
    other = trained(name, drawn([(reward + constant, actions, step) for reward, actions, step in rows]))
    for first, second in zip(one, other, strict=True):
        assert second == pytest.approx(first, abs=1e-4)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_nothing_is_learned_from_rollouts_that_are_all_alike(name: str, reward: float) -> None:
    group = [trajectory(f"r{index}", reward, "xy") for index in range(4)]
    for row in trained(name, group):
        assert row == pytest.approx([0.0, 0.0], abs=1e-6)


def test_returns_to_go_are_discounted_once_a_call() -> None:
    assert returns_to_go(trajectory("a", 1.0, "xyz", steps=[0.5, 0.0, 0.0]), 0.5) == [0.75, 0.5, 1.0]


def test_gigpo_adds_nothing_to_a_call_that_nobody_else_made() -> None:
    group = [trajectory("a", 1.0, "12", states="su"), trajectory("b", 0.0, "34", states="sv")]
    assert [(one.bonus or [])[1] for one in credit("gigpo", group)] == [0.0, 0.0]


@pytest.mark.parametrize("name", BY_ROLLOUT)
def test_what_a_rollout_earned_does_not_grow_with_its_calls(name: str) -> None:
    """One agent of few words and one of many, with equal rewards: neither moves the other's baseline by its length."""
    short = [trajectory("a", 1.0, "x"), trajectory("b", 0.0, "y")]
    long = [trajectory("a", 1.0, "xzzz"), trajectory("b", 0.0, "y")]
    assert trained(name, long)[1] == pytest.approx(trained(name, short)[1])
