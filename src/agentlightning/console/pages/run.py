"""One run: live curves, convergence, alarms, configuration and its difference from another run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agentlightning.console.charts import Curve, Point, line_chart
from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.parts import Query, figures, first, run_link, select, shown, table, when
from agentlightning.console.reader import Reader
from agentlightning.console.settings import differing, flat_settings
from agentlightning.errors import InputError
from agentlightning.console.contract import SeriesPoint
from agentlightning.types import Run

REWARD = "train/reward_mean"
HELD_OUT = "eval/greedy/reward_mean"
CHARTS: Sequence[tuple[str, Mapping[str, str]]] = (
    ("Reward", {REWARD: "training", HELD_OUT: "held-out, greedy", "eval/sampled/reward_mean": "held-out, T = 1"}),
    ("Entropy (nats per token)", {"policy/entropy": "entropy"}),
    ("KL (nats per token)", {"policy/kl": "sampler and policy", "policy/ref_kl": "reference"}),
    ("Loss", {"train/loss": "training", "eval/loss": "held-out"}),
    ("Tokens of a step", {"train/tokens_sampled": "sampled", "train/tokens_trained": "trained"}),
    ("Trained share of tokens", {"train/trained_token_share": "trained share"}),
    ("Calls of a rollout", {"rollout/turns": "turns"}),
    ("Seconds of a step", {"time/collect_s": "collect", "time/prepare_s": "prepare", "time/update_s": "update",
                           "time/publish_s": "publish"}),
)  # fmt: skip
"""Charts of a run: title, and curves by metric."""
WINDOW = 20
"""Last points to which the slope is fitted."""
NEAR_BEST = 0.9


async def run_page(reader: Reader, query: Query) -> Html:
    """The parts of a run that do not move: what it is, how it is configured."""
    run = await _run(reader, query)
    others = [one for one in await reader.runs() if one.id != run.id]
    other = await reader.run(given) if (given := first(query, "with")) else None
    links = [
        element("a", "Rollouts", href=url("/rollouts", {"run": run.id})),
        element("a", "Failed rollouts", href=url("/rollouts", {"run": run.id, "where": "state = 'failed'"})),
    ]
    return join(
        [
            element("h2", "Look into it"),
            element("p", join(part for link in links for part in (link, " "))),
            element("h2", "Configuration"),
            _difference_form(run, others, given),
            _difference(run, other) if other else None,
            element("details", element("summary", "All settings"), element("pre", _json(run.config))),
        ]
    )


async def live_part(reader: Reader, query: Query) -> tuple[str, Html]:
    """The parts of a run that move, and a mark that changes when they do."""
    run = await _run(reader, query)
    curves = await reader.curves(run.id)
    alarms = run.summary.get("alarms") or {}
    warnings = [element("li", element("strong", name), ": ", str(text)) for name, text in alarms.items()]
    series = {name: points for name, points in curves.series.items() if points}
    drawn = [_chart(title, names, series) for title, names in CHARTS if any(name in series for name in names)]
    view = join(
        [
            element("h1", run.name or run.id),
            element("p", run.id, " ", element("span", run.state, class_=f"state {run.state}"), " since ",
                    when(run.created_ns), " UTC"),
            element("div", element("h2", "Alarms"), element("ul", *warnings), class_="alarms") if warnings else None,
            figures(_figures(run, series)),
            element("div", *drawn, class_="charts") if drawn else element("p", "no step is complete yet", class_="none"),
        ]
    )  # fmt: skip
    return f"{curves.version} {run.state} {orjson.dumps(alarms, default=str).decode()}", view


async def _run(reader: Reader, query: Query) -> Run:
    run_id = first(query, "run")
    if not run_id:
        raise InputError("run: expected the id of a run in the address")
    return await reader.run(run_id)


def _chart(title: str, names: Mapping[str, str], series: Mapping[str, Sequence[SeriesPoint]]) -> Html:
    curves = [
        Curve(label, [Point(one.step, one.value, one.low, one.high) for one in series[name]], color)
        for color, (name, label) in enumerate(names.items())
        if name in series
    ]
    return line_chart(title, curves)


def _figures(run: Run, series: Mapping[str, Sequence[SeriesPoint]]) -> dict[str, str | None]:
    held_out, reward = series.get(HELD_OUT, ()), series.get(REWARD, ())
    best = max(held_out, key=lambda point: point.value, default=None)
    change = slope([(point.step, point.value) for point in reward[-WINDOW:]])
    near = near_best_step(held_out)
    return {
        "step": str(run.summary.get("step", "-")),
        "reward": shown(reward[-1].value) if reward else None,
        "held-out": shown(held_out[-1].value) if held_out else None,
        "best held-out": f"{best.value:.3f} at step {best.step}" if best else None,
        "steps to 90% of the best": None if near is None else str(near),
        f"slope of the last {WINDOW} points": None if change is None else f"{change:+.4f} per step",
    }


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """The least-squares slope through the points; None for fewer than three.

    >>> slope([(0, 1.0), (1, 3.0), (2, 5.0)]), slope([(0, 1.0)])
    (2.0, None)
    """
    if len(points) < 3:
        return None
    x0, y0 = (sum(numbers) / len(points) for numbers in zip(*points, strict=True))
    spread = sum((x - x0) ** 2 for x, _ in points)
    return sum((x - x0) * (y - y0) for x, y in points) / spread if spread else None


def near_best_step(points: Sequence[SeriesPoint]) -> int | None:
    """The first step with 90 % of the rise from the first value to the best; None where nothing rose."""
    best = max((point.value for point in points), default=0.0)
    if not points or best <= points[0].value:
        return None
    bound = points[0].value + NEAR_BEST * (best - points[0].value)
    return next(point.step for point in points if point.value >= bound)


def _difference_form(run: Run, others: Sequence[Run], given: str) -> Html | None:
    if not others:
        return None
    options = {"": "choose a run"} | {one.id: f"{one.id} {one.name}" for one in others}
    return element(
        "form",
        element("input", type="hidden", name="run", value=run.id),
        select("with", "Difference from", options, given),
        element("button", "Show"),
        action="/run",
        method="get",
        class_="bar",
    )


def _difference(run: Run, other: Run) -> Html:
    rows = differing([flat_settings(run.config), flat_settings(other.config)])
    if not rows:
        return element("p", "both have the same settings")
    cells = ([name, *(_value(value) for value in values)] for name, values in rows)
    return table(["setting", run.id, run_link(other.id)], cells, f"Settings that differ from {other.id}")


def _value(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def _json(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS, default=str).decode()
