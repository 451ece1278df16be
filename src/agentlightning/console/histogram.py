"""Histogram: counts in equal parts of a range as a small SVG that says in words what it shows. Knows no store."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.console.charts import short
from agentlightning.console.markup import Html, element

WIDTH, HEIGHT = 160, 34


def histogram(bins: Sequence[int], low: float, high: float) -> Html:
    """Returns the counts as bars from the lowest value to the highest."""
    most, width = max(bins), WIDTH / len(bins)
    bars = [
        element(
            "rect",
            x=round(place * width, 1),
            y=round(HEIGHT * (1 - count / most), 1),
            width=round(width - 1, 1),
            height=round(HEIGHT * count / most, 1),
            class_="dot",
        )
        for place, count in enumerate(bins)
        if count
    ]
    said = f"{len(bins)} equal parts from {short(low)} to {short(high)}: {', '.join(map(str, bins))}"
    return element(
        "svg",
        element("title", said),
        *bars,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=said,
        class_="histogram c0",
    )
