"""One run: live curves, convergence, alarms, configuration and its difference from another run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from agentlightning.analysis.compare import HELD_OUT, SLOPE_STEPS, TRAIN, run_figures
from agentlightning.analysis.run_cost import RunCost, amount_text, read_cost
from agentlightning.analysis.run_settings import differing, flat_settings
from agentlightning.console.charts import Curve, Point, line_chart
from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.parts import Query, figures, first, interval, run_link, select, setting, shown, table, when
from agentlightning.console.reader import Curves, Reader
from agentlightning.errors import InputError
from agentlightning.records import Run
from agentlightning.store.summaries import SeriesPoint
from agentlightning.trainer.monitor.health_checks import active_alarms

CHARTS: Sequence[tuple[str, Mapping[str, str]]] = (
    ("Reward", {TRAIN: "training", HELD_OUT: "held-out, greedy", "eval/sampled/reward_mean": "held-out, T = 1"}),
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
"""Charts of a run: title, and curves by metric."""


async def run_page(reader: Reader, query: Query) -> Html:
    """The parts of a run that do not move: what it is, how it is configured."""
    run = await _run(reader, query)
    others = [one for one in await reader.runs() if one.id != run.id]
    other = await reader.run(given) if (given := first(query, "with")) else None
    links = [
        element("a", "Rewards", href=url("/rewards", {"run": run.id})),
        element("a", "Rollouts", href=url("/rollouts", {"run": run.id})),
        element("a", "Failed rollouts", href=url("/rollouts", {"run": run.id, "where": "state = 'failed'"})),
        *(
            element("a", name, href=url(path, {"run": run.id}))
            for path, name in (
                ("/bottlenecks", "Bottlenecks"),
                ("/suggestions", "Suggestions"),
                ("/prompts", "Prompts"),
                ("/models", "Models"),
            )
        ),
    ]
    return join(
        [
            element("h2", "Look into it"),
            element("p", join(part for link in links for part in (link, " "))),
            element("h2", "Cost of its training steps"),
            _cost(await read_cost(reader.store, run.id)),
            element("h2", "Configuration"),
            _difference_form(run, others, given),
            _difference(run, other) if other else None,
            element("details", element("summary", "All settings"), element("pre", _json(run.config))),
        ]
    )


async def live_part(reader: Reader, query: Query) -> Html:
    """The parts of a run that move, which are drawn once for all who look."""
    run = await _run(reader, query)
    curves = await reader.curves(run.id)
    alarms = active_alarms(run)
    state = f"{curves.version} {run.name} {run.state} {orjson.dumps(alarms, default=str).decode()}"
    if curves.drawn is None or curves.drawn[0] != state:
        curves.drawn = state, _live_part(run, curves, alarms)
    return curves.drawn[1]


def _live_part(run: Run, curves: Curves, alarms: Mapping[str, object]) -> Html:
    warnings = [element("li", element("strong", name), ": ", str(text)) for name, text in alarms.items()]
    series = {name: points for name, points in curves.series.items() if points}
    drawn = [_chart(title, names, series) for title, names in CHARTS if any(name in series for name in names)]
    return join(
        [
            element("h1", run.name or run.id),
            element("p", run.id, " ", element("span", run.state, class_=f"state {run.state}"), " since ",
                    when(run.created_ns), " UTC"),
            element("div", element("h2", "Alarms"), element("ul", *warnings), class_="alarms") if warnings else None,
            figures(_figures(run, series)),
            element("div", *drawn, class_="charts") if drawn else element("p", "no step is complete yet", class_="none"),
        ]
    )  # fmt: skip


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
    held_out, train = ({point.step: point.value for point in series.get(name, ())} for name in (HELD_OUT, TRAIN))
    known = run_figures(run, held_out, train)
    rise = known.slope
    return {
        "step": "-" if known.step is None else str(known.step),
        "reward": shown(train[max(train)]) if train else None,
        "held-out": None if known.held_out is None else f"{known.held_out:.3f} at step {known.held_out_step}",
        "best held-out": None if known.best is None else f"{known.best:.3f} at step {known.best_step}",
        "steps to 90% of the best": None if known.near_best_step is None else str(known.near_best_step),
        f"reward per step, last {SLOPE_STEPS}": None if rise is None else interval(rise, "+.4f"),
    }


def _cost(cost: RunCost) -> Html:
    if not cost.amounts:
        return element("p", "no step has recorded what it cost", class_="none")
    about = "about " if cost.estimated else ""
    known = {name: about + amount_text(value) for name, value in cost.amounts.items()}
    note = "when this page was opened; evaluations and repeated attempts are not counted"
    return join([figures(known), element("p", note, class_="none")])


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
    cells = ([one.name, *map(setting, one.values)] for one in rows)
    return table(["setting", run.id, run_link(other.id)], cells, f"Settings that differ from {other.id}")


def _json(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS, default=str).decode()
