"""Agreement with verl's core_algos of a KL in the reward and of GAE, and with RAGEN's of bi-level GAE.

The frozen numbers are those of verl at commit b178a3cd (torch 2.13.0, float64), computed for these very rewards;
test_reference_table.py has the advantages without a KL.
"""

from __future__ import annotations

import pytest

from agentlightning.algorithms.advantage import rewards_to_go, whiten_batch
from agentlightning.algorithms.critic import bilevel_gae, gae

GROUPS = [[1.0, 0.0, 0.25, 0.5], [0.3, 0.3, 0.9], [0.0, 0.0]]
LENGTHS = [3, 1, 2, 4, 1, 2, 5, 2, 3]
"""Tokens of each response."""
GAPS = [[((i * 7 + t * 3) % 5 - 1) / 10 for t in range(length)] for i, length in enumerate(LENGTHS)]
"""log(policy / reference) of each token."""
VERL_KL = [
    # compute_reinforce_plus_plus_outcome_advantage of rewards less 0.1 × kl_penalty "kl", by token
    [1.399902521, 1.3739365872, 1.4258684549],
    [-1.1966908638],
    [-0.6254403191, -0.5475425176],
    [0.0496739609, 0.0496739609, 0.1275717625, 0.1535376963],
    [-0.4436787822],
    [-0.4177128484, -0.4436787822],
    [1.0363794471, 1.062345381, 1.0363794471, 1.0883113148, 1.0883113148],
    [-1.2745886653, -1.1966908638],
    [-1.2745886653, -1.2745886653, -1.1966908638],
]
TOKEN_REWARDS, VALUES = [0.0, 0.0, 0.5, 0.0, 1.0], [0.1, 0.2, 0.3, 0.4, 0.5]


@pytest.mark.parametrize("calls", [1, 2])
def test_a_kl_in_the_reward_gives_each_token_the_advantage_of_verl(calls: int) -> None:
    """A response of two calls is one of the same tokens."""
    rewards = [reward for group in GROUPS for reward in group]
    cut = [[gaps] if calls == 1 else [gaps[:1], gaps[1:]] for gaps in GAPS]
    penalties = [[[0.1 * gap for gap in call] for call in response] for response in cut]
    values = rewards_to_go([[reward] * calls for reward in rewards], penalties)
    white = whiten_batch(values, [[len(call) for call in response] for response in cut])
    found = [[number for call in response for number in call] for response in white]  # type: ignore[union-attr]
    assert [number for row in found for number in row] == pytest.approx(
        [number for row in VERL_KL for number in row], abs=1e-6
    )


def test_returns_are_those_of_verl() -> None:
    # compute_gae_advantage_return with gamma 0.9, lam 0.8; it whitens its advantages, so its returns are compared
    _, returns = gae(TOKEN_REWARDS, VALUES, 0.9, 0.8)
    assert returns == pytest.approx([0.67373568, 0.885744, 1.1552, 0.81, 1.0], abs=1e-6)


def test_bilevel_advantages_are_those_of_ragen() -> None:
    # RAGEN's compute_bi_level_gae_advantage_return before it whitens: gamma 0.9, lam 0.8, high_level_gamma 0.95
    advantages, returns = bilevel_gae([0.5, 1.0], [VALUES[:3], VALUES[3:]], gamma=0.9, call_gamma=0.95, lam=0.8)
    assert [value for call in advantages for value in call] == pytest.approx([0.677312, 0.8296, 1.055, 0.41, 0.5])
    assert [value for call in returns for value in call] == pytest.approx([0.777312, 1.0296, 1.355, 0.81, 1.0])
