"""Parts that several pages have in common: tables, figures, times, what a query says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import orjson

from agentlightning.analysis.intervals import Interval
from agentlightning.console.markup import Child, Html, element, url
from agentlightning.errors import InputError

Query = Mapping[str, Sequence[str]]
"""The query of an address: values by name."""

S = TypeVar("S", bound=str)

MAX_CELL_CHARS = 400
PLACES = {
    "/": "Runs",
    "/rollouts": "Rollouts",
    "/compare": "Compare",
    "/rewards": "Rewards",
    "/bottlenecks": "Bottlenecks",
    "/suggestions": "Suggestions",
    "/alerts": "Alerts",
    "/prompts": "Prompts",
    "/models": "Models",
}
"""Pages that the navigation leads to; the others are reached from these."""


def first(query: Query, name: str, default: str = "") -> str:
    """The first value of a name."""
    values = query.get(name)
    return values[0] if values else default


def number(query: Query, name: str, default: int | None = None) -> int | None:
    """A whole number of the query. InputError where it is none."""
    text = first(query, name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise InputError(f"{name}: expected a whole number, got {text[:80]!r}")
    return int(text)


def choice(query: Query, name: str, allowed: Sequence[S]) -> S:
    """One of several values, the first by default. InputError for any other."""
    value = first(query, name, allowed[0])
    for one in allowed:
        if one == value:
            return one
    raise InputError(f"{name}: expected one of {', '.join(allowed)}, got {value[:80]!r}")


def table(head: Sequence[Child], rows: Iterable[Sequence[Child]], caption: str) -> Html:
    """A table; its caption is read out, and not drawn."""
    return element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", element("tr", *(element("th", name, scope="col") for name in head))),
            element("tbody", *(element("tr", *(element("td", cell) for cell in row)) for row in rows)),
        ),
        class_="table",
        tabindex=0,
        role="region",
        aria_label=caption,
    )


def figures(named: Mapping[str, Child]) -> Html:
    """A few numbers, each with its name; those that are None are left out."""
    items = [
        element("div", element("dt", name), element("dd", value)) for name, value in named.items() if value is not None
    ]
    return element("dl", *items, class_="figures")


def select(name: str, label: str, options: Mapping[str, str], chosen: str) -> Html:
    """A labelled choice of a form: options by value."""
    parts = [element("option", text, value=value, selected=value == chosen) for value, text in options.items()]
    return element("label", label, " ", element("select", *parts, name=name))


def shown(value: float | None, digits: int = 3) -> str:
    """A number of a table; empty where there is none.

    >>> shown(0.12345), shown(None)
    ('0.123', '')
    """
    return "" if value is None else f"{value:.{digits}f}"


def interval(one: Interval, form: str) -> str:
    """An estimate with its 95 % interval."""
    return f"{one.value:{form}} [{one.low:{form}}, {one.high:{form}}]"


def setting(value: object) -> str:
    """The value of a setting; a dash where a run does not have it."""
    return "-" if value is None else value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def when(nanoseconds: int) -> str:
    """A time as people read it, UTC."""
    return f"{datetime.fromtimestamp(nanoseconds / 1e9, UTC):%Y-%m-%d %H:%M:%S}"


def clipped(text: str, most: int = MAX_CELL_CHARS) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= most else text[: most - 1] + "…"


def run_link(run_id: str, text: str | None = None) -> Html:
    """A link to a run."""
    return element("a", text or run_id, href=url("/run", {"run": run_id}))


def replay_link(rollout_id: str, text: str | None = None, call: int | None = None) -> Html:
    """A link to a rollout, or to one of its calls."""
    return element("a", text or rollout_id, href=url("/replay", {"rollout": rollout_id, "call": call}))
