"""Geometry of line charts and sparklines, which templates draw as SVG: a chart is a few kilobytes, and needs no library.

Each chart says in words what it shows. The page's script reads values back from the lines by their axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

WIDTH, HEIGHT = 440, 190
LARGE = 760, 270
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 26
SPARK = 96, 26
TICKS = 4
MAX_MARKED = 40
"""Points of a curve that are marked one by one; more would be a thick line."""
MAX_EVENTS = 6
"""Events that are named on a chart, the latest; more would cover its curves."""
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
    measured: bool = False
    """True for few points that matter one by one: marked, each with its own interval, and never smoothed."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The range of an axis and its place on the drawing."""

    low: float
    high: float
    start: float
    end: float

    def place(self, value: float) -> float:
        """The coordinate of a value."""
        share = 0.5 if self.high - self.low < MIN_SPAN else (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve on the drawing: coordinates as SVG has them."""

    label: str
    style: str
    points: str
    band: str
    marks: Sequence[tuple[float, float]]
    bars: Sequence[tuple[float, float, float]]
    """Intervals of measured points: x, upper and lower end."""
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart as its template draws it."""

    title: str
    words: str
    lines: Sequence[Line]
    size: tuple[int, int]
    x: Axis
    y: Axis
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    x_label: str
    events: Sequence[tuple[float, str]]
    """Place along x and name of each event, in order."""


def line_chart(
    title: str,
    curves: Sequence[Curve],
    x_label: str = "step",
    large: bool = False,
    events: Sequence[tuple[float, str]] = (),
) -> Chart | None:
    """The curves as a chart; what is not finite is left out. None without a point. events: x and name, by x."""
    finite = [
        replace(one, points=[at for at in one.points if abs(at.x) < MAX_VALUE and abs(at.y) < MAX_VALUE])
        for one in curves
    ]
    drawn = [one for one in finite if one.points]
    if not drawn:
        return None
    width, height = size = LARGE if large else (WIDTH, HEIGHT)
    points = [point for one in drawn for point in one.points]
    xs = [point.x for point in points]
    x_axis = Axis(min(xs), max(xs), LEFT, width - RIGHT)
    seen = [(x, name) for x, name in events if x_axis.low <= x <= x_axis.high]
    y_axis = _y_axis([edge for point in points for edge in (point.y, *point.band)], height)
    words = [_in_words(one, x_label) for one in drawn] + [f"{name} at {x_label} {short(x)}" for x, name in seen]
    x_ticks = ticks(x_axis.low, x_axis.high, 2 * TICKS if large else TICKS)
    x_ticks = [one for one in x_ticks if one.is_integer() or x_axis.high - x_axis.low < 1]  # steps have no halves
    return Chart(
        title=title,
        words=f"{title}. {'; '.join(words)}",
        lines=[_line(one, x_axis, y_axis) for one in drawn],
        size=size,
        x=x_axis,
        y=y_axis,
        x_ticks=[(x_axis.place(one), short(one)) for one in x_ticks],
        y_ticks=[(y_axis.place(one), short(one)) for one in ticks(y_axis.low, y_axis.high)],
        x_label=x_label,
        events=[(x_axis.place(x), name) for x, name in seen[-MAX_EVENTS:]],
    )


def spark(values: Sequence[float]) -> str:
    """Points of a small line without axes; '' for fewer than two values."""
    finite = [one for one in values if abs(one) < MAX_VALUE]
    if len(finite) < 2:
        return ""
    x, y = Axis(0, len(finite) - 1, 1, SPARK[0] - 1), Axis(min(finite), max(finite), SPARK[1] - 2, 2)
    return " ".join(f"{x.place(place)},{y.place(value)}" for place, value in enumerate(finite))


def ticks(low: float, high: float, count: int = TICKS) -> list[float]:
    """Round values between two bounds, about `count` of them.

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
    """A number as an axis shows it.

    >>> short(0.5), short(12000), short(3_400_000), short(0.00012)
    ('0.5', '12k', '3.4M', '0.00012')
    """
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= bound:
            return f"{value / (1e3 if unit == 'k' else bound):.3g}{unit}"
    return f"{value:.4g}"


def _y_axis(values: Sequence[float], height: int) -> Axis:
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:  # rewards and shares mostly: the same scale from run to run
        low, high = 0.0, 1.0 if high > 0.3 else high
    margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return Axis(low - margin, high + margin, height - BOTTOM, TOP)


def _line(curve: Curve, x_axis: Axis, y_axis: Axis) -> Line:
    places = [(x_axis.place(point.x), y_axis.place(point.y)) for point in curve.points]
    banded = [(x_axis.place(point.x), *map(y_axis.place, point.band)) for point in curve.points if point.band]
    edges = [f"{x},{high}" for x, _, high in banded] + [f"{x},{low}" for x, low, _ in reversed(banded)]
    return Line(
        label=curve.label,
        style=f"c{curve.color % COLORS}" + (" dashed" if curve.color >= COLORS else ""),
        points=" ".join(f"{x},{y}" for x, y in places),
        band="" if curve.measured else " ".join(edges),
        marks=places if curve.measured or len(places) <= MAX_MARKED else (),
        bars=[(x, high, low) for x, low, high in banded] if curve.measured else (),
        measured=curve.measured,
    )


def _in_words(curve: Curve, x_label: str) -> str:
    start, last = curve.points[0], curve.points[-1]
    highest = max(curve.points, key=lambda point: point.y)
    return (
        f"{curve.label}: {short(start.y)} at {x_label} {short(start.x)}, {short(last.y)} at {short(last.x)}, "
        f"highest {short(highest.y)} at {short(highest.x)}"
    )
