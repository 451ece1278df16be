"""The list of runs, the alarms that hold now, and one run: headline, live curves, alarms, cost, configuration."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from markupsafe import Markup

from agentlightning.analysis.compare import HELD_OUT, SLOPE_STEPS, TRAIN, amount_text, read_cost, run_figures
from agentlightning.analysis.intervals import Z
from agentlightning.analysis.run_settings import differing, flat_settings, tags_of
from agentlightning.console.charts import Chart, Curve, Point, line_chart, spark
from agentlightning.console.reader import MAX_RUNS, Curves, Reader
from agentlightning.console.render import Page, Query, Templates, choice, first
from agentlightning.errors import InputError
from agentlightning.records import Run
from agentlightning.store.summaries import SeriesPoint
from agentlightning.trainer.monitor.health_checks import active_alarms, begun_alarms

HELD_OUT_ERROR = "eval/greedy/reward_stderr"
STEP_TIME = "time/step_s"
REWARD = {TRAIN: "training", HELD_OUT: "held-out, greedy", "eval/sampled/reward_mean": "held-out, T = 1"}
CHARTS: Sequence[tuple[str, Mapping[str, str]]] = (
    ("Validation reward of prompts", {"prompts/best_mean": "best so far", "prompts/batch_mean": "batch"}),
    ("Rollouts of a search", {"prompts/rollouts": "rollouts"}),
    ("Entropy (nats per token)", {"policy/entropy": "entropy"}),
    ("KL (nats per token)", {"policy/kl": "sampler and policy", "policy/ref_kl": "reference"}),
    ("Loss", {"train/loss": "training", "eval/loss": "held-out"}),
    ("Tokens of a step", {"train/tokens_sampled": "sampled", "train/tokens_trained": "trained"}),
    ("Trained share of tokens", {"train/trained_token_share": "trained share"}),
    ("Calls of a rollout", {"rollout/turns": "turns"}),
    ("Seconds of a step", {"time/collect_s": "collect", "time/prepare_s": "prepare", "time/update_s": "update",
                           "time/publish_s": "publish"}),
)  # fmt: skip
"""Smaller charts of a run: title, and curves by metric."""
SHOWN_RUNS = 50
SORTS = ("newest", "best", "rise", "name")
MAX_PRICE = 1e6
RECENT_STEPS = 10
"""Steps whose mean time the time left is estimated by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A run of the list."""

    run: Run
    state: str
    tags: list[str]
    model: str
    step: int | None
    steps: int | None
    base: float | None
    best: float | None
    line: str
    """The sparkline of its rewards."""
    seconds: float
    alarms: list[str]

    @property
    def rise(self) -> float:
        """From its base to its best; least where it is unknown."""
        return float("-inf") if self.base is None or self.best is None else self.best - self.base


async def runs_page(reader: Reader, query: Query) -> Page:
    """Runs with a search, an order and a choice of those to compare; those of ``agl check`` are hidden."""
    search, sort, checks = first(query, "search"), choice(query, "sort", SORTS), bool(first(query, "checks"))
    found = await reader.runs(search, checks)
    shown = found if sort != "newest" or first(query, "all") else found[:SHOWN_RUNS]
    rows = [await _row(reader, run) for run in shown]
    keys = {
        "best": lambda row: -(float("-inf") if row.best is None else row.best),
        "rise": lambda row: -row.rise,
        "name": lambda row: row.run.name.lower(),
    }
    if sort in keys:
        rows.sort(key=keys[sort])
    values = {"search": search, "sort": sort, "sorts": SORTS, "checks": checks, "rows": rows}
    hidden = len(await reader.runs(checks=True)) - len(await reader.runs())
    return Page(
        template="runs.html",
        title="Runs",
        values={**values, "more": len(found) - len(rows), "hidden": 0 if checks else hidden, "limit": MAX_RUNS},
    )


async def _row(reader: Reader, run: Run) -> RunRow:
    series = await reader.rewards(run)
    held_out = [one.value for one in series.get(HELD_OUT, ())]
    train = [one.value for one in series.get(TRAIN, ())]
    given = _number(run.summary.get(HELD_OUT))
    values = held_out or ([] if given is None else [given])
    return RunRow(
        run=run,
        state=reader.state(run),
        tags=tags_of(run),
        model=str(_table(run, "model").get("name") or _table(run, "model").get("path") or "").rpartition("/")[2],
        step=run.summary.get("step"),
        steps=_table(run, "trainer").get("steps"),
        base=values[0] if len(values) > 1 else None,
        best=max(values, default=None),
        line=spark(train if len(train) > 1 else held_out),
        seconds=(run.updated_ns - run.created_ns) / 1e9,
        alarms=list(active_alarms(run)),
    )


async def choose_page(reader: Reader, path: str, title: str) -> Page:
    """The newest runs as links to this page about them."""
    rows = [(run, reader.state(run)) for run in (await reader.runs())[:SHOWN_RUNS]]
    return Page(template="choose.html", title=title, values={"path": path, "rows": rows})


async def alerts_page(reader: Reader, query: Query) -> Page:
    """Alarms of the newest runs."""
    rows = [
        (run, reader.state(run), name, text)
        for run in await reader.runs(checks=True)
        for name, text in active_alarms(run).items()
    ]
    return Page(template="alerts.html", title="Alerts", values={"rows": rows, "limit": MAX_RUNS})


async def run_page(reader: Reader, templates: Templates, run: Run, query: Query) -> Page:
    """A run: what moves, then what it cost and how it is configured."""
    other = await reader.run(given) if (given := first(query, "with")) else None
    cost, price = await read_cost(reader.store, run.id), _price(query)
    seconds = _seconds(run, await reader.curves(run.id))
    values = {
        "live": await live_part(reader, templates, run),
        "seconds": seconds,
        "price": first(query, "hour"),
        "money": None if price is None else f"{price * seconds / 3600:,.2f}",
        "cost": {name: amount_text(value) for name, value in cost.amounts.items()},
        "estimated": cost.estimated,
        "others": [one for one in await reader.runs() if one.id != run.id],
        "other": other,
        "settings": differing([flat_settings(run.config), flat_settings(other.config)]) if other else [],
    }
    return Page(template="run.html", title=run.name or run.id, values=values, run=run)


def _price(query: Query) -> float | None:
    """The price of an hour that the address names: no record knows what its machines cost. InputError for no amount."""
    given = first(query, "hour")
    try:
        price = float(given) if given else None
    except ValueError:
        price = -1.0
    if price is not None and not 0 <= price < MAX_PRICE:
        raise InputError(f"hour: expected the price of an hour, such as 2.50, got {given[:80]!r}")
    return price


def _seconds(run: Run, curves: Curves) -> float:
    """From the run's start to its last metric."""
    last_ns = max((points[-1].created_ns for points in curves.series.values() if points), default=run.created_ns)
    return (last_ns - run.created_ns) / 1e9


