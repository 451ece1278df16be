"""Charts say in words what they draw, and survive any numbers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.console.charts import Curve, Point, line_chart, spark, ticks

NUMBERS = st.floats(width=64)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS)), st.booleans())
def test_a_chart_of_any_numbers_has_finite_coordinates(
    numbers: list[tuple[float, float, float, float]], measured: bool
) -> None:
    drawn = line_chart("<b>", [Curve("<i>", [Point(*one) for one in numbers], measured=measured)])
    for line in drawn.lines if drawn else ():
        assert "n" not in f"{line.points} {line.band} {line.marks} {line.bars}"  # neither nan nor inf
    assert "n" not in spark([one[1] for one in numbers])


def test_a_chart_says_where_a_curve_begins_ends_and_is_highest() -> None:
    drawn = line_chart("Reward", [Curve("training", [Point(1, 0.2), Point(2, 0.9), Point(3, 0.5)])])
    assert drawn is not None
    assert drawn.words == "Reward. training: 0.2 at step 1, 0.5 at 3, highest 0.9 at 2"
    assert line_chart("Reward", [Curve("training", [])]) is None


def test_a_measured_point_has_its_own_interval() -> None:
    drawn = line_chart("Reward", [Curve("held-out", [Point(0, 0.5, 0.4, 0.6), Point(9, 0.5)], measured=True)])
    assert drawn is not None
    assert [len(line.bars) for line in drawn.lines] == [1]
    assert [line.band for line in drawn.lines] == [""]


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_ticks_lie_within_their_bounds(low: float, high: float) -> None:
    found = ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high))
    assert all(math.isfinite(one) for one in found)
    assert high <= low or all(low - slack <= one <= high + slack for one in found)
