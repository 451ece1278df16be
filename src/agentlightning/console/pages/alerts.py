"""The alarms that hold now, of all runs."""

from __future__ import annotations

from agentlightning.console.markup import Html, element, join
from agentlightning.console.parts import Query, run_link, table
from agentlightning.console.reader import MAX_RUNS, Reader
from agentlightning.trainer.monitor.health_checks import active_alarms


async def alerts_page(reader: Reader, query: Query) -> Html:
    """Alarms of the newest runs."""
    runs = await reader.runs()
    rows = [
        [run_link(run.id), run.name, run.state, name, text] for run in runs for name, text in active_alarms(run).items()
    ]
    if not rows:
        return join([element("h1", "Alerts"), element("p", "no alarm holds", class_="none")])
    note = element("p", f"of the newest {MAX_RUNS} runs") if len(runs) == MAX_RUNS else None
    return join([element("h1", "Alerts"), table(["run", "name", "state", "alarm", "problem"], rows, "Alarms"), note])
