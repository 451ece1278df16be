"""Several runs in the same charts, with bands over seeds, and the settings that differ."""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from agentlightning.analysis.compare import HELD_OUT, TRAIN, compare_runs
from agentlightning.console.charts import Curve, Point, line_chart
from agentlightning.console.reader import Reader
from agentlightning.console.render import Page, Query, clipped, first
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


async def compare_page(reader: Reader, query: Query) -> Page:
    """The runs of the address against each other, the first as the baseline; without two, runs to choose from."""
    ids = list(dict.fromkeys(one for value in query.get("run", ()) for one in value.split(",") if one))
    choices = [(run, reader.state(run)) for run in await reader.runs()]
    values = {"choices": choices, "chosen": ids, "compared": None}
    if len(ids) < 2:
        return Page(template="compare.html", title="Compare", values=values)
    together = first(query, "seeds")
    compared = await compare_runs(reader.store, ids)
    runs = {run.id: run for run in await asyncio.gather(*(reader.run(one) for one in ids))}
    series = {one: (await reader.curves(one)).series for one in ids}
    members = [band.run_ids for band in compared.bands] if together else [[one] for one in ids]
    charts = []
    for place, (name, title) in enumerate(METRICS.items()):
        curves = [
            _curve([series[one].get(name, ()) for one in group], [runs[one] for one in group], color)
            for color, group in enumerate(members)
        ]
        charts.append(line_chart(title, curves, large=not place))
    values |= {
        "compared": compared,
        "together": together,
        "names": {run.id: run.name or run.id for run in runs.values()},
        "against": {one.run_id: one for one in compared.differences},
        "charts": [one for one in charts if one is not None],
    }
    return Page(template="compare.html", title="Compare", values=values)


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
