"""Each rule by hand, and what holds for all of them."""

from __future__ import annotations

import math
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


def test_uniform_gives_every_call_the_reward() -> None:
    assert values("uniform", [trajectory("a", 0.5, "xyz")]) == [[0.5, 0.5, 0.5]]


def test_last_leaves_the_earlier_calls_alone() -> None:
    group = [trajectory("a", 1.0, "xyz"), trajectory("b", 0.0, "x")]
    assert values("last", group) == [[0.0, 0.0, 1.0], [0.0]]
    assert advantages("last", group) == [[0.0, 0.0, 0.5], [-0.5]]


def test_discounted_halves_credit_with_each_call_before_the_end() -> None:
    group = [trajectory("a", 1.0, "xyz"), trajectory("b", 0.0, "xy")]
    assert values("discounted", group, gamma=0.5) == [[0.25, 0.5, 1.0], [0.0, 0.0]]
    assert advantages("discounted", group, gamma=0.5) == [[0.125, 0.25, 0.5], [-0.25, -0.5]]


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


def test_counterfactual_credits_the_agent_that_made_the_difference() -> None:
    # agent A decides: 1 earns 1, 2 earns 0, whatever B does
    group = [
        trajectory(f"r{index}", reward, actions, agents="AB", states="00")
        for index, (actions, reward) in enumerate([("11", 1.0), ("12", 1.0), ("21", 0.0), ("22", 0.0)])
    ]
    assert values("counterfactual", group) == [[0.5, 0.0], [0.5, 0.0], [-0.5, 0.0], [-0.5, 0.0]]


def test_counterfactual_leaves_the_others_free_where_nothing_matches() -> None:
    # B never did the same with two actions of A: A's actions are compared over the whole group, 1: (1 + 1) / 2, mean 2 / 3
    group = [
        trajectory(f"r{index}", reward, actions, agents="AB", states="00")
        for index, (actions, reward) in enumerate([("11", 1.0), ("12", 1.0), ("23", 0.0)])
    ]
    assert values("counterfactual", group)[0] == [pytest.approx(1 / 3), 0.0]
    assert values("counterfactual", group)[2][0] == pytest.approx(-2 / 3)


def test_counterfactual_of_actions_that_are_all_different_is_the_groups_own() -> None:
    group = [trajectory("a", 1.0, "1"), trajectory("b", 0.0, "2"), trajectory("c", 0.5, "3")]
    assert values("counterfactual", group) == [[0.5], [-0.5], [0.0]]


def test_counterfactual_of_an_agent_that_did_not_take_part() -> None:
    group = [trajectory("a", 1.0, "12", agents="AB"), trajectory("b", 0.0, "1", agents="A")]
    assert values("counterfactual", group) == [[0.0, 0.5], [0.0]]


def test_judge_takes_the_scores_for_rewards() -> None:
    rule = CREDIT["judge"]
    group = [trajectory("a", 0.0, "xy"), trajectory("b", 1.0, "z")]
    evidence = Evidence(scores={"a": 0.9, "b": 0.1})
    [[first, second]] = rule.credits([group], evidence, rule.settings({}))
    assert (first.values, first.score, second.values) == ([0.9, 0.9], 0.9, [0.1])


ALL = sorted(CREDIT)
SHIFTED = [name for name in ALL if name != "gigpo"]
"""gigpo compares discounted returns, and a constant in them is discounted, too."""
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


@pytest.mark.parametrize("name", SHIFTED)
@settings(deadline=None, max_examples=30)
@given(groups, st.floats(-5, 5))
@example([(0.0, "x", False), (0.25, "xx", False), (0.25, "xx", False), (0.25, "xy", False)], 3.4049767349229)
def test_a_constant_added_to_all_rewards_changes_no_advantage(
    name: str, rows: list[tuple[float, str, bool]], constant: float
) -> None:
    if (
        name == "gigpo"
    ):  # its returns are discounted, and so are constants in them; its anchors are compared undiscounted
        return
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


KILL_SWITCHES: list[tuple[str, list[Trajectory]]] = [
    ("last", [trajectory("a", 1.0, "xy"), trajectory("b", 0.0, "zy")]),
    ("discounted", [trajectory("a", 1.0, "xy"), trajectory("b", 0.0, "zy")]),
    ("step_rewards", [trajectory("a", 1.0, "xy", steps=[1.0, 0.0]), trajectory("b", 0.0, "zy", steps=[0.0, 0.5])]),
    ("gigpo", [trajectory("a", 1.0, "xy", states="su"), trajectory("b", 0.0, "zy", states="sv")]),
    (
        "counterfactual",
        [trajectory("a", 1.0, "11", agents="AB"), trajectory("b", 0.0, "21", agents="AB")],
    ),
    (
        "learned",
        [
            trajectory("a", 1.0, "11"),
            trajectory("b", 0.0, "21"),
            trajectory("c", 1.0, "12"),
            trajectory("d", 0.0, "22"),
        ],
    ),
]


@pytest.mark.parametrize(("name", "group"), KILL_SWITCHES)
def test_each_rule_tells_calls_apart_that_uniform_credit_does_not(name: str, group: list[Trajectory]) -> None:
    assert trained(name, group) != trained("uniform", group)
    assert any(not math.isclose(row[0], row[-1], abs_tol=1e-6) for row in trained(name, group))


@pytest.mark.parametrize(("name", "settings"), [("discounted", {"gamma": 1.0}), ("step_rewards", {})])
def test_at_its_limit_a_rule_is_uniform_credit(name: str, settings: dict[str, Any]) -> None:
    group = [trajectory("a", 1.0, "xyz"), trajectory("b", 0.0, "x"), trajectory("c", 0.5, "yy")]
    for one, other in zip(advantages(name, group, **settings), advantages("uniform", group), strict=True):
        assert one == pytest.approx(other)


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
