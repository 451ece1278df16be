"""Rollouts: filtered, sorted, by task and page by page; side by side: a group, a task at several steps, any by name."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass
from typing import get_args

from agentlightning.console.reader import Reader
from agentlightning.console.render import Page, Query, choice, first
from agentlightning.errors import InputError
from agentlightning.records import Run
from agentlightning.store.summaries import Order, RolloutSummary, SummaryPage, SummaryQuery, title_of

ORDERS: tuple[Order, ...] = get_args(Order)
ROWS = 50
EXAMPLE = "reward < 0.2 and step > 50 and agent = 'writer'"
TRAINING = "mode = 'train'"
MODES = {
    TRAINING: "Training",
    "mode = 'eval'": "Evaluation",
    "state = 'failed'": "Failed",
    "mode in ('train', 'eval')": "All",
}
"""Filters to choose from, by their expression; of a run the first is the default."""
MAX_COLUMNS = 16
"""Rollouts side by side; a group may have more."""
MAX_CALLS = 12
"""Calls of each that are shown; the replay has them all."""
MAX_LISTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRollouts:
    """Rollouts of one task at one step; where they are sorted by something else, one rollout."""

    rows: list[RolloutSummary]

    @property
    def mean(self) -> float | None:
        """Mean of the rewards that are known."""
        known = [row.reward for row in self.rows if row.reward is not None]
        return statistics.fmean(known) if known else None


async def rollouts_page(reader: Reader, query: Query) -> Page:
    """A page of rollouts with its filter."""
    order = choice(query, "order", ORDERS)
    run_id, up = first(query, "run"), first(query, "direction")
    where = first(query, "where", TRAINING if run_id else "")
    run = await reader.run(run_id) if run_id else None
    asked = SummaryQuery(
        run_id=run_id or None,
        where=where,
        order_by=order,
        descending=up != "up",
        after=first(query, "after") or None,
        limit=ROWS,
    )
    given = {name: values[0] for name, values in query.items() if values and name not in ("after", "run")}
    values: dict[str, object] = {
        "run_id": run_id,
        "where": where,
        "order": order,
        "up": up,
        "given": given,
        "example": EXAMPLE,
    }
    values |= {"orders": ORDERS, "modes": MODES, "after": first(query, "after"), "found": None, "why": ""}
    try:
        found = await reader.store.summaries(asked)
    except InputError as error:
        return Page(template="rollouts.html", title="Rollouts", values=values | {"why": str(error)}, run=run)
    return Page(template="rollouts.html", title="Rollouts", values=values | _shown(found, order == "finished"), run=run)


def _shown(found: SummaryPage, grouped: bool) -> dict[str, object]:
    """The rows in their order, those of one task and step together, failures first; and the columns that differ."""
    tasks: dict[object, list[RolloutSummary]] = {}
    for row in found.rows:
        tasks.setdefault((row.run_id, row.task_key, row.step, row.mode) if grouped else row.id, []).append(row)
    for rows in tasks.values():
        rows.sort(key=lambda row: (row.state == "succeeded", row.reward or 0.0, row.replica))
    names = ("run_id", "step", "mode", "agents")
    differ = {name for name in names if len({str(getattr(row, name)) for row in found.rows}) > 1}
    return {"found": found, "tasks": [TaskRollouts(rows=rows) for rows in tasks.values()], "differ": differ}


async def side_page(reader: Reader, query: Query) -> Page:
    """The rollouts of the address as columns."""
    run_id, group, task = first(query, "run"), first(query, "group"), first(query, "task")
    ids = list(dict.fromkeys(query.get("rollout", ())))
    if not ids:
        if not run_id or not (group or task):
            raise InputError("rollout: expected ids of rollouts in the address, or a run and a group or task of it")
        ids = await _ids(reader, run_id, group, task)
    title = f"Group {group}" if group else "The same task at different steps" if task else "Rollouts side by side"
    found = await asyncio.gather(*(reader.rollout(one) for one in ids[:MAX_COLUMNS]))
    run: Run | None = await reader.run(run_id or found[0].rollout.run_id) if run_id or found else None
    question = title_of(found[0].rollout.task) if found else ""
    values = {"question": question, "columns": found, "more": len(ids) - len(found), "most": MAX_CALLS}
    return Page(template="side.html", title=title, values=values, run=run)


async def _ids(reader: Reader, run: str, group: str, task: str) -> list[str]:
    """The replicas of a group; or the first and the last rollout of a task: as it was solved at first, and lately."""
    name, value = ("group_id", group) if group else ("task_key", task)
    where = f"{name} = '{value.replace(chr(39), chr(39) * 2)}'"
    query = SummaryQuery(run_id=run, where=where, order_by="step", descending=False, limit=MAX_LISTED)
    rows = (await reader.store.summaries(query)).rows
    if group:
        return [row.id for row in sorted(rows, key=lambda row: row.replica)]
    return list(dict.fromkeys(row.id for row in (*rows[:1], *rows[-1:])))
