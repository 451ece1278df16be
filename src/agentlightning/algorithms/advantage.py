"""Advantage estimators: the credits of a group to advantages, how much better than its group each call did.

Statistics are taken over rollouts, never over rows: a rollout with more calls must not weigh more. LightningRL drives
it; the rules that need a critic are in `critic.py`. Knows nothing of tokens or losses.

A rule gets one credit per rollout and transition, one reward per rollout to take statistics of, and by `shares` how
much of the baseline each credit is compared with (None: all of it). A call that a credit rule leaves out has credit 0
and share 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from agentlightning.errors import RewardError

Credits = Sequence[Sequence[float]]
"""One number per rollout and transition."""
AdvantageRule = Callable[..., list[list[float]]]
"""(credits, reward by rollout, divide by the deviation?, shares) -> advantage by rollout and transition."""

EPSILON = 1e-4
"""Added to the deviation, as in TRL; without it a group of nearly equal rewards would have advantages without bound."""
WHITEN_EPSILON = 1e-8
"""Added to the variance of a batch, as in verl."""


def grpo(
    credits: Credits, rewards: Sequence[float], normalize_std: bool = True, shares: Credits | None = None
) -> list[list[float]]:
    """(credit - mean of the rewards) / (standard deviation of the rewards + 1e-4), over the rollouts of one group.

    Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), section 4.1.2, outcome supervision: Â = (r - mean(r)) / std(r).
    The paper leaves open which deviation; this is the sample one (n - 1), as in torch.std and so in TRL and verl. Rewards
    [1, 0, 0, 0] have mean 0.25 and sample deviation 0.5: advantages [1.5, -0.5, -0.5, -0.5] (less by the epsilon).
    Without `normalize_std` the division is left out (Liu et al. 2025, "Dr. GRPO", arXiv 2503.20783): [0.75, -0.25, …].

    A group of one, or of equal rewards, has advantages of exactly 0 under uniform credit: `statistics` sums exactly.
    Nothing is divided there: what another credit rule says of calls in such a group would become ten thousand times itself.
    """
    scale = 1.0
    if normalize_std:
        deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        scale = deviation + EPSILON if deviation else 1.0
    return _compare(credits, [statistics.mean(rewards)] * len(rewards), scale, shares)


def dr_grpo(
    credits: Credits, rewards: Sequence[float], normalize_std: bool = True, shares: Credits | None = None
) -> list[list[float]]:
    """credit - mean of the rewards: no division, which favours tasks that are nearly solved or nearly hopeless.

    Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv 2503.20783), section 3.2, "GRPO done right". Its
    other half, a constant length in place of each completion's own, is an aggregation of the loss. [1, 0, 0, 0] -> [0.75,
    -0.25, …].
    """
    return grpo(credits, rewards, False, shares)


def rloo(
    credits: Credits, rewards: Sequence[float], normalize_std: bool = True, shares: Credits | None = None
) -> list[list[float]]:
    """credit - mean reward of the group's *other* rollouts: a baseline that does not contain the rollout itself.

    Ahmadian et al. 2024, "Back to Basics" (arXiv 2402.14740), equation 8 (Kool et al. 2019). [1, 0, 0, 0] has baselines
    [0, 1/3, 1/3, 1/3]: advantages [1, -1/3, -1/3, -1/3]. A group of one has nothing to be compared with: 0.
    """
    if len(rewards) == 1:
        return [[0.0] * len(rollout) for rollout in credits]
    others = len(rewards) - 1
    mean = statistics.mean(rewards)
    # mean of the others = mean + (mean - own) / others: exactly the mean, and so exactly 0, where all rewards are equal
    return _compare(credits, [mean + (mean - reward) / others for reward in rewards], 1.0, shares)


def reinforce(
    credits: Credits, rewards: Sequence[float], normalize_std: bool = True, shares: Credits | None = None
) -> list[list[float]]:
    """The credit itself, without a baseline: [1, 0, 0, 0] -> [1, 0, 0, 0].

    Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning",
    equation 11 with b = 0. Only rollouts with a reward move the policy.
    """
    return _compare(credits, [0.0] * len(rewards), 1.0, None)


def reinforce_pp_baseline(
    credits: Credits, rewards: Sequence[float], normalize_std: bool = True, shares: Credits | None = None
) -> list[list[float]]:
    """credit - mean of the group; LightningRL then divides by the deviation of the whole batch (`scale_batch`).

    Hu et al. 2025, "REINFORCE++" (arXiv 2501.03262), "REINFORCE++ w/ baseline": the group's mean as a baseline, and one
    deviation for all groups, so that no task weighs more because its rewards hardly differ.
    """
    return grpo(credits, rewards, False, shares)


def maxrl(
    credits: Credits, rewards: Sequence[float], normalize_std: bool = True, shares: Credits | None = None
) -> list[list[float]]:
    """(credit - mean of the rewards) / mean of the rewards: [1, 0, 0, 0] -> [3, -1, -1, -1].

    Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning" (arXiv 2602.02710): the gradient of the log of the
    success rate, to the order that the group's size allows; a task weighs 1 / success rate. A group without success
    gives 0. Rewards are likelihoods there: RewardError where one is negative.
    """
    if any(reward < 0 for reward in rewards):
        raise RewardError(f"algorithm.advantage: maxrl expects rewards of at least 0, got {min(rewards):g}")
    mean = statistics.mean(rewards)
    if mean == 0:
        return [[0.0] * len(rollout) for rollout in credits]
    return _compare(credits, [mean] * len(rewards), mean, shares)


def whiten_batch(batch: Credits) -> list[list[float]]:
    """(value - mean) / sqrt(variance + 1e-8) over the rollouts of a whole batch, whatever their groups.

    Hu et al. 2025, "REINFORCE++" (arXiv 2501.03262), equation 9, global advantage normalisation; there over tokens,
    here each rollout counts once, however many calls it made. One call each with values [1, 0, 0, 0]: [1.5, -0.5,
    -0.5, -0.5].
    """
    mean = _mean(batch)
    scale = _deviation(batch, mean)
    return [[(value - mean) / scale for value in rollout] for rollout in batch]


def scale_batch(batch: Credits) -> list[list[float]]:
    """value / sqrt(variance + 1e-8): as `whiten_batch` for values whose mean is 0 by construction.

    Nothing is subtracted, so that a group in which nothing differs keeps its advantages of exactly 0.
    """
    scale = _deviation(batch, _mean(batch))
    return [[value / scale for value in rollout] for rollout in batch]


def _compare(credits: Credits, baselines: Sequence[float], scale: float, shares: Credits | None) -> list[list[float]]:
    if shares is None:
        return [
            [(credit - baseline) / scale for credit in rollout]
            for rollout, baseline in zip(credits, baselines, strict=True)
        ]
    return [
        [(credit - share * baseline) / scale for credit, share in zip(rollout, parts, strict=True)]
        for rollout, baseline, parts in zip(credits, baselines, shares, strict=True)
    ]


def _mean(batch: Credits) -> float:
    return statistics.mean([statistics.mean(rollout) for rollout in batch]) if batch else 0.0


def _deviation(batch: Credits, mean: float) -> float:
    """Sample deviation over rollouts; a rollout's part is the mean over its calls."""
    parts = [statistics.fmean([(value - mean) ** 2 for value in rollout]) for rollout in batch]
    variance = math.fsum(parts) / (len(parts) - 1) if len(parts) > 1 else 0.0
    return math.sqrt(variance + WHITEN_EPSILON)


ADVANTAGES: Mapping[str, AdvantageRule] = MappingProxyType(
    {
        "grpo": grpo,
        "dr_grpo": dr_grpo,
        "rloo": rloo,
        "reinforce": reinforce,
        "reinforce_pp": reinforce,
        "reinforce_pp_baseline": reinforce_pp_baseline,
        "maxrl": maxrl,
    }
)
BATCH: Mapping[str, Callable[[Credits], list[list[float]]]] = MappingProxyType(
    {"reinforce_pp": whiten_batch, "reinforce_pp_baseline": scale_batch}
)
"""The normalisation that follows once all groups of a step have their advantages."""
