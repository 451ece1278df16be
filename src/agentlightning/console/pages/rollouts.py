"""Rollouts: filtered, sorted and page by page; side by side: a group, one task at several steps, any that are named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import get_args

import orjson

from agentlightning.console.conversation import messages_view
from agentlightning.console.markup import (
    Attribute,
    Html,
    Query,
    choice,
    element,
    field,
    figures,
    first,
    form,
    join,
    link,
    note,
    page,
    replay_link,
    run_link,
    select,
    shown,
    table,
    wrong,
)
from agentlightning.console.reader import Reader, Recorded
from agentlightning.errors import InputError
from agentlightning.store.summaries import Order, RolloutSummary, SummaryPage, SummaryQuery

ORDERS: tuple[Order, ...] = get_args(Order)
ROWS = 50
EXAMPLE = "reward < 0.2 and step > 50 and agent = 'writer'"
HEAD = ("task", "run", "step", "mode", "state", "reward", "turns", "tokens", "seconds", "outcome", "group", "agents")
MAX_COLUMNS = 16
"""Rollouts side by side; a group may have more."""
MAX_CALLS = 12
"""Calls of each that are shown; the replay has them all."""
MAX_LISTED = 1000


async def rollouts_page(reader: Reader, query: Query) -> Html:
    """A page of rollouts with its filter."""
    order = choice(query, "order", ORDERS)
    where, run, up = first(query, "where"), first(query, "run"), first(query, "direction")
    fields = [
        field("Run", "run", run, placeholder="all"),
        field("Filter", "where", where, placeholder=EXAMPLE, class_="wide"),
        select("order", "Sort by", {name: name.replace("_", " ") for name in ORDERS}, order),
        select("direction", "Direction", {"": "highest first", "up": "lowest first"}, up),
    ]
    asked = SummaryQuery(
        run_id=run or None,
        where=where,
        order_by=order,
        descending=up != "up",
        after=first(query, "after") or None,
        limit=ROWS,
    )
    try:
        found = await reader.store.summaries(asked)
    except InputError as error:
        return page("Rollouts", form("/rollouts", *fields), wrong(str(error)))
    rows = table(HEAD, map(_row, found.rows), "Rollouts", "no finished rollout matches")
    return page("Rollouts", form("/rollouts", *fields), rows, _paging(query, found))


def _row(row: RolloutSummary) -> Sequence[Html | str]:
    failed = element("span", row.failure, class_="error") if row.failure else None
    group = link(f"{row.group_id}/{row.replica}", "/side", run=row.run_id, group=row.group_id)
    return [
        join([replay_link(row.id, row.title or row.id), failed]),
        run_link(row.run_id),
        str(row.step),
        row.mode,
        "refused" if row.refused else row.state,
        shown(row.reward),
        str(row.turns),
        str(row.sampled_tokens),
        shown(row.duration_s, 1),
        row.outcome or "",
        join([group, link("same task", "/side", run=row.run_id, task=row.task_key)], " "),
        ", ".join(row.agents),
    ]


def _paging(query: Query, found: SummaryPage) -> Html:
    """Pages are found by where the last one ended: the first and the thousandth take as long."""
    given = {name: values[0] for name, values in query.items() if values and name != "after"}
    links = [link("First page", "/rollouts", **given)] if first(query, "after") else []
    if found.next is not None:
        links.append(link("Next page", "/rollouts", **given, after=found.next))
    return element("p", join(links, " "))


async def side_page(reader: Reader, query: Query) -> Html:
    """The rollouts of the address as columns."""
    run, group, task = first(query, "run"), first(query, "group"), first(query, "task")
    ids = list(dict.fromkeys(query.get("rollout", ())))
    if not ids:
        if not run or not (group or task):
            raise InputError("rollout: expected ids of rollouts in the address, or a run and a group or task of it")
        ids = await _ids(reader, run, group, task)
    title = f"Group {group}" if group else "The same task at different steps" if task else "Rollouts side by side"
    if not ids:
        return page(title, note("no finished rollout of it"))
    found = await asyncio.gather(*(reader.rollout(one) for one in ids[:MAX_COLUMNS]))
    columns: dict[str, Attribute] = {"class_": "columns", "tabindex": 0, "role": "region", "aria_label": title}
    more = f"{len(ids) - MAX_COLUMNS} more are left out" if len(ids) > MAX_COLUMNS else None
    asked = element("p", orjson.dumps(found[0].rollout.task, default=str).decode())
    return page(title, asked, element("div", *map(_column, found), **columns), note(more))


async def _ids(reader: Reader, run: str, group: str, task: str) -> list[str]:
    """The replicas of a group; or the first and the last rollout of a task: as it was solved at first, and lately."""
    name, value = ("group_id", group) if group else ("task_key", task)
    where = f"{name} = '{value.replace(chr(39), chr(39) * 2)}'"
    query = SummaryQuery(run_id=run, where=where, order_by="step", descending=False, limit=MAX_LISTED)
    rows = (await reader.store.summaries(query)).rows
    if group:
        return [row.id for row in sorted(rows, key=lambda row: row.replica)]
    return list(dict.fromkeys(row.id for row in (*rows[:1], *rows[-1:])))


def _column(one: Recorded) -> Html:
    rollout = one.rollout
    calls = []
    for number, call in enumerate(one.calls[:MAX_CALLS]):
        to = replay_link(rollout.id, f"call {number + 1}{f' by {call.agent}' if call.agent else ''}", number)
        new = call.messages if number else call.messages[-1:]
        calls.append(join([element("h3", to), messages_view([*new, call.completion])]))
    left = len(one.calls) - MAX_CALLS
    known = {
        "reward": shown(rollout.reward) or "-",
        "calls": str(len(one.calls)),
        "tokens": str(sum(len(call.sampled_ids) for call in one.calls)),
        "outcome": rollout.outcome or rollout.state,
    }
    title = replay_link(rollout.id, f"step {rollout.step}, {rollout.mode}, replica {rollout.replica}")
    more = note(f"{left} more calls" if left > 0 else None)
    return element("section", element("h2", title), figures(known), *calls, more, class_="column")
