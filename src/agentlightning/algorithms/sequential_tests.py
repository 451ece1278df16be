"""Sequential tests: evidence that may be looked at after every result, and acted upon at once, with a bounded error.

Each gives a wealth: that of a bettor who begins with 1 and bets against a hypothesis. While the hypothesis holds, the
probability that it ever reaches 1 / alpha is at most alpha (Ville 1939; Ramdas et al. 2023, Game-theoretic statistics, arXiv
2210.01948). Pure, of the standard library alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EFFECTS = (0.03, 0.06, 0.12, 0.25, 0.5)
"""Distances from the hypothesis that a bettor bets on, an equal share of the wealth on each."""
HALVINGS = 60
"""Of an interval within [0, 1]: what is left is below the precision of a float."""


def sign_test_wealth(wins: int, losses: int) -> float:
    """The wealth of a bettor who begins with 1 and bets that wins are more likely than losses: for results in pairs.

    Betting the fraction 2p - 1 on each of n = wins + losses pairs makes 2^n p^wins (1 - p)^losses; this is its mean over
    p, uniform between 1/2 and 1, which is sum(C(n + 1, k) for k = 0 … wins) / ((n + 1) C(n, wins)). While wins are no more
    likely than losses it is a supermartingale (Robbins 1970).

    >>> sign_test_wealth(5, 0)  # (2**6 - 1) / 6
    10.5
    >>> sign_test_wealth(1, 1)  # (1 + 3) / (3 * 2)
    0.6666666666666666
    """
    pairs = wins + losses
    return sum(math.comb(pairs + 1, k) for k in range(wins + 1)) / ((pairs + 1) * math.comb(pairs, wins))


class MeanDifferenceTest:
    """Evidence that the mean of one stream of results exceeds another's by more than `shift`: for results without pairs.

    Results lie in [0, 1]. They are taken in blocks, each as short as has a result of both streams. For a block of n_a and
    n_b results, guesses p_a and p_b of the means, made before the block, are bet on: the wealth is multiplied by
    prod(f_a(x) for x of a) * prod(f_b(x) for x of b), with f(x) = x p / q + (1 - x) (1 - p) / (1 - q), where (q_a, q_b) is
    the point of the hypothesis q_a <= q_b + shift with the least n_a KL(p_a || q_a) + n_b KL(p_b || q_b). This is the
    E-variable of Turner, Ly and Grünwald (2024, Generic E-variables for exact sequential k-sample tests, arXiv 2106.02693),
    with a hypothesis other than equality as in Turner and Grünwald (2023, arXiv 2203.09785). It is linear in each result, so
    any results in [0, 1] may stand in for successes and failures.

    The wealth is the mean over EFFECTS of what bettors make who guess the means that fit the earlier blocks best among
    those that differ by `shift` and that effect. Means may drift from block to block.

    >>> test = MeanDifferenceTest()
    >>> for _ in range(20):
    ...     test.record(a=1.0)
    ...     test.record(b=0.0)
    >>> test.wealth > 1000
    True
    """

    def __init__(self, shift: float = 0.0) -> None:
        """shift: between -0.5 and, excluded, 0.5; ValueError otherwise."""
        if not -0.5 <= shift < 0.5:
            raise ValueError(f"shift: expected a number from -0.5 to below 0.5, got {shift}")
        self._shift = shift
        self._log_wealth = dict.fromkeys(EFFECTS, 0.0)
        """By effect."""
        self._counts, self._sums = [1.0, 1.0], [0.5, 0.5]
        """Of results in earlier blocks, of a and of b; one that is neither success nor failure comes before the first."""
        self._block: tuple[list[float], list[float]] = [], []

    def record(self, *, a: float | None = None, b: float | None = None) -> None:
        """Count a result of a, or of b, or of each. ValueError where one is outside of [0, 1]."""
        for results, result in zip(self._block, (a, b), strict=True):
            if result is not None:
                if not 0 <= result <= 1:
                    raise ValueError(f"result: expected a number from 0 to 1, got {result}")
                results.append(result)
        if all(self._block):
            self._bet()
            for place, results in enumerate(self._block):
                self._counts[place] += len(results)
                self._sums[place] += math.fsum(results)
                results.clear()

    @property
    def wealth(self) -> float:
        """Reaches 1 / alpha at any time with probability alpha at most, while the hypothesis holds; at most 1e300."""
        shares = [math.exp(min(one, 690.0)) for one in self._log_wealth.values()]
        return math.fsum(shares) / len(shares)

    def _bet(self) -> None:
        earlier = tuple(total / count for total, count in zip(self._sums, self._counts, strict=True))
        sizes = tuple(map(len, self._block))
        for effect in EFFECTS:
            guess = nearest_means(earlier, self._counts, self._shift + effect)
            null = nearest_means(guess, sizes, self._shift)
            self._log_wealth[effect] += math.fsum(
                math.log(result * p / q + (1 - result) * (1 - p) / (1 - q))
                for results, p, q in zip(self._block, guess, null, strict=True)
                for result in results
            )


def nearest_means(means: Sequence[float], counts: Sequence[float], difference: float) -> tuple[float, float]:
    """The means (q_a, q_b) that differ by `difference` and are nearest to `means` (p_a, p_b), all within (0, 1).

    Nearest by n_a KL(p_a || q_a) + n_b KL(p_b || q_b) between Bernoulli distributions: the likeliest means under the
    condition that they differ so, where `means` were found in `counts` results.

    >>> nearest_means((0.75, 0.25), (1, 1), 0.0)
    (0.5, 0.5)
    """
    (p_a, p_b), (n_a, n_b) = means, counts
    low, high = max(0.0, -difference), min(1.0, 1.0 - difference)
    for _ in range(HALVINGS):
        b = (low + high) / 2
        a = b + difference
        # The slope rises with q_b, from minus to plus infinity.
        if n_a * (a - p_a) / (a * (1 - a)) + n_b * (b - p_b) / (b * (1 - b)) > 0:
            high = b
        else:
            low = b
    b = (low + high) / 2
    return b + difference, b
