from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.algorithms.critic import bilevel_gae, gae


def test_two_actions_by_hand() -> None:
    # δ = [0 + 0.5 - 0.5, 1 + 0 - 0.5] = [0, 0.5]; Â_1 = 0.5, Â_0 = 0 + 0.5 × 0.5
    assert gae([0.0, 1.0], [0.5, 0.5], 1.0, 0.5) == ([0.25, 0.5], [0.75, 1.0])


def test_two_calls_by_hand() -> None:
    # outer, over the last tokens' values: δ = [0 + 0.5 × 0.5 - 0.5, 1 - 0.5] = [-0.25, 0.5], γλ = 0.5: [0, 0.5]
    # inner, call 1 of values [0.25, 0.5]: its return 0.5 at its end: δ = [0.5 - 0.25, 0.5 - 0.5] = [0.25, 0]
    advantages, returns = bilevel_gae([0.0, 1.0], [[0.25, 0.5], [0.5]], call_gamma=0.5)
    assert advantages == [[0.25, 0.0], [0.5]]
    assert returns == [[0.5, 0.5], [1.0]]


def test_a_call_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token in each call"):
        bilevel_gae([1.0], [[]])


calls = st.lists(
    st.tuples(st.floats(-1, 1), st.lists(st.floats(-1, 1), min_size=1, max_size=4)), min_size=1, max_size=5
)


@settings(deadline=None, max_examples=50)
@given(calls)
def test_without_discount_both_levels_are_one(drawn: list[tuple[float, list[float]]]) -> None:
    # γ = λ = 1: every token's advantage is what is still to come less its own value, whoever groups the tokens
    rewards, values = [reward for reward, _ in drawn], [tokens for _, tokens in drawn]
    flat_rewards = [value for reward, tokens in drawn for value in [0.0] * (len(tokens) - 1) + [reward]]
    flat, _ = gae(flat_rewards, [value for tokens in values for value in tokens])
    both, _ = bilevel_gae(rewards, values, call_gamma=1.0)
    assert [value for tokens in both for value in tokens] == pytest.approx(flat, abs=1e-9)
