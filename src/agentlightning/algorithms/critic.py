"""Advantage gae: a critic's values of sampled tokens, and rewards, to advantages and the critic's targets.

LightningRL drives it with the values of an engine's value head. Values have one entry per *sampled* token; what the agent
put between two calls is no action and has none. Pure; knows no engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from agentlightning.adapters.sequences import spread
from agentlightning.algorithms.advantage import whiten_batch
from agentlightning.algorithms.settings import AlgorithmPart, UnitInterval
from agentlightning.training_types import Trajectory

Values = Mapping[str, Sequence[float]]
"""Call id -> one number per sampled token: the critic's estimate of the state before that token."""


class Gae(AlgorithmPart):
    """The advantage that a critic gives: a value head of the engine, which learns with the policy."""

    type: Literal["gae"] = "gae"
    normalize_std: bool = True
    """Normalise the advantages over the step's trained tokens."""
    learning_rate: NonNegativeFloat = 1e-3
    """Learning rate of the value head, with the schedule of the policy's own."""
    gamma: UnitInterval = 1.0
    """Discount from token to token of a call."""
    call_gamma: UnitInterval = 1.0
    """Discount from call to call."""
    lam: UnitInterval = 0.95
    """λ, at both levels: 1 trusts what was earned, 0 the critic's value of the next state."""
    clip: PositiveFloat | None = None
    """An estimate that moved further than this within a step has no gradient. None: no bound."""
    backbone_grad_scale: NonNegativeFloat = 0.1
    """The critic's gradient reaches the policy's own layers times this; 0 leaves them alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """GAE of one rollout; the lists have one entry per transition and trained token.

    A forced token is no action: its discount and its value count nowhere. A call that was forced as a whole has the value of
    its last token, which stands for it between the others.
    """

    advantages: list[list[float]]
    returns: list[list[float]]
    values: list[list[float]]
    masks: list[list[bool]]
    """True for the sampled tokens that are trained."""
    rewards: list[float]
    """Rewards that the calls earned, the last one with the rollout's own."""

    def by_token(self, numbers: Sequence[Sequence[float]]) -> list[list[float]]:
        """These numbers with 0 for forced tokens: one per transition and sampled token."""
        return [spread(call, mask) for call, mask in zip(numbers, self.masks, strict=True)]


def estimates(trajectories: Sequence[Trajectory], values: Values, critic: Gae) -> list[Estimate]:
    """Bi-level GAE of each rollout; with `normalize_std`, less the mean and over the deviation of all of them.

    Schulman et al. 2016 and 2017 (PPO), as `bilevel_gae` says. A call earns the step rewards recorded on it, the last
    one the final reward, too. Statistics are over the trained tokens of the step, as in verl's PPO. Two rollouts of one
    token with rewards 1 and 0 and values of 0.5: advantages [0.5, -0.5], normalised [0.707, -0.707].
    """
    found = []
    for trajectory in trajectories:
        masks = [transition.mask for transition in trajectory.transitions]
        numbers = [values[transition.call_id] for transition in trajectory.transitions]
        estimated = [[*compress(call, mask)] or [call[-1]] for call, mask in zip(numbers, masks, strict=True)]
        earned = [transition.reward for transition in trajectory.transitions]
        earned[-1] += trajectory.reward
        advantages, returns = bilevel_gae(
            earned, estimated, gamma=critic.gamma, call_gamma=critic.call_gamma, lam=critic.lam
        )
        found.append(Estimate(advantages=advantages, returns=returns, values=estimated, masks=masks, rewards=earned))
    return _normalized(found) if critic.normalize_std else found


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


def explained(found: Sequence[Estimate]) -> dict[str, float]:
    """value_mean, and explained_variance: 1 - Var(return - value) / Var(return) over tokens.

    1: the critic knows everything; 0: no more than a constant; below 0: it misleads. Left out where all returns are equal.
    """
    returns = _trained((one.returns, one.masks) for one in found)
    values = _trained((one.values, one.masks) for one in found)
    if not returns:
        return {}
    stats = {"value_mean": statistics.fmean(values)}
    spread = statistics.pvariance(returns)
    if spread:
        errors = [earned - value for earned, value in zip(returns, values, strict=True)]
        stats["explained_variance"] = 1.0 - statistics.pvariance(errors) / spread
    return stats


def _trained(columns: Iterable[tuple[list[list[float]], list[list[bool]]]]) -> list[float]:
    """The numbers of all calls that train something."""
    return [
        number
        for calls, masks in columns
        for call, mask in zip(calls, masks, strict=True)
        if any(mask)
        for number in call
    ]


def _normalized(found: Sequence[Estimate]) -> list[Estimate]:
    white = whiten_batch(
        [one.advantages for one in found],
        [[len(call) for call in one.advantages] for one in found],
        [[not any(mask) for mask in one.masks] for one in found],
    )
    return [
        replace(one, advantages=[list(call) for call in calls if not isinstance(call, float)])
        for one, calls in zip(found, white, strict=True)
    ]
