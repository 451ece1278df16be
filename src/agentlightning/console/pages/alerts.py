"""Alarms of runs: those that hold, those that somebody silenced or acknowledged, and those that ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.parts import Query, first, run_link, table, when
from agentlightning.console.reader import MAX_RUNS, Reader
from agentlightning.records import Run
from agentlightning.trainer.monitor.alert_state import ShownAlert, active_alarms, history, shown_alerts


async def alerts_page(reader: Reader, query: Query) -> Html:
    """Alarms of one run with their history, or those that hold of the newest runs."""
    run_id = first(query, "run")
    if not run_id:
        return _of_all(await reader.runs())
    run = await reader.run(run_id)
    shown = shown_alerts(run, time.time_ns())
    parts = [element("h1", f"Alerts of {run.name or run.id}"), element("p", run_link(run.id, "The run"))]
    if not shown:
        return join([*parts, element("p", "nothing was warned of", class_="none")])
    begun = [[when(int(one["time"] * 1e9)), str(one["step"]), one["name"], one["text"]] for one in history(run)]
    return join(
        [
            *parts,
            table(["alarm", "state", "since step", "what is so"], (_row(one) for one in shown), "Alarms"),
            element("h2", "As they began"),
            table(
                ["time (UTC)", "step", "alarm", "what was so"], reversed(begun), "Alarms as they began, newest first"
            ),
            _commands(run.id, shown[0].name),
        ]
    )


def _of_all(runs: Sequence[Run]) -> Html:
    rows = [
        [run_link(run.id), run.name, run.state, element("a", name, href=url("/alerts", {"run": run.id})), text]
        for run in runs
        for name, text in active_alarms(run).items()
    ]
    if not rows:
        return join([element("h1", "Alerts"), element("p", "no alarm holds", class_="none")])
    more = f"the newest {MAX_RUNS} runs are looked at" if len(runs) == MAX_RUNS else None
    head = ["run", "name", "state", "alarm", "what is so"]
    return join([element("h1", "Alerts"), table(head, rows, "Alarms that hold"), element("p", more) if more else None])


def _row(one: ShownAlert) -> list[str]:
    until = f" until {when(one.silenced_until_ns)} UTC" if one.silenced_until_ns else ""
    return [one.name, one.state + until, "" if one.since_step is None else str(one.since_step), one.text or ""]


def _commands(run_id: str, name: str) -> Html:
    """The console only reads: these commands change something."""
    lines = [f"agl alerts ack {run_id} {name}", f"agl alerts silence {run_id} {name} --hours 24"]
    return join([element("h2", "Acknowledge or silence"), element("pre", "\n".join(lines))])
