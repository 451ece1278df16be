"""Lanes: the latest steps of a run along the clock, and how busy each part of it was in each of them.

Driven by the page about bottlenecks. The phases of a step follow one another and are drawn where they lay; of a lane the
height says the share of the step in which it was busy, for nothing finer is recorded. Knows no store.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.analysis.bottlenecks import PHASES, Lane, StepTimes
from agentlightning.console.charts import short
from agentlightning.console.markup import Html, element, join

LANES = ("sampler", "gateway", "workers", "agents", "reward", "learner")
WIDTH, LEFT, RIGHT = 900, 76, 8
ROW, GAP, TOP, BOTTOM = 26, 8, 4, 20
MIN_NAMED = 28
"""Width from which a step's number stands below it."""


def lanes(steps: Sequence[StepTimes]) -> Html:
    """Returns the steps as a figure: phases in the first row, a row per lane below; lanes without a number are left out."""
    names = [name for name in LANES if any(_share(step.busy, name) is not None for step in steps)]
    total = sum(step.seconds for step in steps)
    height = TOP + (len(names) + 1) * (ROW + GAP) + BOTTOM
    parts = [
        element("text", name, x=LEFT - 8, y=_top(row) + ROW - 8, text_anchor="end")
        for row, name in enumerate(("phases", *names))
    ]
    start = float(LEFT)
    for step in steps:
        width = (WIDTH - LEFT - RIGHT) * step.seconds / total
        parts.append(_phases(step, start, width))
        parts += [_bar(step, name, row, start, width) for row, name in enumerate(names, 1)]
        if width >= MIN_NAMED:
            parts.append(element("text", step.step, x=f"{start + width / 2:.1f}", y=height - 5, text_anchor="middle"))
        start += width
    first, last = steps[0].step, steps[-1].step
    said = f"steps {first} to {last} in {short(total)} seconds; the table below has the numbers"
    svg = element("svg", join(parts), viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=f"Lanes: {said}")
    legend = [
        element("li", element("svg", element("rect", width=12, height=10, class_=f"phase p{number}"), width=12, height=10,
                              aria_hidden="true"), " ", name)
        for number, name in enumerate((*PHASES, "other"))
    ]  # fmt: skip
    return element(
        "figure",
        element("figcaption", f"Steps {first} to {last}, {short(total)} s from left to right"),
        svg,
        element("ul", *legend, class_="legend"),
        class_="chart lanes",
    )


def _phases(step: StepTimes, start: float, width: float) -> Html:
    """One after the other, as they were."""
    parts, done = [], 0.0
    for number, name in enumerate((*PHASES, "other")):
        share = min(_share(step.phases, name) or 0.0, 1 - done)
        if share <= 0:
            continue
        title = element("title", f"step {step.step}, {name}: {short(share * step.seconds)} s, {share:.0%}")
        parts.append(
            element(
                "rect",
                title,
                x=f"{start + done * width:.1f}",
                width=f"{share * width:.1f}",
                y=_top(0),
                height=ROW,
                class_=f"phase p{number}",
            )
        )
        done += share
    return join(parts)


def _bar(step: StepTimes, name: str, row: int, start: float, width: float) -> Html:
    share = _share(step.busy, name)
    place = {"x": f"{start:.1f}", "width": f"{max(0.5, width - 1):.1f}"}
    ground = element("rect", y=_top(row), height=ROW, class_="ground", **place)
    if share is None:
        return ground
    title = element("title", f"step {step.step}, {name}: busy {share:.0%}")
    height = round(share * ROW, 1)
    return join([ground, element("rect", title, y=_top(row) + ROW - height, height=height, class_="busy", **place)])


def _top(row: int) -> int:
    return TOP + row * (ROW + GAP)


def _share(of: Sequence[Lane], name: str) -> float | None:
    return next((lane.share for lane in of if lane.name == name), None)
