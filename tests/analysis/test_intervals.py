"""Intervals against numbers worked by hand, and against scipy."""

from __future__ import annotations

import random

import pytest

from agentlightning.analysis.intervals import (
    correlation,
    paired_bootstrap,
    slope,
    within_groups,
)


def noise(count: int, seed: int) -> list[float]:
    dice = random.Random(seed)
    return [dice.gauss(0, 1) for _ in range(count)]


def test_the_bootstrap_of_two_differences_has_the_interval_worked_by_hand() -> None:
    found = paired_bootstrap([0.0, 1.0])
    assert found is not None
    assert (found.value, found.low, found.high, found.n) == (0.5, 0.0, 1.0, 2)


def test_equal_differences_leave_nothing_to_chance_and_one_says_nothing() -> None:
    found = paired_bootstrap([0.25] * 8)
    assert found is not None
    assert (found.value, found.low, found.high, found.excludes_zero) == (0.25, 0.25, 0.25, True)
    assert paired_bootstrap([0.25]) is None


def test_a_slope_and_its_error_are_those_worked_by_hand() -> None:
    # y = 1, 2, 4 at x = 0, 1, 2: slope 3/2, residuals 1/6, -1/3, 1/6, so s² = 1/6 and the error is sqrt(1/6 / 2)
    found = slope([(0, 1.0), (1, 2.0), (2, 4.0)])
    assert found is not None
    assert found.value == pytest.approx(1.5)
    assert found.high - found.value == pytest.approx(2 * (1 / 12) ** 0.5)
    assert slope([(0, 1.0), (1, 2.0)]) is None


def test_correlations_agree_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    xs, others = noise(40, 2), noise(40, 3)
    ys = [x + other for x, other in zip(xs, others, strict=True)]
    pearson = correlation(xs, ys)
    assert pearson is not None
    known = stats.pearsonr(xs, ys)
    assert (pearson.value, pearson.low, pearson.high) == pytest.approx(
        (known.statistic, *known.confidence_interval(0.95)), abs=1e-9
    )


def test_within_groups_the_means_of_the_groups_count_nothing() -> None:
    # Across the groups y falls with x, within each it rises by as much as x does.
    xs = [0.0, 1, 2, 10, 11, 12, 20, 21, 22]
    ys = [20.0, 21, 22, 10, 11, 12, 0, 1, 2]
    groups = ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    across, within = correlation(xs, ys), within_groups(xs, ys, groups)
    assert across is not None
    assert across.value < -0.9
    assert within is not None
    assert within.value == pytest.approx(1.0)


def test_a_partial_correlation_is_that_of_the_residuals() -> None:
    numpy = pytest.importorskip("numpy")
    given, a, b = noise(50, 4), noise(50, 5), noise(50, 6)
    xs = [2 * g + one for g, one in zip(given, a, strict=True)]
    ys = [-g + one + 0.5 * two for g, one, two in zip(given, a, b, strict=True)]
    found = within_groups(xs, ys, ["all"] * 50, [given])
    design = numpy.column_stack([numpy.ones(50), given])
    rest = [numpy.array(c) - design @ numpy.linalg.lstsq(design, numpy.array(c), rcond=None)[0] for c in (xs, ys)]
    assert found is not None
    assert found.value == pytest.approx(numpy.corrcoef(*rest)[0, 1])
    assert within_groups(xs, xs, ["all"] * 50, [xs]) is None  # nothing is left of what is given
