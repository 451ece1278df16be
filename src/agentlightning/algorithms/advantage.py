"""Advantage estimators: the credits of a group to advantages, how much better than its group each call did.

Statistics of a group are taken over rollouts, never over rows: a rollout with more calls must not weigh more. Those of
REINFORCE++ are over the tokens of a step. The rules that need a critic are in `critic.py`.

A rule gets one credit per rollout and transition, one reward per rollout to take statistics of, and by `shares` how
much of the baseline each credit is compared with (None: all). A call that a credit rule leaves out has credit and share 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from agentlightning.algorithms.rewards import alike
from agentlightning.errors import RewardError

PerToken = float | list[float]
"""Of one call: a number for all its sampled tokens, or one for each."""
Credits = Sequence[Sequence[float]]
"""One number per rollout and transition."""
AdvantageRule = Callable[..., list[list[float]]]
"""(credits, reward by rollout, shares) -> advantage by rollout and transition."""


EPSILON = 1e-4
"""Added to the deviation, as in TRL; without it a group of nearly equal rewards would have advantages without bound."""
WHITEN_EPSILON = 1e-8
"""Added to the variance of a step's tokens, as in verl."""


def grpo(
    credits: Credits, rewards: Sequence[float], shares: Credits | None = None, *, divide: bool = True
) -> list[list[float]]:
    """(credit - mean of the rewards) / (standard deviation of the rewards + 1e-4), over the rollouts of one group.

    Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), section 4.1.2, outcome supervision: Â = (r - mean(r)) / std(r).
    The paper leaves open which deviation; this is the sample one (n - 1), as in torch.std and so in TRL and verl. Rewards
    [1, 0, 0, 0] have mean 0.25 and sample deviation 0.5: advantages [1.5, -0.5, -0.5, -0.5] (less by the epsilon).
    Without `divide` the division is left out (Liu et al. 2025, "Dr. GRPO", arXiv 2503.20783): [0.75, -0.25, …].

    A group of one, or of equal rewards, has advantages of exactly 0 under uniform credit: `statistics` sums exactly.
    Nothing is divided there: what another credit rule says of calls in such a group would become ten thousand times itself.
    """
    scale = 1.0
    if divide:
        deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
        scale = deviation + EPSILON if deviation else 1.0
    return _compare(credits, [statistics.mean(rewards)] * len(rewards), scale, shares)


def dr_grpo(credits: Credits, rewards: Sequence[float], shares: Credits | None = None) -> list[list[float]]:
    """`grpo` without division, which favours tasks that are nearly solved or hopeless: [1, 0, 0, 0] -> [0.75, -0.25, …].

    Liu et al. 2025, "Understanding R1-Zero-Like Training" (arXiv 2503.20783), section 3.2, "GRPO done right". Its
    other half, a constant length in place of each completion's own, is the aggregation fixed_length.
    """
    return grpo(credits, rewards, shares, divide=False)


def rloo(credits: Credits, rewards: Sequence[float], shares: Credits | None = None) -> list[list[float]]:
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


def reinforce(credits: Credits, rewards: Sequence[float], shares: Credits | None = None) -> list[list[float]]:
    """The credit itself, without a baseline: [1, 0, 0, 0] -> [1, 0, 0, 0].

    Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning",
    equation 11 with b = 0. Only rollouts with a reward move the policy.
    """
    return _compare(credits, [0.0] * len(rewards), 1.0, None)


def reinforce_pp_baseline(
    credits: Credits, rewards: Sequence[float], shares: Credits | None = None
) -> list[list[float]]:
    """credit - mean of the group; LightningRL then normalises over all tokens of the step (`whiten_batch`).

    Hu et al. 2025, "REINFORCE++" (arXiv 2501.03262), "REINFORCE++ w/ baseline": the group's mean as a baseline, and one
    deviation for all groups, so that no task weighs more because its rewards hardly differ. The mean over tokens that is
    subtracted then is not 0 where completions differ in length.
    """
    return grpo(credits, rewards, shares, divide=False)


