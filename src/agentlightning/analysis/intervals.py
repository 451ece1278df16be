"""Intervals: small statistics with the chance in them, over lists of numbers that a store has given.

Comparisons of runs, the reward debugger and suggestions draw on it. Pure, of the standard library alone, so that the command
line needs no numpy. Every interval is of 95 %.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

RESAMPLES = 2000
"""Resamples of a bootstrap: the ends of its interval then move by about 3 % of its width from one seed to another."""
Z = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float
    n: int
    """Numbers, or pairs of them, that it rests on."""

    @property
    def excludes_zero(self) -> bool:
        """True where chance alone hardly explains that the value is not 0."""
        return self.low > 0 or self.high < 0


def paired_bootstrap(differences: Sequence[float], seed: int = 0) -> Interval | None:
    """The mean of paired differences with the percentile interval of a bootstrap over the pairs; None for fewer than two.

    Efron and Tibshirani 1993, "An Introduction to the Bootstrap", section 13.3. Differences (0, 1) have resampled means 0,
    0.5 and 1 with probabilities 1/4, 1/2 and 1/4: the interval is [0, 1]. The same seed gives the same interval.
    """
    count = len(differences)
    if count < 2:
        return None
    draw = random.Random(seed)
    means = [math.fsum(draw.choices(differences, k=count)) / count for _ in range(RESAMPLES)]
    cuts = statistics.quantiles(means, n=40, method="inclusive")
    return Interval(statistics.fmean(differences), cuts[0], cuts[-1], count)


def wilson(successes: int, count: int) -> Interval:
    """The share of successes with Wilson's score interval, which holds for few trials and shares near 0 and 1.

    Wilson 1927.

    >>> found = wilson(0, 4)
    >>> round(found.low, 3), round(found.high, 3)
    (0.0, 0.49)
    """
    if not count:
        return Interval(math.nan, 0.0, 1.0, 0)
    share, square = successes / count, Z * Z
    centre = (share + square / (2 * count)) / (1 + square / count)
    width = Z / (1 + square / count) * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    return Interval(share, max(0.0, centre - width), min(1.0, centre + width), count)


def exact_mcnemar(better: int, worse: int) -> float:
    """The two-sided p-value of McNemar's exact test: of pairs that differ, as many or more fall to one side by chance.

    McNemar 1947; a binomial test of one half over the pairs that differ.

    >>> exact_mcnemar(5, 0), exact_mcnemar(3, 3)
    (0.0625, 1.0)
    """
    count, fewer = better + worse, min(better, worse)
    tail = sum(math.comb(count, number) for number in range(fewer + 1))
    return min(1.0, tail / (1 << count) * 2)


def slope(points: Sequence[tuple[float, float]]) -> Interval | None:
    """The least-squares slope through (x, y), plus and minus twice its standard error; None for fewer than three points.

    >>> slope([(0, 1.0), (1, 3.0), (2, 5.0)])
    Interval(value=2.0, low=2.0, high=2.0, n=3)
    """
    count = len(points)
    if count < 3:
        return None
    middle, mean = (statistics.fmean(numbers) for numbers in zip(*points, strict=True))
    spread = math.fsum((x - middle) ** 2 for x, _ in points)
    if not spread:
        return None
    value = math.fsum((x - middle) * (y - mean) for x, y in points) / spread
    left = math.fsum((y - mean - value * (x - middle)) ** 2 for x, y in points)
    error = 2 * math.sqrt(left / (count - 2) / spread)
    return Interval(value, value - error, value + error, count)


def correlation(xs: Sequence[float], ys: Sequence[float], freedom: int | None = None) -> Interval | None:
    """Pearson's correlation, with Fisher's interval; None where one side never differs, or too little is known.

    freedom: degrees of freedom of the numbers about their means, by default one less than there are; fewer where more was
    taken out of them, such as the mean of each group. Fisher 1921: atanh(r) has a standard error of 1 / sqrt(freedom - 2).
    """
    freedom = len(xs) - 1 if freedom is None else freedom
    if freedom < 3:
        return None
    x0, y0 = statistics.fmean(xs), statistics.fmean(ys)
    dx, dy = [x - x0 for x in xs], [y - y0 for y in ys]
    squares = math.fsum(x * x for x in dx), math.fsum(y * y for y in dy)
    if min(squares) <= 1e-18:
        return None
    scale = math.sqrt(squares[0]) * math.sqrt(squares[1])
    value = max(-1.0, min(1.0, math.fsum(x * y for x, y in zip(dx, dy, strict=True)) / scale))
    centre, error = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, value))), Z / math.sqrt(freedom - 2)
    return Interval(value, math.tanh(centre - error), math.tanh(centre + error), len(xs))


def within_groups(
    xs: Sequence[float], ys: Sequence[float], groups: Sequence[str], given: Sequence[Sequence[float]] = ()
) -> Interval | None:
    """The partial correlation of x and y given the group and, with `given`, other columns of numbers.

    Each column loses its groups' means, then what a least-squares fit to the others explains; the rest is correlated, with
    the degrees of freedom that are left. Two groups with (x, y) of (0, 5), (1, 6) and (0, 1), (1, 2) correlate at 1 within.
    """
    columns = [_centred(column, groups) for column in (*given, xs, ys)]
    taken = len(set(groups))
    basis: list[list[float]] = []
    for column in columns[:-2]:
        rest = _without(column, basis)
        if math.fsum(one * one for one in rest) > 1e-9 * max(1.0, math.fsum(one * one for one in column)):
            basis.append(rest)
    x, y = (_without(column, basis) for column in columns[-2:])
    if math.fsum(one * one for one in x) <= 1e-9 * math.fsum(one * one for one in columns[-2]):
        return None  # the others say all of it: what is left is rounding
    return correlation(x, y, len(xs) - taken - len(basis))


def _centred(column: Sequence[float], groups: Sequence[str]) -> list[float]:
    members: dict[str, list[float]] = {}
    for group, number in zip(groups, column, strict=True):
        members.setdefault(group, []).append(number)
    means = {group: statistics.fmean(numbers) for group, numbers in members.items()}
    return [number - means[group] for group, number in zip(groups, column, strict=True)]


def _without(column: Sequence[float], basis: Sequence[Sequence[float]]) -> list[float]:
    """The column less its projections on the columns of `basis`, which are orthogonal."""
    rest = list(column)
    for other in basis:
        share = math.fsum(a * b for a, b in zip(rest, other, strict=True)) / math.fsum(b * b for b in other)
        rest = [a - share * b for a, b in zip(rest, other, strict=True)]
    return rest
