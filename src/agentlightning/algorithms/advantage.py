"""How much better than its group a call did: rewards of a group to advantages.

Statistics are taken over rollouts, never over rows: a rollout with more calls must not weigh more. LightningRL drives it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

AdvantageRule = Callable[[Sequence[Sequence[float]], Sequence[float], bool], list[list[float]]]
"""(credit by rollout and transition, reward by rollout, divide by the deviation?) -> advantage by rollout, transition."""

EPSILON = 1e-4
"""Added to the deviation, as in TRL; without it a group of nearly equal rewards would have advantages without bound."""


def grpo(credits: Sequence[Sequence[float]], rewards: Sequence[float], normalize_std: bool = True) -> list[list[float]]:
    """(credit - mean of the rewards) / (standard deviation of the rewards + 1e-4), over the rollouts of one group.

    Shao et al. 2024, "DeepSeekMath" (arXiv 2402.03300), section 4.1.2, outcome supervision: Â = (r - mean(r)) / std(r).
    The paper leaves open which deviation; this is the sample one (n - 1), as in torch.std and so in TRL and verl. Rewards
    [1, 0, 0, 0] have mean 0.25 and sample deviation 0.5: advantages [1.5, -0.5, -0.5, -0.5] (less by the epsilon).
    Without `normalize_std` the division is left out (Liu et al. 2025, "Dr. GRPO", arXiv 2503.20783): [0.75, -0.25, …].

    A group of one, or of equal rewards, has advantages of exactly 0 under uniform credit: `statistics` sums exactly.
    """
    mean = statistics.mean(rewards)
    scale = 1.0
    if normalize_std:
        scale = (statistics.stdev(rewards) if len(rewards) > 1 else 0.0) + EPSILON
    return [[(credit - mean) / scale for credit in rollout] for rollout in credits]


ADVANTAGES: Mapping[str, AdvantageRule] = MappingProxyType({"grpo": grpo})
