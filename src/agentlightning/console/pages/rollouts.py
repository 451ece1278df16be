"""Rollouts: filtered, sorted, page by page, and as a scatter plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from agentlightning.console.charts import Dot, scatter
from agentlightning.console.markup import Html, element, join, url
from agentlightning.console.parts import Query, choice, first, replay_link, run_link, select, shown, table
from agentlightning.console.reader import Reader
from agentlightning.errors import InputError
from agentlightning.store.summaries import Order, RolloutSummary, SummaryPage, SummaryQuery

ORDERS: tuple[Order, ...] = get_args(Order)
AXES = ("step", "turns", "sampled_tokens", "prompt_tokens", "duration_s")
ROWS = 50
DOTS = 500
"""Rollouts of the scatter plot: the first ones in the order chosen."""
EXAMPLE = "reward < 0.2 and step > 50 and agent = 'writer'"


async def rollouts_page(reader: Reader, query: Query) -> Html:
    """A page of rollouts with its filter."""
    order = choice(query, "order", ORDERS)
    axis = choice(query, "x", AXES)
    ascending = first(query, "direction") == "up"
    asked = SummaryQuery(
        run_id=first(query, "run") or None,
        where=first(query, "where"),
        order_by=order,
        descending=not ascending,
        after=first(query, "after") or None,
        limit=ROWS,
    )
    try:
        page = await reader.summaries(asked)
        plotted = await reader.summaries(
            SummaryQuery(
                run_id=asked.run_id, where=asked.where, order_by=asked.order_by, descending=not ascending, limit=DOTS
            )
        )
    except InputError as wrong:
        return join(
            [
                element("h1", "Rollouts"),
                _form(query, order, axis),
                element("p", str(wrong), class_="wrong", role="alert"),
            ]
        )
    return join(
        [element("h1", "Rollouts"), _form(query, order, axis), _plot(plotted, axis), _rows(page), _next(query, page)]
    )


def _form(query: Query, order: str, axis: str) -> Html:
    where, run, up = first(query, "where"), first(query, "run"), first(query, "direction")
    return element(
        "form",
        element("label", "Run ", element("input", name="run", value=run, placeholder="all")),
        element("label", "Filter ", element("input", name="where", value=where, placeholder=EXAMPLE, class_="wide")),
        select("order", "Sort by", {name: name.replace("_", " ") for name in ORDERS}, order),
        select("direction", "Direction", {"": "highest first", "up": "lowest first"}, up),
        select("x", "Plot reward against", {name: name.replace("_", " ") for name in AXES}, axis),
        element("button", "Show"),
        action="/rollouts",
        method="get",
        class_="bar",
    )


def _plot(page: SummaryPage, axis: str) -> Html:
    dots = [
        Dot(
            float(getattr(row, axis)),
            row.reward,
            f"{row.title[:80]}: reward {row.reward:.3f}, step {row.step}",
            url("/replay", {"rollout": row.id}),
            ("train", "eval").index(row.mode),
        )
        for row in page.rows
        if row.reward is not None
    ]
    more = f" (the first {DOTS})" if page.next is not None else ""
    return scatter(f"Reward against {axis.replace('_', ' ')}{more}", dots, axis, "reward")


def _rows(page: SummaryPage) -> Html:
    if not page.rows:
        return element("p", "no finished rollout matches", class_="none")
    head = [
        "task",
        "run",
        "step",
        "mode",
        "state",
        "reward",
        "turns",
        "tokens",
        "seconds",
        "outcome",
        "group",
        "agents",
    ]
    return table(head, (row_cells(row) for row in page.rows), "Rollouts")


def row_cells(row: RolloutSummary) -> Sequence[Html | str]:
    """The cells of a rollout in a table."""
    failed = element("span", row.failure, class_="error") if row.failure else None
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
        join(
            [
                element(
                    "a", f"{row.group_id}/{row.replica}", href=url("/side", {"run": row.run_id, "group": row.group_id})
                ),
                " ",
                element("a", "same task", href=url("/side", {"run": row.run_id, "task": row.task_key})),
            ]
        ),
        ", ".join(row.agents),
    ]


def _next(query: Query, page: SummaryPage) -> Html | None:
    """Pages are found by where the last one ended: the first and the thousandth take as long."""
    links = []
    if first(query, "after"):
        links.append(element("a", "First page", href=url("/rollouts", _without_cursor(query))))
    if page.next is not None:
        links.append(element("a", "Next page", href=url("/rollouts", {**_without_cursor(query), "after": page.next})))
    return element("p", join(part for link in links for part in (link, " ")), class_="paging") if links else None


def _without_cursor(query: Query) -> dict[str, str]:
    return {name: values[0] for name, values in query.items() if values and name != "after"}
