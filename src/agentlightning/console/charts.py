"""Line charts and histograms as SVG, drawn here: a page asks for no library, and a chart is a few kilobytes.

Colours and dashes are classes of the style sheet, for both schemes of colours; each chart says in words what it shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.console.markup import Html, element, join, note

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 26
HISTOGRAM = 160, 34
TICKS = 4
MAX_MARKED = 60
"""Points of a curve that are marked one by one; more would be a thick line."""
MAX_VALUE = 1e300
"""Larger numbers are left out, as those that are none: their distances would overflow."""
MIN_SPAN = 1e-290
COLORS = 10
"""Colours of the style sheet; the curves after them have the same ones, dashed."""


@dataclass(frozen=True, slots=True)
class Point:
    """A value, and the band around it."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None

    @property
    def band(self) -> tuple[float, float] | tuple[()]:
        """Both edges, where they are finite and differ."""
        low, high = self.low, self.high
        if low is None or high is None or low == high or not (abs(low) < MAX_VALUE and abs(high) < MAX_VALUE):
            return ()
        return low, high


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line."""

    label: str
    points: Sequence[Point]
    color: int = 0
    """Its number among the curves of a page: the same thing has the same colour in every chart."""

    @property
    def style(self) -> str:
        """Classes of its line."""
        return f"c{self.color % COLORS}" + (" dashed" if self.color >= COLORS else "")


@dataclass(frozen=True, slots=True)
class Axis:
    """The range of an axis and its place on the drawing."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """Returns the coordinate of a value."""
        share = 0.5 if self.high - self.low < MIN_SPAN else (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def line_chart(title: str, curves: Sequence[Curve], x_label: str = "step") -> Html:
    """Returns the curves as a figure with a caption; what is not finite is left out."""
    finite = [
        Curve(one.label, [at for at in one.points if abs(at.x) < MAX_VALUE and abs(at.y) < MAX_VALUE], one.color)
        for one in curves
    ]
    drawn = [one for one in finite if one.points]
    caption = element("figcaption", title)
    if not drawn:
        return element("figure", caption, note("no value yet"), class_="chart")
    points = [point for one in drawn for point in one.points]
    xs = [point.x for point in points]
    x_axis = Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_axis = _y_axis([edge for point in points for edge in (point.y, *point.band)])
    said = f"{title}. {'; '.join(_in_words(one, x_label) for one in drawn)}"
    lines = [_grid(x_axis, y_axis, x_label), *(_line(one, x_axis, y_axis) for one in drawn)]
    svg = element("svg", *lines, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=said)
    return element("figure", caption, svg, _legend(drawn), class_="chart")


def histogram(bins: Sequence[int], low: float, high: float) -> Html:
    """Returns counts in equal parts of a range as bars from the lowest value to the highest."""
    most, width = max(bins), HISTOGRAM[0] / len(bins)
    bars = []
    for place, count in enumerate(bins):
        height = round(HISTOGRAM[1] * count / most, 1)
        top = round(HISTOGRAM[1] - height, 1)
        bars.append(element("rect", x=round(place * width, 1), y=top, width=width - 1, height=height, class_="dot"))
    said = f"{len(bins)} equal parts from {short(low)} to {short(high)}: {', '.join(map(str, bins))}"
    box = f"0 0 {HISTOGRAM[0]} {HISTOGRAM[1]}"
    parts = [element("title", said), *bars]
    return element("svg", *parts, viewBox=box, role="img", aria_label=said, class_="histogram c0")


def ticks(low: float, high: float, count: int = TICKS) -> list[float]:
    """Returns round values between two bounds, about `count` of them.

    >>> ticks(0.0, 1.0), ticks(3, 43)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [10.0, 20.0, 30.0, 40.0])
    """
    if not high - low > MIN_SPAN:
        return [low]
    raw = (high - low) / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 2.5, 5, 10) if scale * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """Returns a number as an axis shows it.

    >>> short(0.5), short(12000), short(3_400_000), short(0.00012)
    ('0.5', '12k', '3.4M', '0.00012')
    """
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return f"{value / (1e3 if unit == 'k' else bound):.3g}{unit}"
    return f"{value:.4g}"


def _y_axis(values: Sequence[float]) -> Axis:
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:  # rewards and shares mostly: the same scale from run to run
        low, high = 0.0, 1.0 if high > 0.3 else high
    margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return Axis(low - margin, high + margin, HEIGHT - BOTTOM, TOP)


def _grid(x_axis: Axis, y_axis: Axis, x_label: str) -> Html:
    lines = []
    for value in ticks(y_axis.low, y_axis.high):
        y = y_axis.place(value)
        lines.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        lines.append(element("text", short(value), x=LEFT - 6, y=y + 4, text_anchor="end"))
    for value in ticks(x_axis.low, x_axis.high):
        if float(value).is_integer() or x_axis.high - x_axis.low < 1:  # steps have no halves
            place = x_axis.place(value)
            lines.append(element("text", short(value), x=place, y=HEIGHT - BOTTOM + 14, text_anchor="middle"))
    lines.append(element("text", x_label, x=WIDTH - RIGHT, y=HEIGHT - 1, text_anchor="end", class_="axis"))
    return join(lines)


def _line(curve: Curve, x_axis: Axis, y_axis: Axis) -> Html:
    places = [(x_axis.place(point.x), y_axis.place(point.y)) for point in curve.points]
    banded = [(x_axis.place(point.x), point.band) for point in curve.points if point.band]
    edges = [f"{x},{y_axis.place(band[1])}" for x, band in banded]
    edges += [f"{x},{y_axis.place(band[0])}" for x, band in reversed(banded)]
    parts = [element("polygon", points=" ".join(edges), class_=f"band {curve.style}")] if edges else []
    line = " ".join(f"{x},{y}" for x, y in places)
    parts.append(element("polyline", points=line, class_=f"curve {curve.style}"))
    if len(places) <= MAX_MARKED:
        for (x, y), point in zip(places, curve.points, strict=True):
            told = element("title", f"{curve.label} {short(point.x)}: {short(point.y)}")
            parts.append(element("circle", told, cx=x, cy=y, r=2.2, class_=f"dot {curve.style}"))
    return join(parts)


def _in_words(curve: Curve, x_label: str) -> str:
    start, last = curve.points[0], curve.points[-1]
    highest = max(curve.points, key=lambda point: point.y)
    return (
        f"{curve.label}: {short(start.y)} at {x_label} {short(start.x)}, {short(last.y)} at {short(last.x)}, "
        f"highest {short(highest.y)} at {short(highest.x)}"
    )


def _legend(curves: Sequence[Curve]) -> Html | None:
    if len(curves) < 2:
        return None
    items = []
    for one in curves:
        stroke = element("line", x1=0, x2=18, y1=5, y2=5, class_=f"curve {one.style}")
        swatch = element("svg", stroke, width=18, height=10, aria_hidden="true")
        items.append(element("li", swatch, " ", one.label))
    return element("ul", *items, class_="legend")
