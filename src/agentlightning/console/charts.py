"""Line charts and scatter plots as SVG, drawn here: a page asks for no library, and a chart is a few kilobytes.

Driven by the pages with series that the store made small already. Colours and dashes are classes of the style sheet, so that
both schemes of colours fit; each chart says in words what it shows. Knows no store.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentlightning.console.markup import Html, element, join

WIDTH, HEIGHT = 420, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 26
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


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line."""

    label: str
    points: Sequence[Point]
    color: int = 0
    """Its number among the curves of a page: the same thing has the same colour in every chart."""


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of a scatter plot that leads somewhere."""

    x: float
    y: float
    title: str
    href: str
    color: int = 0


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
    shown = [
        Curve(
            one.label,
            [point for point in one.points if abs(point.x) < MAX_VALUE and abs(point.y) < MAX_VALUE],
            one.color,
        )
        for one in curves
    ]
    shown = [one for one in shown if one.points]
    if not shown:
        return element("figure", _caption(title), element("p", "no value yet", class_="none"), class_="chart")
    points = [point for one in shown for point in one.points]
    bounds = [edge for point in points for edge in (point.y, *_band(point))]
    x_axis, y_axis = _axes([point.x for point in points], bounds)
    drawn = join(_curve(one, x_axis, y_axis) for one in shown)
    said = "; ".join(_in_words(one, x_label) for one in shown)
    return _figure(title, join([_grid(x_axis, y_axis, x_label), drawn]), f"{title}. {said}", "img", _legend(shown))


def scatter(title: str, dots: Sequence[Dot], x_label: str, y_label: str) -> Html:
    """Returns the dots as a figure; each is a link, which the rows of the page have too: the keyboard skips the dots."""
    dots = [dot for dot in dots if abs(dot.x) < MAX_VALUE and abs(dot.y) < MAX_VALUE]
    if not dots:
        return element("figure", _caption(title), element("p", "no value yet", class_="none"), class_="chart")
    x_axis, y_axis = _axes([dot.x for dot in dots], [dot.y for dot in dots])
    drawn = join(
        element(
            "a",
            element(
                "circle",
                element("title", dot.title),
                cx=x_axis.place(dot.x),
                cy=y_axis.place(dot.y),
                r=4,
                class_=f"dot c{dot.color % COLORS}",
            ),
            href=dot.href,
            tabindex=-1,
            aria_hidden="true",
        )
        for dot in dots
    )
    said = f"{title}: {len(dots)} rollouts, {y_label} against {x_label}"
    return _figure(title, join([_grid(x_axis, y_axis, x_label), drawn]), said, "group")


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


def _axes(xs: Sequence[float], ys: Sequence[float]) -> tuple[Axis, Axis]:
    low, high = min(ys), max(ys)
    if low >= 0 and high <= 1:  # rewards and shares mostly: the same scale from run to run
        low, high = 0.0, max(high, 1.0 if high > 0.3 else high)
    margin = (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    return (
        Axis(min(xs), max(xs), LEFT, WIDTH - RIGHT),
        Axis(low - margin, high + margin, HEIGHT - BOTTOM, TOP),
    )


def _grid(x_axis: Axis, y_axis: Axis, x_label: str) -> Html:
    lines = []
    for value in ticks(y_axis.low, y_axis.high):
        y = y_axis.place(value)
        lines.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        lines.append(element("text", short(value), x=LEFT - 6, y=y + 4, text_anchor="end"))
    whole = x_axis.high - x_axis.low >= 1 and float(x_axis.low).is_integer() and float(x_axis.high).is_integer()
    for value in ticks(x_axis.low, x_axis.high):
        if whole and not float(value).is_integer():
            continue  # steps, turns and tokens have no halves
        lines.append(element("text", short(value), x=x_axis.place(value), y=HEIGHT - BOTTOM + 14, text_anchor="middle"))
    lines.append(element("text", x_label, x=WIDTH - RIGHT, y=HEIGHT - 1, text_anchor="end", class_="axis"))
    return join(lines)


def _curve(curve: Curve, x_axis: Axis, y_axis: Axis) -> Html:
    color = f"c{curve.color % COLORS}" + (" dashed" if curve.color >= COLORS else "")
    places = [(x_axis.place(point.x), y_axis.place(point.y)) for point in curve.points]
    parts = []
    banded = [(point, band) for point in curve.points if (band := _band(point))]
    if banded:
        upper = [f"{x_axis.place(point.x)},{y_axis.place(high)}" for point, (_, high) in banded]
        lower = [f"{x_axis.place(point.x)},{y_axis.place(low)}" for point, (low, _) in reversed(banded)]
        parts.append(element("polygon", points=" ".join(upper + lower), class_=f"band {color}"))
    parts.append(element("polyline", points=" ".join(f"{x},{y}" for x, y in places), class_=f"curve {color}"))
    if len(places) <= MAX_MARKED:
        for (x, y), point in zip(places, curve.points, strict=True):
            told = element("title", f"{curve.label} {short(point.x)}: {short(point.y)}")
            parts.append(element("circle", told, cx=x, cy=y, r=2.2, class_=f"dot {color}"))
    return join(parts)


def _band(point: Point) -> tuple[float, float] | tuple[()]:
    """Both edges, where they are finite and differ."""
    low, high = point.low, point.high
    if low is None or high is None or low == high or not (abs(low) < MAX_VALUE and abs(high) < MAX_VALUE):
        return ()
    return low, high


def _in_words(curve: Curve, x_label: str) -> str:
    first, last = curve.points[0], curve.points[-1]
    best = max(curve.points, key=lambda point: point.y)
    return (
        f"{curve.label}: {short(first.y)} at {x_label} {short(first.x)}, {short(last.y)} at {short(last.x)}, highest "
        f"{short(best.y)} at {short(best.x)}"
    )


def _legend(curves: Sequence[Curve]) -> Html | None:
    if len(curves) < 2:
        return None
    swatches = [
        element("li", element("svg", element("line", x1=0, x2=18, y1=5, y2=5, class_=_line_class(one)), width=18, height=10,
                              aria_hidden="true"), " ", one.label)
        for one in curves
    ]  # fmt: skip
    return element("ul", *swatches, class_="legend")


def _line_class(curve: Curve) -> str:
    return f"curve c{curve.color % COLORS}" + (" dashed" if curve.color >= COLORS else "")


def _caption(title: str) -> Html:
    return element("figcaption", title)


def _figure(title: str, drawing: Html, said: str, role: str, legend: Html | None = None) -> Html:
    svg = element("svg", drawing, viewBox=f"0 0 {WIDTH} {HEIGHT}", role=role, aria_label=said)
    return element("figure", _caption(title), svg, legend, class_="chart")
