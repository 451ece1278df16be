"""Several runs in the same charts, with bands over seeds, and the settings that differ."""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from agentlightning.analysis.compare import HELD_OUT, TRAIN, PairedDifference, RunComparison, compare_runs
from agentlightning.console.charts import Curve, Point, line_chart
from agentlightning.console.markup import (
    Html,
    Query,
    clipped,
    element,
    first,
    form,
    interval,
    note,
    page,
    run_link,
    select,
    setting,
    table,
)
from agentlightning.console.reader import Reader
from agentlightning.records import Run
from agentlightning.store.summaries import SeriesPoint

MAX_NAME_CHARS = 60
"""Of a run's name in the legend of each chart."""
METRICS: Mapping[str, str] = MappingProxyType(
    {
        TRAIN: "Training reward",
        HELD_OUT: "Held-out reward, greedy",
        "policy/entropy": "Entropy (nats per token)",
        "policy/kl": "KL (nats per token)",
        "rollout/turns": "Calls of a rollout",
        "train/trained_token_share": "Trained share of tokens",
    }
)
HEAD = (
    *("run", "state", "step", "held-out", "best", "90% of it at step"),
    *("reward per step at the end", "against the first"),
)


async def compare_page(reader: Reader, query: Query) -> Html:
    """The runs of the address against each other; the first is the baseline."""
    ids = list(dict.fromkeys(one for value in query.get("run", ()) for one in value.split(",") if one))
    if len(ids) < 2:
        none = "Choose two runs or more in the list of runs, or name them in the address: /compare?run=A&run=B"
        return page("Compare", note(none))
    together = first(query, "seeds")
    compared = await compare_runs(reader.store, ids)
    runs = {run.id: run for run in await asyncio.gather(*(reader.run(one) for one in ids))}
    series = {one: (await reader.curves(one)).series for one in ids}
    members = [band.run_ids for band in compared.bands] if together else [[one] for one in ids]
    charts = []
    for name, title in METRICS.items():
        curves = [
            _curve([series[one].get(name, ()) for one in group], [runs[one] for one in group], color)
            for color, group in enumerate(members)
        ]
        if any(curve.points for curve in curves):
            charts.append(line_chart(title, curves))
    seeds = select("seeds", "Seeds", {"": "each its own curve", "together": "together, as a band"}, together)
    settings = ([one.name, *map(setting, one.values)] for one in compared.settings)
    return page(
        "Compare",
        form("/compare", seeds, hidden={"run": ",".join(ids)}),
        element("div", *charts, class_="charts") if charts else note("no step is complete yet"),
        element("h2", "Results"),
        _results(compared),
        element("h2", "Settings that differ"),
        table(["setting", *ids], settings, "Settings that differ", "all have the same settings"),
    )


def _curve(series: Sequence[Sequence[SeriesPoint]], runs: Sequence[Run], color: int) -> Curve:
    """One run's curve, or the mean of several at each step with their lowest and highest as the band."""
    name = clipped(runs[0].name or runs[0].id, MAX_NAME_CHARS)
    if len(runs) == 1:
        points = [Point(one.step, one.value, one.low, one.high) for one in series[0]]
        return Curve(f"{name} ({runs[0].id})", points, color)
    by_step: defaultdict[int, list[float]] = defaultdict(list)
    for one in (one for points in series for one in points):
        by_step[one.step].append(one.value)
    band = [Point(step, statistics.fmean(ys), min(ys), max(ys)) for step, ys in sorted(by_step.items())]
    return Curve(f"{name} ({len(runs)} seeds)", band, color)


def _results(compared: RunComparison) -> Html | None:
    against = {one.run_id: one for one in compared.differences}
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
    return table(HEAD, rows, "Results of the runs, with 95% intervals")


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
