"""Several runs in the same charts: over steps, rollouts, tokens or time; bands over seeds; settings that differ."""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agentlightning.console.charts import Curve, Point, line_chart
from agentlightning.console.markup import Html, element, join
from agentlightning.console.pages.run import HELD_OUT, REWARD, near_best_step
from agentlightning.console.parts import Query, choice, first, run_link, select, shown, table
from agentlightning.console.reader import Reader
from agentlightning.console.settings import SEED, differing, flat_settings, without_seed
from agentlightning.errors import InputError
from agentlightning.console.contract import SeriesPoint
from agentlightning.types import Run

MAX_RUNS = 20
METRICS = {
    REWARD: "Training reward",
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
    """The runs of the address against each other; the first is the baseline of nothing but the order."""
    ids = list(dict.fromkeys(one for value in query.get("run", ()) for one in value.split(",") if one))
    if not ids:
        none = "Choose runs in the list of runs, or name them in the address: /compare?run=A&run=B"
        return join([element("h1", "Compare"), element("p", none, class_="none")])
    if len(ids) > MAX_RUNS:
        raise InputError(f"run: expected at most {MAX_RUNS} runs, got {len(ids)}")
    axis = choice(query, "x", X_AXES)
    together = first(query, "seeds") == "together"
    runs = await asyncio.gather(*(reader.run(one) for one in ids))
    series = [(await reader.curves(one)).series for one in ids]
    xs = [_x_axis(run, one, axis) for run, one in zip(runs, series, strict=True)]
    settings = [flat_settings(run.config) for run in runs]
    members = _members([without_seed(one) for one in settings]) if together else [[place] for place in range(len(runs))]
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
            element("div", *charts, class_="charts") if charts else element("p", "no step is complete yet", class_="none"),
            element("h2", "Results"),
            table(["run", "name", "state", "seed", "steps", "reward", "held-out", "best held-out", "steps to 90% of the best"],
                  (_row(*one) for one in zip(runs, series, settings, strict=True)), "Results of the runs"),
            element("h2", "Settings that differ"),
            _settings(runs, settings),
        ]
    )  # fmt: skip


def _form(ids: Sequence[str], axis: str, together: bool) -> Html:
    return element(
        "form",
        *(element("input", type="hidden", name="run", value=one) for one in ids),
        select("x", "Over", {name: name for name in X_AXES}, axis),
        select("seeds", "Seeds", {"": "each its own curve", "together": "together, as a band"}, "together" if together else ""),
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


def _members(keys: Sequence[str]) -> list[list[int]]:
    """Places of runs of one key."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        found[key].append(place)
    return list(found.values())


def _curve(curves: Sequence[Mapping[int, Point]], runs: Sequence[Run], color: int) -> Curve:
    """One run's curve, or the mean of several at each step with their lowest and highest as the band."""
    if len(runs) == 1:
        return Curve(f"{runs[0].name or runs[0].id} ({runs[0].id})", list(curves[0].values()), color)
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
    return Curve(f"{runs[0].name or runs[0].id} ({len(runs)} seeds)", band, color)


def _row(run: Run, series: Series, settings: Mapping[str, Any]) -> list[Html | str]:
    reward, held_out = series.get(REWARD, ()), series.get(HELD_OUT, ())
    near = near_best_step(held_out)
    return [
        run_link(run.id),
        run.name,
        run.state,
        _value(settings.get(SEED)),
        _value(run.summary.get("step")),
        shown(reward[-1].value) if reward else "",
        shown(held_out[-1].value) if held_out else "",
        shown(max(point.value for point in held_out)) if held_out else "",
        "" if near is None else str(near),
    ]


def _settings(runs: Sequence[Run], settings: Sequence[Mapping[str, Any]]) -> Html:
    rows = differing(settings)
    if not rows:
        return element("p", "all have the same settings", class_="none")
    head = ["setting", *(run.id for run in runs)]
    return table(head, ([name, *map(_value, values)] for name, values in rows), "Settings that differ")


def _value(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
