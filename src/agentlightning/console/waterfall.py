"""The spans and model calls of an attempt as a waterfall: who did what, when, within what.

Driven by the replay. Knows no store; names and errors of spans are anybody's text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentlightning.adapters.semantics import error_of
from agentlightning.adapters.span_tree import SpanTree
from agentlightning.console.markup import Html, element
from agentlightning.records import Call, Span

MAX_ROWS = 500
"""Rows that are drawn; agents make any number of spans."""
MAX_DEPTH = 12
MIN_SHARE = 0.3
"""Per cent of the width that the shortest bar has, so that it can be seen."""

Entry = Span | Call


def waterfall(
    spans: Sequence[Span], calls: Sequence[Call], href: Callable[[int], str | None], current: int = -1
) -> Html:
    """A row per span and call, by tree and start. `href` leads to a call by its number; `current` is the one shown."""
    rows = _in_order(spans, calls)
    if not rows:
        return element("p", "no call and no span was recorded", class_="none")
    shown = rows[:MAX_ROWS]
    first = min(entry.started_ns for _, entry in rows)
    length = max(1, max(entry.finished_ns for _, entry in rows) - first)
    numbers = {call.id: number for number, call in enumerate(calls)}
    items = [
        _row(depth, entry, (entry.started_ns - first, length), numbers.get(entry.id), href, current)
        for depth, entry in shown
    ]
    left = (
        element("p", f"{len(rows) - MAX_ROWS} more rows are left out", class_="none") if len(rows) > MAX_ROWS else None
    )
    return element("div", element("ol", *items, class_="waterfall"), left)


def _row(
    depth: int,
    entry: Entry,
    place: tuple[int, int],
    number: int | None,
    href: Callable[[int], str | None],
    current: int,
) -> Html:
    at, length = place
    took = entry.finished_ns - entry.started_ns
    share = max(MIN_SHARE, 100 * took / length)
    start = min(100 * at / length, 100 - MIN_SHARE)
    wrong = error_of(entry) if isinstance(entry, Span) else None
    kind = "wrong" if wrong else "call" if number is not None else "span"
    bar = element(
        "svg",
        element("rect", x=f"{start:.2f}%", width=f"{min(share, 100 - start):.2f}%", y=2, height=10, class_=kind),
        class_="bar",
        aria_hidden="true",
    )
    name = (
        entry.name
        if isinstance(entry, Span)
        else f"call {(number or 0) + 1}{f' by {entry.agent}' if entry.agent else ''}"
    )
    target = href(number) if number is not None else None
    label = element("a", name, href=target, aria_current="step" if number == current else None) if target else name
    indent = "· " * min(depth, MAX_DEPTH)
    return element(
        "li",
        element("span", indent, label, class_="name"),
        bar,
        element("span", f"{at / 1e9:.3f} s + {took / 1e9:.3f} s", class_="time"),
        element("span", wrong, class_="error") if wrong else None,
        class_="current" if number is not None and number == current else None,
    )


def _in_order(spans: Sequence[Span], calls: Sequence[Call]) -> list[tuple[int, Entry]]:
    """Spans and calls with their depth, parents before children."""
    tree = SpanTree(spans)
    children: dict[str | None, list[Entry]] = {}
    for span in tree.spans:
        parent = tree.parent(span)
        children.setdefault(None if parent is None else parent.id, []).append(span)
    for call in calls:
        known = call.span_id is not None and tree.get(call.span_id) is not None
        children.setdefault(call.span_id if known else None, []).append(call)
    rows: list[tuple[int, Entry]] = []
    waiting = [(0, entry) for entry in _latest_first(children.get(None, []))]
    while waiting:
        depth, entry = waiting.pop()
        rows.append((depth, entry))
        if isinstance(entry, Span):
            waiting += [(depth + 1, child) for child in _latest_first(children.get(entry.id, []))]
    return rows


def _latest_first(entries: Sequence[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda entry: (entry.started_ns, entry.id), reverse=True)
