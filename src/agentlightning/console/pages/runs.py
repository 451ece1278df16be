"""The list of runs, and where a comparison begins."""

from __future__ import annotations

from agentlightning.analysis.run_settings import tags_of
from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.parts import Query, clipped, first, run_link, shown, table, when
from agentlightning.console.reader import MAX_RUNS, Reader
from agentlightning.records import Run
from agentlightning.trainer.monitor.health_checks import active_alarms

REWARD, HELD_OUT = "train/reward_mean", "eval/greedy/reward_mean"


async def runs_page(reader: Reader, query: Query) -> Html:
    """Runs, newest first, with a search and a choice of those to compare."""
    search = first(query, "search")
    found = await reader.runs(search)
    form = element(
        "form",
        element("label", "Search ", element("input", type="search", name="search", value=search)),
        element("button", "Search"),
        action="/",
        method="get",
        role="search",
        class_="bar",
    )
    if not found:
        none = "no run matches" if search else "no run yet; start one with: agl demo"
        return join([element("h1", "Runs"), form, element("p", none, class_="none")])
    head = ["compare", "run", "name", "tags", "state", "step", "reward", "held-out", "alarms", "created (UTC)"]
    rows = table(head, (_row(run) for run in found), "Runs, newest first")
    chosen = element("form", rows, element("button", "Compare the chosen runs"), action="/compare", method="get")
    more = f"the newest {MAX_RUNS} runs are looked at" if len(found) == MAX_RUNS else None
    return join([element("h1", "Runs"), form, chosen, element("p", more, class_="none") if more else None])


def _row(run: Run) -> list[Html | str]:
    alarms = active_alarms(run)
    return [
        element("input", type="checkbox", name="run", value=run.id, aria_label=f"compare {run.id}"),
        run_link(run.id),
        clipped(run.name),
        join(part for tag in tags_of(run) for part in (element("a", tag, href=url("/", {"search": tag})), " ")),
        element("span", run.state, class_=f"state {run.state}"),
        str(run.summary.get("step", "")),
        *(shown(_number(run.summary.get(name))) for name in (REWARD, HELD_OUT)),
        ", ".join(alarms),
        when(run.created_ns),
    ]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
