"""Several runs in the same charts: over steps, rollouts, tokens or time; bands over seeds; settings that differ."""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from agentlightning.analysis.compare import HELD_OUT, TRAIN, PairedDifference, RunComparison, compare_runs
from agentlightning.console.charts import Curve, Point, line_chart
from agentlightning.console.markup import Html, element, join
from agentlightning.console.parts import Query, choice, clipped, first, interval, run_link, select, setting, table
from agentlightning.console.reader import Reader
from agentlightning.records import Run
from agentlightning.store.summaries import SeriesPoint

MAX_NAME_CHARS = 60
"""Of a run's name beside each chart."""
METRICS = {
    TRAIN: "Training reward",
    HELD_OUT: "Held-out reward, greedy",
    "policy/entropy": "Entropy (nats per token)",
    "policy/kl": "KL (nats per token)",
    "rollout/turns": "Calls of a rollout",
    "train/trained_token_share": "Trained share of tokens",
}
X_AXES = ("step", "rollouts", "tokens", "hours")
SUMMED = {"rollouts": "rollout/count", "tokens": "train/tokens_sampled"}
"""Metrics of a step whose sum so far is an axis."""

Series = Mapping[str, Sequence[SeriesPoint]]


async def compare_page(reader: Reader, query: Query) -> Html:
    """The runs of the address against each other; the first is the baseline."""
    ids = list(dict.fromkeys(one for value in query.get("run", ()) for one in value.split(",") if one))
    if len(ids) < 2:
        none = "Choose two runs or more in the list of runs, or name them in the address: /compare?run=A&run=B"
        return join([element("h1", "Compare"), element("p", none, class_="none")])
    axis = choice(query, "x", X_AXES)
    together = first(query, "seeds") == "together"
    compared = await compare_runs(reader.store, ids)
    runs = await asyncio.gather(*(reader.run(one) for one in ids))
    series = [(await reader.curves(one)).series for one in ids]
    xs = [_x_axis(run, one, axis) for run, one in zip(runs, series, strict=True)]
    places = {run.id: place for place, run in enumerate(runs)}
    members = (
        [[places[one] for one in band.run_ids] for band in compared.bands]
        if together
        else [[place] for place in range(len(runs))]
    )
    charts = []
    for name, title in METRICS.items():
        points = [_points(one.get(name, ()), x) for one, x in zip(series, xs, strict=True)]
        curves = [_curve([points[place] for place in group], [runs[place] for place in group], color)
                  for color, group in enumerate(members)]  # fmt: skip
        if any(curve.points for curve in curves):
            charts.append(line_chart(title, curves, axis))
    return join(
        [
            element("h1", "Compare"),
            _form(ids, axis, together),
            element("div", *charts, class_="charts")
            if charts
            else element("p", "no step is complete yet", class_="none"),
            element("h2", "Results"),
            _results(compared),
            element("h2", "Settings that differ"),
            _settings(compared),
        ]
    )


def _form(ids: Sequence[str], axis: str, together: bool) -> Html:
    return element(
        "form",
        *(element("input", type="hidden", name="run", value=one) for one in ids),
        select("x", "Over", {name: name for name in X_AXES}, axis),
        select(
            "seeds",
            "Seeds",
            {"": "each its own curve", "together": "together, as a band"},
            "together" if together else "",
        ),
        element("button", "Show"),
        action="/compare",
        method="get",
        class_="bar",
    )


def _x_axis(run: Run, series: Series, axis: str) -> dict[int, float] | None:
    """The place of each step on the axis; None where the step itself is it.

    Where the store gave every n-th step only, a step's number stands for those left out before it.
    """
    if axis == "step":
        return None
    if axis == "hours":
        return {point.step: (point.created_ns - run.created_ns) / 3.6e12 for one in series.values() for point in one}
    total, last, found = 0.0, 0, {0: 0.0}
    for point in series.get(SUMMED[axis], ()):
        total += point.value * max(1, point.step - last)
        found[point.step], last = total, point.step
    return found


def _points(series: Sequence[SeriesPoint], x: Mapping[int, float] | None) -> dict[int, Point]:
    """Points by step; those whose place on the axis is not known are left out."""
    return {
        one.step: Point(one.step if x is None else x[one.step], one.value, one.low, one.high)
        for one in series
        if x is None or one.step in x
    }


def _curve(curves: Sequence[Mapping[int, Point]], runs: Sequence[Run], color: int) -> Curve:
    """One run's curve, or the mean of several at each step with their lowest and highest as the band."""
    name = clipped(runs[0].name or runs[0].id, MAX_NAME_CHARS)
    if len(runs) == 1:
        return Curve(f"{name} ({runs[0].id})", list(curves[0].values()), color)
    by_step: defaultdict[int, list[Point]] = defaultdict(list)
    for curve in curves:
        for step, point in curve.items():
            by_step[step].append(point)
    band = [
        Point(
            statistics.fmean(point.x for point in points),
            statistics.fmean(point.y for point in points),
            min(point.y for point in points),
            max(point.y for point in points),
        )
        for _, points in sorted(by_step.items())
    ]
    return Curve(f"{name} ({len(runs)} seeds)", band, color)


def _results(compared: RunComparison) -> Html:
    against = {one.run_id: one for one in compared.differences}
    head = [
        "run",
        "state",
        "step",
        "held-out",
        "best",
        "90% of it at step",
        "reward per step at the end",
        "against the first",
    ]
    rows = [
        [
            run_link(one.run_id),
            one.state,
            setting(one.step),
            _at(one.held_out, one.held_out_step),
            _at(one.best, one.best_step),
            setting(one.near_best_step),
            "-" if one.slope is None else interval(one.slope, "+.4f"),
            _difference(against.get(one.run_id)),
        ]
        for one in compared.figures
    ]
    return table(head, rows, "Results of the runs, with 95% intervals")


def _difference(one: PairedDifference | None) -> str:
    """The held-out reward against the first run's, over the tasks of both."""
    if one is None:
        return ""
    if one.difference is None:
        return f"{one.tasks} held-out tasks in common: too few to compare"
    sure = "" if one.difference.excludes_zero else "; chance alone may do that"
    return f"{interval(one.difference, '+.3f')} over {one.tasks} held-out tasks{sure}"


def _at(value: float | None, step: int | None) -> str:
    return "-" if value is None else f"{value:.3f} at {step}"


def _settings(compared: RunComparison) -> Html:
    if not compared.settings:
        return element("p", "all have the same settings", class_="none")
    head = ["setting", *(one.run_id for one in compared.figures)]
    rows = ([one.name, *map(setting, one.values)] for one in compared.settings)
    return table(head, rows, "Settings that differ")