def maxrl(credits: Credits, rewards: Sequence[float], shares: Credits | None = None) -> list[list[float]]:
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


def whiten_batch(
    batch: Sequence[Sequence[PerToken]],
    lengths: Sequence[Sequence[int]],
    left_out: Sequence[Sequence[bool]] | None = None,
) -> list[list[PerToken]]:
    """(value - mean) / sqrt(variance + 1e-8) over all trained tokens of a step, whatever their groups.

    Hu et al. 2025, "REINFORCE++" (arXiv 2501.03262), global advantage normalisation: statistics over the tokens of the
    global batch, with the sample variance (n - 1), as verl's masked_whiten. `lengths` holds the trained tokens of each
    call, whose value counts for each of them. Values [1, 0] in calls of 1 and 3 tokens: mean 0.25, deviation 0.5, [1.5,
    -0.5]. Where all values are equal, all are exactly 0. Calls `left_out` by a credit rule are in no statistics and stay
    at 0.
    """
    left_out = left_out or [[False] * len(values) for values in batch]
    weighed = [
        (number, 1 if isinstance(value, Sequence) else length)
        for values, counts, out in zip(batch, lengths, left_out, strict=True)
        for value, length, is_out in zip(values, counts, out, strict=True)
        for number in (value if isinstance(value, Sequence) else [value])
        if length and not is_out
    ]
    count = sum(length for _, length in weighed)
    if not count or len({number for number, _ in weighed}) == 1:
        return [[_each(value, lambda _: 0.0) for value in values] for values in batch]
    mean = math.fsum(number * length for number, length in weighed) / count
    squares = math.fsum((number - mean) ** 2 * length for number, length in weighed)
    scale = math.sqrt(squares / max(1, count - 1) + WHITEN_EPSILON)
    return [
        [
            _each(value, lambda _: 0.0) if is_out else _each(value, lambda number: (number - mean) / scale)
            for value, is_out in zip(values, out, strict=True)
        ]
        for values, out in zip(batch, left_out, strict=True)
    ]


def rewards_to_go(batch: Credits, penalties: Sequence[Sequence[Sequence[float]]]) -> list[list[PerToken]]:
    """Each token's credit less the penalties from it on, those of later calls of its rollout included.

    Hu et al. 2025, "REINFORCE++" (arXiv 2501.03262): a token is rewarded with -β log(policy / reference), the last one also
    with R, and A_t = R - β Σ_{i >= t} KL_i. Credits [1, 1] of two calls with penalties [0.1, 0.2] and [0.3]: [0.4, 0.5]
    and [0.7].
    """
    found: list[list[PerToken]] = []
    for values, of_calls in zip(batch, penalties, strict=True):
        left, calls = 0.0, []
        for value, of_tokens in zip(reversed(values), reversed(of_calls), strict=True):
            numbers = []
            for penalty in reversed(of_tokens):
                left += penalty
                numbers.append(value - left)
            calls.append(numbers[::-1])
        found.append([*reversed(calls)])
    return found


def _each(value: PerToken, change: Callable[[float], float]) -> PerToken:
    return [change(number) for number in value] if isinstance(value, Sequence) else change(value)


def _compare(credits: Credits, baselines: Sequence[float], scale: float, shares: Credits | None) -> list[list[float]]:
    return [
        [_above(credit, share * baseline) / scale for credit, share in zip(rollout, parts, strict=True)]
        for rollout, baseline, parts in zip(
            credits, baselines, shares or [[1.0] * len(rollout) for rollout in credits], strict=True
        )
    ]


def _above(credit: float, baseline: float) -> float:
    """The difference; 0 where it is rounding, which a deviation would make a signal."""
    return 0.0 if alike(credit, baseline) else credit - baseline


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
WHITENED = ("reinforce_pp", "reinforce_pp_baseline")
"""Advantages that `whiten_batch` normalises once all groups of a step have theirs."""
ALONE = ("gae", "reinforce", "reinforce_pp")
"""Advantages that do not compare the rollouts of a group, so that a group may be one rollout."""
