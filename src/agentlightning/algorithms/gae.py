"""Advantages from a critic: generalised advantage estimation over the tokens of a call, over calls, and over both.

Pure functions of rewards and of values that are given: an engine with a value head drives them. Values and rewards
have one entry per *sampled* token; what the agent put between two calls is no action and has none.
"""

from __future__ import annotations

from collections.abc import Sequence


def gae(
    rewards: Sequence[float], values: Sequence[float], gamma: float = 1.0, lam: float = 1.0, after: float = 0.0
) -> tuple[list[float], list[float]]:
    """Advantages and returns (the critic's targets), one each per action.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation" (arXiv 1506.02438),
    equations 11 and 16: δ_t = r_t + γ V_{t+1} - V_t, Â_t = δ_t + γλ Â_{t+1}; `after` is the value that follows the last
    action, 0 where the episode ended. Rewards [0, 1], values [0.5, 0.5], γ = 1, λ = 0.5: δ = [0, 0.5], Â = [0.25, 0.5].
    """
    advantages = [0.0] * len(rewards)
    running, following = 0.0, after
    for place in range(len(rewards) - 1, -1, -1):
        delta = rewards[place] + gamma * following - values[place]
        running = delta + gamma * lam * running
        advantages[place] = running
        following = values[place]
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def bilevel_gae(
    rewards: Sequence[float],
    values: Sequence[Sequence[float]],
    *,
    gamma: float = 1.0,
    call_gamma: float = 0.95,
    lam: float = 1.0,
) -> tuple[list[list[float]], list[list[float]]]:
    """Advantages and returns by call and token: GAE over calls, then GAE over the tokens of each call.

    Wang et al. 2025, "VAGEN" (arXiv 2510.16907), bi-level GAE, first in RAGEN (arXiv 2504.20073): a call is one
    action of the outer process, discounted by `call_gamma`, with the value of its last token; its return becomes the
    reward of that token, and within the call tokens are discounted by `gamma`. The discount so counts calls, not how
    many words they took.

    `rewards` holds one reward per call (the final one in the last), `values` one value per call and token. Two calls
    of one token with rewards [0, 1], values [0.5, 0.5], call_gamma = λ = 1: the outer advantages are [0.5, 0.5], and
    so the tokens'.
    """
    if not all(values):
        raise ValueError("values: expected at least one token in each call")
    outer, _ = gae(rewards, [tokens[-1] for tokens in values], call_gamma, lam)
    advantages, returns = [], []
    for advantage, tokens in zip(outer, values, strict=True):
        inside = [0.0] * (len(tokens) - 1) + [advantage + tokens[-1]]
        over_tokens, targets = gae(inside, tokens, gamma, lam)
        advantages.append(over_tokens)
        returns.append(targets)
    return advantages, returns
