"""The list of runs, the alarms that hold now, and one run: live curves, convergence, alarms, configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import orjson

from agentlightning.analysis.compare import HELD_OUT, SLOPE_STEPS, TRAIN, RunCost, amount_text, read_cost, run_figures
from agentlightning.analysis.run_settings import differing, flat_settings, tags_of
from agentlightning.console.charts import Curve, Point, line_chart
from agentlightning.console.markup import (
    Html,
    Query,
    clipped,
    element,
    field,
    figures,
    first,
    form,
    interval,
    join,
    json_text,
    link,
    note,
    page,
    run_link,
    select,
    setting,
    shown,
    table,
    when,
)
from agentlightning.console.reader import MAX_RUNS, Curves, Reader
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


async def runs_page(reader: Reader, query: Query) -> Html:
    """Runs, newest first, with a search and a choice of those to compare."""
    search = first(query, "search")
    found = await reader.runs(search)
    searching = form("/", field("Search", "search", search, type="search"), button="Search")
    if not found:
        return page("Runs", searching, note("no run matches" if search else "no run yet; start one with: agl demo"))
    head = ["compare", "run", "name", "tags", "state", "step", "reward", "held-out", "alarms", "created (UTC)"]
    rows = table(head, (_row(run) for run in found), "Runs, newest first")
    chosen = element("form", rows, element("button", "Compare the chosen runs"), action="/compare", method="get")
    more = f"the newest {MAX_RUNS} runs are looked at" if len(found) == MAX_RUNS else None
    return page("Runs", searching, chosen, note(more))


def _row(run: Run) -> list[Html | str]:
    numbers = [run.summary.get(name) for name in (TRAIN, HELD_OUT)]
    return [
        element("input", type="checkbox", name="run", value=run.id, aria_label=f"compare {run.id}"),
        run_link(run.id),
        clipped(run.name),
        join((link(tag, "/", search=tag) for tag in tags_of(run)), " "),
        element("span", run.state, class_=f"state {run.state}"),
        str(run.summary.get("step", "")),
        *(shown(float(each)) if isinstance(each, int | float) else "" for each in numbers),
        ", ".join(active_alarms(run)),
        when(run.created_ns),
    ]


async def alerts_page(reader: Reader, query: Query) -> Html:
    """Alarms of the newest runs."""
    runs = await reader.runs()
    rows = [
        [run_link(run.id), run.name, run.state, name, text] for run in runs for name, text in active_alarms(run).items()
    ]
    head = ["run", "name", "state", "alarm", "problem"]
    more = f"of the newest {MAX_RUNS} runs" if len(runs) == MAX_RUNS else None
    return page("Alerts", table(head, rows, "Alarms", "no alarm holds"), note(more))


async def run_page(reader: Reader, query: Query) -> Html:
    """The parts of a run that do not move: what it is, how it is configured."""
    run = await _run(reader, query)
    others = {one.id: f"{one.id} {one.name}" for one in await reader.runs() if one.id != run.id}
    other = await reader.run(given) if (given := first(query, "with")) else None
    names = ("Rewards", "Rollouts", "Bottlenecks", "Suggestions", "Prompts", "Models")
    links = [link(name, f"/{name.lower()}", run=run.id) for name in names]
    links.append(link("Failed rollouts", "/rollouts", run=run.id, where="state = 'failed'"))
    choose = select("with", "Difference from", {"": "choose a run"} | others, given)
    return join(
        [
            element("h2", "Look into it"),
            element("p", join(links, " ")),
            element("h2", "Cost of its training steps"),
            _cost(await read_cost(reader.store, run.id)),
            element("h2", "Configuration"),
            form("/run", choose, hidden={"run": run.id}) if others else None,
            _difference(run, other) if other else None,
            element("details", element("summary", "All settings"), element("pre", json_text(run.config))),
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
    state = element("span", run.state, class_=f"state {run.state}")
    return page(
        run.name or run.id,
        element("p", run.id, " ", state, " since ", when(run.created_ns), " UTC"),
        element("div", element("h2", "Alarms"), element("ul", *warnings), class_="alarms") if warnings else None,
        figures(_figures(run, series)),
        element("div", *drawn, class_="charts") if drawn else note("no step is complete yet"),
    )


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
    return {
        "step": setting(known.step),
        "reward": shown(train[max(train)]) if train else None,
        "held-out": None if known.held_out is None else f"{known.held_out:.3f} at step {known.held_out_step}",
        "best held-out": None if known.best is None else f"{known.best:.3f} at step {known.best_step}",
        "steps to 90% of the best": None if known.near_best_step is None else str(known.near_best_step),
        f"reward per step, last {SLOPE_STEPS}": None if known.slope is None else interval(known.slope, "+.4f"),
    }


def _cost(cost: RunCost) -> Html | None:
    if not cost.amounts:
        return note("no step has recorded what it cost")
    about = "about " if cost.estimated else ""
    known = {name: about + amount_text(value) for name, value in cost.amounts.items()}
    return join([figures(known), note("when this page was opened; evaluations and repeated attempts are not counted")])


def _difference(run: Run, other: Run) -> Html | None:
    found = differing([flat_settings(run.config), flat_settings(other.config)])
    rows = [[one.name, *map(setting, one.values)] for one in found]
    head = ["setting", run.id, run_link(other.id)]
    return table(head, rows, f"Settings that differ from {other.id}", "both have the same settings")
