"""Rollouts side by side: a GRPO group, one task at several steps, or any that the address names."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentlightning.console.conversation import messages_view
from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.parts import Query, figures, first, replay_link, shown
from agentlightning.console.reader import Reader, Recorded
from agentlightning.errors import InputError
from agentlightning.store.summaries import RolloutSummary, SummaryQuery

MAX_COLUMNS = 16
"""Rollouts beside each other; a group may have more."""
MAX_CALLS = 12
"""Calls of each that are shown; the replay has them all."""
MAX_LISTED = 1000


async def side_page(reader: Reader, query: Query) -> Html:
    """The rollouts of the address as columns."""
    run, group, task = first(query, "run"), first(query, "group"), first(query, "task")
    ids = list(dict.fromkeys(query.get("rollout", ())))
    listed: list[RolloutSummary] = []
    if not ids:
        if not run or not (group or task):
            raise InputError("rollout: expected ids of rollouts in the address, or a run and a group or task of it")
        name, value = ("group_id", group) if group else ("task_key", task)
        listed = (await reader.summaries(SummaryQuery(run_id=run, where=f"{name} = {_quoted(value)}", order_by="step",
                                                      descending=False, limit=MAX_LISTED))).rows  # fmt: skip
        ids = [row.id for row in (_ends(listed) if task else sorted(listed, key=lambda row: row.replica))]
    title = f"Group {group}" if group else "The same task at different steps" if task else "Rollouts side by side"
    if not ids:
        return join([element("h1", title), element("p", "no finished rollout of it", class_="none")])
    shown_ids = ids[:MAX_COLUMNS]
    recorded = await asyncio.gather(*(reader.rollout(one) for one in shown_ids))
    more = f"{len(ids) - MAX_COLUMNS} more are left out" if len(ids) > MAX_COLUMNS else None
    return join(
        [
            element("h1", title),
            element("p", _task(recorded[0])),
            _choice(run, task, listed, shown_ids) if task else None,
            element(
                "div",
                *(_column(one) for one in recorded),
                class_="columns",
                tabindex=0,
                role="region",
                aria_label=title,
            ),
            element("p", more, class_="none") if more else None,
        ]
    )


def _ends(rows: Sequence[RolloutSummary]) -> list[RolloutSummary]:
    """The first and the last of them: a task as it was solved at first, and lately."""
    return [rows[0], rows[-1]] if len(rows) > 1 else list(rows)


def _choice(run: str, task: str, rows: Sequence[RolloutSummary], chosen: Sequence[str]) -> Html:
    """All rollouts of a task, to choose others from."""
    boxes = [
        element(
            "label",
            element("input", type="checkbox", name="rollout", value=row.id, checked=row.id in chosen),
            f" step {row.step}, {row.mode}, reward {shown(row.reward) or '-'}",
        )
        for row in rows
    ]
    return element(
        "details",
        element("summary", f"{len(rows)} rollouts of this task"),
        element("form", *boxes, element("button", "Show the chosen"), action="/side", method="get", class_="boxes"),
    )


def _column(one: Recorded) -> Html:
    rollout = one.rollout
    calls = []
    for number, call in enumerate(one.calls[:MAX_CALLS]):
        by = f" by {call.agent}" if call.agent else ""
        link = element("a", f"call {number + 1}{by}", href=url("/replay", {"rollout": rollout.id, "call": number}))
        new = call.messages if number else call.messages[-1:]
        calls.append(join([element("h3", link), messages_view([*new, call.completion])]))
    left = len(one.calls) - MAX_CALLS
    return element(
        "section",
        element("h2", replay_link(rollout.id, f"step {rollout.step}, {rollout.mode}, replica {rollout.replica}")),
        figures(
            {
                "reward": shown(rollout.reward) or "-",
                "calls": str(len(one.calls)),
                "tokens": str(sum(len(call.sampled_ids) for call in one.calls)),
                "outcome": rollout.outcome or rollout.state,
            }
        ),
        *calls,
        element("p", f"{left} more calls", class_="none") if left > 0 else None,
        class_="column",
    )


def _task(one: Recorded) -> str:
    import orjson

    return orjson.dumps(one.rollout.task, default=str).decode()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
