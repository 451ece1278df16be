"""Values on a graph of states, and the credit of calls that lead from one to another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from credit_trajectories import trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.algorithms.credit import Evidence
from agentlightning.algorithms.credit.graph_td import graph_td
from agentlightning.algorithms.credit.keys import observation_key
from agentlightning.algorithms.credit.state_graph import END, StateGraph, path_of
from agentlightning.training_types import Trajectory, Transition

FORK = [trajectory("a", 1.0, "1x", states="AB"), trajectory("b", 0.0, "2x", states="AC")]
"""From A to B and reward 1, or to C and reward 0."""
KEY = f"{__file__}:state"


def state(transition: Transition) -> str:
    """The letter of the state."""
    return chr(transition.prompt_ids[-1])


def values(groups: list[list[Trajectory]], graph: StateGraph | None = None, **given: float) -> list[list[float]]:
    evidence = Evidence() if graph is None else Evidence(graph=graph)
    return [one.values for rows in graph_td(groups, evidence, key=KEY, **given) for one in rows]


def test_the_call_that_leads_to_the_better_state_gets_the_credit() -> None:
    assert values([FORK], prior=0.0) == [[0.5, 0.0], [-0.5, 0.0]]


def test_a_state_seen_once_is_drawn_to_what_led_to_it() -> None:
    # V(B) = (1 × 1 + 1 × V(A)) / 2 = 0.75, V(C) = 0.25
    assert values([FORK], prior=1.0) == [[0.25, 0.25], [-0.25, -0.25]]


def test_step_rewards_and_a_discount_are_part_of_the_values() -> None:
    # V(B) = 1, V(A) = 0.5 × ((0.25 + 0.5 × 1) + 0.5 × 0) = 0.375
    group = [trajectory("a", 1.0, "1x", states="AB", steps=[0.25, 0.0]), FORK[1]]
    assert values([group], prior=0.0, gamma=0.5) == [[0.375, 0.0], [-0.375, 0.0]]


def test_a_loop_is_worth_what_follows_it() -> None:
    # a goes round A -> A -> end: V(A) = (V(A) + 1 + 0) / 3 = 0.5
    group = [trajectory("a", 1.0, "11", states="AA"), trajectory("b", 0.0, "2", states="A")]
    for row, expected in zip(values([group], prior=0.0), ([0.0, 0.5], [-0.5]), strict=True):
        assert row == pytest.approx(expected, abs=1e-9)


def test_a_loop_of_long_ago_is_worth_no_more_than_anything_was() -> None:
    loop = trajectory("l", 1.0, "x" * 22, states="s" + "ab" * 10 + "c")
    graph = StateGraph().with_groups([[loop]], state)
    now = [trajectory("n", 1.0, "xx", states="sc"), trajectory("m", 0.0, "xy", states="sd")]
    for _ in range(60):
        graph = graph.with_groups([now], state, 0.9)
    assert all(0.0 <= value <= 1.0 for value in graph.values(0.9, 1.0).values())


def test_earlier_steps_tell_what_a_state_is_worth() -> None:
    earlier = StateGraph().with_groups([FORK], state)
    alone = [[trajectory("c", 1.0, "1x", states="AB")]]
    assert values(alone, prior=0.0) == [[0.0, 0.0]]
    # earlier visits count 0.5: V(A) = (1 + 0.5) / 2, V(B) = 1
    assert values(alone, earlier, prior=0.0, forget=0.5) == [[0.25, 0.0]]
    assert values(alone, earlier, prior=0.0, forget=0.0) == [[0.0, 0.0]]


def test_a_graph_has_the_most_visited_states_and_no_dead_ends() -> None:
    more = [trajectory(f"r{place}", 1.0, "1", states="A") for place in range(3)]
    graph = StateGraph().with_groups([FORK, more], state)
    a, b, _ = path_of(FORK[0], state)
    _, c, _ = path_of(FORK[1], state)
    assert set(graph.edges) == {a, b, c}
    assert graph.edges[a] == {b: (1.0, 0.0), c: (1.0, 0.0), END: (3.0, 1.0)}
    assert graph.bounded(1).edges == {a: {END: (3.0, 1.0)}}
    assert len(graph.bounded(2).edges) == 2
    # without A's own ends, A would lead nowhere but to B and C
    assert StateGraph().with_groups([FORK], state).bounded(1).edges == {}


def test_a_state_that_nobody_comes_to_is_forgotten() -> None:
    graph = StateGraph().with_groups([FORK], state)
    for _ in range(80):
        graph = graph.with_groups([], state, 0.9)
    assert graph.edges == {}


def test_by_default_a_state_is_the_task_and_the_last_observation() -> None:
    first, second = trajectory("a", 1.0, "xy").transitions
    observed = replace(second, messages=[{"role": "tool", "content": "no  such\ntable", "tool_call_id": "call_1"}])
    again = replace(second, messages=[{"role": "tool", "content": "no such table", "tool_call_id": "call_2"}])
    other = replace(second, messages=[{"role": "tool", "content": "3 rows", "tool_call_id": "call_1"}])
    assert observation_key(observed) == observation_key(again) != observation_key(other)
    assert observation_key(first) != observation_key(observed)
    assert observation_key(replace(first, agent="writer")) != observation_key(first)
    bare = replace(first, messages=[])
    assert observation_key(bare) != observation_key(replace(bare, suffix_ids=[1]))


rows = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.25, 1.0]),
        st.lists(st.tuples(st.sampled_from("ABCD"), st.sampled_from([0.0, -0.5])), min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=60)
@given(rows, st.sampled_from([0.0, 1.0, 3.0]))
def test_the_credits_of_a_rollout_add_up_to_its_reward_less_the_value_it_began_with(
    drawn: list[tuple[float, list[tuple[str, float]]]], prior: float
) -> None:
    group = [
        trajectory(
            f"r{place}",
            reward,
            "x" * len(calls),
            states="".join(letter for letter, _ in calls),
            steps=[step for _, step in calls],
        )
        for place, (reward, calls) in enumerate(drawn)
    ]
    worth = StateGraph().with_groups([group], state).values(1.0, prior)
    for one, credit in zip(group, graph_td([group], Evidence(), key=KEY, prior=prior)[0], strict=True):
        earned = one.reward + sum(call.reward for call in one.transitions)
        assert sum(credit.values) == pytest.approx(earned - worth[path_of(one, state)[0]], abs=1e-6)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text("ABCD", min_size=1, max_size=4), min_size=1, max_size=6))
def test_equal_rewards_leave_no_credit(paths: list[str]) -> None:
    group = [trajectory(f"r{place}", 0.25, "x" * len(path), states=path) for place, path in enumerate(paths)]
    for row in values([group]):
        assert row == pytest.approx([0.0] * len(row), abs=1e-6)
