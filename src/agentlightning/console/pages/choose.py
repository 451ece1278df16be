"""The choice of a run: what a page about one run shows where its address names none."""

from __future__ import annotations

from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.parts import Query, first, table, when
from agentlightning.console.reader import Reader
from agentlightning.records import Run

NEWEST = 20


async def chosen_run(reader: Reader, query: Query, path: str, title: str) -> Run | Html:
    """The run of the address, or the newest runs as links to this page about them. NotFoundError where it is not there."""
    if run_id := first(query, "run"):
        return await reader.run(run_id)
    runs = (await reader.runs())[:NEWEST]
    if not runs:
        return join([element("h1", title), element("p", "no run yet; start one with: agl demo", class_="none")])
    rows = (
        [element("a", run.id, href=url(path, {"run": run.id})), run.name, run.state, when(run.created_ns)]
        for run in runs
    )
    return join(
        [
            element("h1", title),
            element("p", "Choose a run:"),
            table(["run", "name", "state", "created (UTC)"], rows, "The newest runs"),
        ]
    )