async def live_part(reader: Reader, templates: Templates, run: Run) -> Markup:
    """The parts of a run that move, which are drawn once for all who look."""
    curves = await reader.curves(run.id)
    alarms = active_alarms(run)
    step, shown = run.summary.get("step"), reader.state(run)
    told = orjson.dumps([alarms, begun_alarms(run)], default=str).decode()
    state = f"{curves.version} {run.name} {step} {shown} {told}"
    if curves.drawn is None or curves.drawn[0] != state:
        values = _live_values(run, curves)
        part = templates.draw("run_live.html", run=run, state=shown, alarms=alarms, **values)
        curves.drawn = state, Markup(part)
    return curves.drawn[1]


def _live_values(run: Run, curves: Curves) -> dict[str, Any]:
    series = {name: points for name, points in curves.series.items() if points}
    held_out, train = ({point.step: point.value for point in series.get(name, ())} for name in (HELD_OUT, TRAIN))
    steps, step = _table(run, "trainer").get("steps"), max(train, default=run.summary.get("step"))
    recent = [point.value for point in series.get(STEP_TIME, ())][-RECENT_STEPS:]
    left = max(0, steps - step) if isinstance(steps, int) and isinstance(step, int) else None
    begun = begun_alarms(run)
    small = [_chart(title, names, series) for title, names in CHARTS]
    return {
        "tags": tags_of(run),
        "progress": curves.progress,
        "figures": run_figures(run, held_out, train),
        "reward": train[max(train)] if train else None,
        "slope_steps": SLOPE_STEPS,
        "step": step,
        "steps": steps,
        "left_s": left * statistics.fmean(recent) if left and recent else None,
        "seconds": _seconds(run, curves),
        "chart": _chart("Reward", REWARD, series, large=True, events=[(at, name) for at, name, _ in begun]),
        "begun": begun,
        "small": [one for one in small if one is not None],
    }


def _chart(
    title: str,
    names: Mapping[str, str],
    series: Mapping[str, Sequence[SeriesPoint]],
    large: bool = False,
    events: Sequence[tuple[float, str]] = (),
) -> Chart | None:
    errors = {point.step: Z * point.value for point in series.get(HELD_OUT_ERROR, ())}
    curves = []
    for color, (name, label) in enumerate(names.items()):
        points = [Point(one.step, one.value, one.low, one.high) for one in series.get(name, ())]
        if name == HELD_OUT:
            spread = [(one, errors.get(round(one.x), 0.0)) for one in points]
            points = [Point(one.x, one.y, one.y - error, one.y + error) for one, error in spread]
        curves.append(Curve(label, points, color, measured=name == HELD_OUT and len(points) <= SHOWN_RUNS))
    return line_chart(title, curves, large=large, events=events)


def _table(run: Run, name: str) -> Mapping[str, Any]:
    found = run.config.get(name)
    return found if isinstance(found, Mapping) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
