"""GAE whose values are means over the group: by hand, and against rules that it is at its limits."""

from __future__ import annotations

import pytest
from credit_trajectories import trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.algorithms.credit import Credit
from agentlightning.algorithms.credit.grouped_gae import grouped_gae
from agentlightning.algorithms.credit.step_rewards import step_rewards


def values(found: list[Credit]) -> list[list[float]]:
    return [one.values for one in found]


def test_errors_of_later_calls_reach_back_by_lambda() -> None:
    group = [trajectory("a", 1.0, "xy"), trajectory("b", 0.0, "zy")]
    assert values(grouped_gae(group, lam=0.5, key=f"{__file__}:nothing")) == [[0.25, 0.5], [-0.25, -0.5]]


def test_a_state_that_several_rollouts_saw_has_the_mean_return_of_its_calls() -> None:
    # All begin in s. V(s) = 0.5, V(u) = (1 + 0) / 2, and v, which c alone saw, the mean of all second calls: 0.5. δ of a
    # is [0, 0.5]; rewards of c: [0, 0.5], V [0.5, 0.5]: δ [0, 0].
    group = [
        trajectory("a", 1.0, "12", states="su"),
        trajectory("b", 0.0, "34", states="su"),
        trajectory("c", 0.5, "56", states="sv"),
    ]
    by_prompt = f"{__file__}:last_token"
    assert values(grouped_gae(group, lam=0.5, key=by_prompt)) == [[0.25, 0.5], [-0.25, -0.5], [0.0, 0.0]]
    # with a step reward where c enters v: G of c = [1.5, 0.5], V(s) = 2.5 / 3, δ of its first call 1 + 0.5 - 2.5 / 3
    group[2] = trajectory("c", 0.5, "56", states="sv", steps=[1.0, 0.0])
    assert values(grouped_gae(group, lam=0.0, key=by_prompt))[2] == pytest.approx([2 / 3, 0.0])


def nothing(transition: object) -> object:
    """Of no state: every call is compared by its place."""
    return None


def last_token(transition: object) -> object:
    return transition.prompt_ids[-1]  # type: ignore[attr-defined]


rows = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.25, 1.0]),
        st.lists(st.sampled_from([0.0, -0.5, 0.25]), min_size=1, max_size=4),
    ),
    min_size=2,
    max_size=5,
)


@settings(deadline=None, max_examples=40)
@given(rows)
def test_with_lambda_1_and_no_states_it_is_step_rewards(given_rows: list[tuple[float, list[float]]]) -> None:
    group = [
        trajectory(f"r{place}", reward, "x" * len(steps), steps=steps)
        for place, (reward, steps) in enumerate(given_rows)
    ]
    found = grouped_gae(group, lam=1.0, key=f"{__file__}:nothing")
    for one, other in zip(found, step_rewards(group), strict=True):
        assert one.values == pytest.approx(other.values, abs=1e-9)
