"""Charts say in words what they draw, and survive any numbers."""

from __future__ import annotations

import math

from console_scene import Parsed
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.console.charts import Curve, Point, line_chart, ticks

NUMBERS = st.floats(width=64)


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS)))
def test_a_chart_of_any_numbers_has_finite_coordinates(numbers: list[tuple[float, float, float, float]]) -> None:
    drawn = line_chart("<b>", [Curve("<i>", [Point(*one) for one in numbers])])
    drawn_at = [value for name in ("points", "cx", "cy") for value in Parsed(drawn).values(name)]
    assert [value for value in drawn_at if "n" in value] == []  # neither nan nor inf
    assert "<i>" not in drawn


def test_a_chart_says_where_a_curve_begins_ends_and_is_highest() -> None:
    drawn = line_chart("Reward", [Curve("training", [Point(1, 0.2), Point(2, 0.9), Point(3, 0.5)])])
    assert Parsed(drawn).values("aria-label") == [
        "Reward. training: 0.2 at step 1, 0.5 at 3, highest 0.9 at 2",
    ]


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300))
def test_ticks_lie_within_their_bounds(low: float, high: float) -> None:
    found = ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high))
    assert all(math.isfinite(one) for one in found)
    assert high <= low or all(low - slack <= one <= high + slack for one in found)
