"""A call that rollouts of a tree share is trained once, with the mean of the advantages that they would have."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from credit_trajectories import trajectory
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.algorithms import LightningRL
from agentlightning.algorithms.advantage import grpo
from agentlightning.algorithms.credit.tree import RolloutTree, tree, trees_of
from agentlightning.training_types import Trajectory

TREE = LightningRL(group_size=3, minibatches=1, rollouts=RolloutTree(roots=1))
PLAIN = replace(TREE, advantage="dr_grpo")


def fork(name: str, of: Trajectory, calls: int, reward: float, actions: str) -> Trajectory:
    """A rollout that repeats the first calls of another, replayed ones included, and goes on by itself."""
    path = [*of.replayed, *(call.call_id for call in of.transitions)][:calls]
    return replace(trajectory(name, reward, actions), replayed={f"{name}/of/{one}": one for one in path})


A = trajectory("a", 1.0, "xyz")
B = fork("b", A, 1, 0.0, "uv")
C = trajectory("c", 0.0, "w")


def test_a_call_gets_its_value_compared_with_its_tree_and_with_its_group() -> None:
    found = PLAIN.advantages([A, B, C])
    assert found == [
        pytest.approx([1 / 6, 7 / 6, 7 / 6]),  # the first is worth 1/2: 1/2 - 1/3 of the group, 1/2 - 1/2 of the tree
        pytest.approx([-5 / 6, -5 / 6]),
        pytest.approx([-1 / 3]),
    ]


def test_each_comparison_is_divided_by_the_deviation_of_its_own_returns() -> None:
    found = TREE.advantages([A, B, C])
    group, within = statistics.stdev([1, 0, 0]) + 1e-4, statistics.stdev([1, 0]) + 1e-4
    assert found[0] == pytest.approx([1 / 6 / group, *[2 / 3 / group + 1 / 2 / within] * 2])
    assert found[1] == pytest.approx([-1 / 3 / group - 1 / 2 / within] * 2)
    assert found[2] == pytest.approx([-1 / 3 / group])


def test_forks_of_forks_share_what_these_had_replayed() -> None:
    again = fork("d", B, 2, 1.0, "s")  # after b's first own call
    assert [list(one.values) for one in tree([A, B, again])] == [
        pytest.approx([2 / 3, 1.0, 1.0]),
        pytest.approx([0.5, 0.0]),
        [1.0],
    ]


def test_a_fork_whose_replay_ended_at_once_is_a_tree_of_its_own() -> None:
    assert len(set(trees_of([A, B, C]).values())) == 2
    fresh = replace(B, replayed={})
    assert len(set(trees_of([A, fresh, C]).values())) == 3
    assert PLAIN.advantages([A, fresh, C])[0] == pytest.approx([2 / 3] * 3)


def test_rollouts_are_one_tree_though_the_one_that_they_fork_is_not_learned_from() -> None:
    other = fork("e", A, 2, 1.0, "t")
    numbers = trees_of([B, other])
    assert numbers["b"] == numbers["e"]
    assert PLAIN.advantages([B, other]) == [[-1.0, -1.0], [1.0]]


@st.composite
def forests(draw: st.DrawFn) -> list[Trajectory]:
    rewards = st.sampled_from([0.0, 0.5, 1.0])
    group: list[Trajectory] = []
    for number in range(draw(st.integers(2, 8))):
        actions = "x" * draw(st.integers(1, 3))
        parent = draw(st.sampled_from([None, *group]))
        if parent is None:
            group.append(trajectory(f"r{number}", draw(rewards), actions))
        else:
            calls = draw(st.integers(0, len(parent.replayed) + len(parent.transitions) - 1))
            group.append(fork(f"r{number}", parent, calls, draw(rewards), actions))
    return draw(st.permutations(group))


def path(one: Trajectory, group: list[Trajectory]) -> list[str]:
    """The calls of a rollout as they were sampled, found by going from fork to fork."""
    origins = {mine: before for each in group for mine, before in each.replayed.items()}
    found = [*one.replayed, *(call.call_id for call in one.transitions)]
    while any(each in origins for each in found):
        found = [origins.get(each, each) for each in found]
    return found


@given(forests())
def test_a_calls_advantage_is_the_mean_of_those_that_the_paper_gives_it_in_each_rollout_that_shares_it(
    group: list[Trajectory],
) -> None:
    """And so, over all rollouts, it adds up to the paper's gradient with each call weighed once."""
    found = {
        call.call_id: advantage
        for one, row in zip(group, TREE.advantages(group), strict=True)
        for call, advantage in zip(one.transitions, row, strict=True)
    }
    numbers = trees_of(group)
    rewards = [one.reward for one in group]
    inter = dict(zip([one.rollout_id for one in group], grpo([[r] for r in rewards], rewards), strict=True))
    sharing: dict[str, list[float]] = {}
    for one in group:
        members = [each for each in group if numbers[each.rollout_id] == numbers[one.rollout_id]]
        [[intra]] = [
            row
            for each, row in zip(
                members, grpo([[each.reward] for each in members], [each.reward for each in members]), strict=True
            )
            if each is one
        ]
        for call_id in path(one, group):
            sharing.setdefault(call_id, []).append(inter[one.rollout_id][0] + intra)
    assert found.keys() == sharing.keys()
    for call_id, advantages in sharing.items():
        assert found[call_id] == pytest.approx(statistics.fmean(advantages), abs=1e-9)


@given(forests(), st.integers(0, 3))
def test_each_sampled_call_is_trained_once_an_epoch_and_a_tree_stays_together(
    group: list[Trajectory], seed: int
) -> None:
    plan = replace(TREE, kl=0.1, minibatches=2).plan([group], seed)  # with a KL all calls are trained
    rows = [row for minibatch in plan.minibatches for row in minibatch]
    trained = [call_id for row in rows for call_id in row.calls]
    assert sorted(trained) == sorted(call.call_id for one in group for call in one.transitions)
    numbers = trees_of(group)
    order = [numbers[row.rollout_id] for row in rows]
    assert sum(one != other for one, other in pairwise(order)) == len(set(order)) - 1


def test_trees_bring_their_credit_and_a_form_along() -> None:
    one = LightningRL(rollouts="tree")
    assert (one.rule.name, one.tree) == ("tree", RolloutTree(roots=2, rounds=1))
    assert replace(one, minibatches=2).rule.name == "tree"
