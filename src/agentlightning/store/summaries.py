"""Summaries of finished rollouts and series of metrics: how they are made, ordered and paged, whatever keeps them.

Pure functions, driven by the stores. A page ends with a cursor, the order and the place of its last row, so that the next
page begins there however many rollouts finish meanwhile (keyset paging).
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import orjson

from agentlightning.errors import InputError
from agentlightning.records import JSON, Cause, Metric, Mode, Outcome, RolloutState
from agentlightning.store.codec import RecordCodec, text

Order = Literal["finished", "reward", "step", "turns", "sampled_tokens", "duration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """One finished rollout as lists, plots and filters show it: made in the transaction that finishes it."""

    id: str
    run_id: str
    mode: Mode
    step: int
    state: RolloutState
    group_id: str
    replica: int
    task_key: str  # hash of the task: rollouts of one task have it in common, whatever their step
    title: str  # the beginning of the task's text
    reward: float | None
    turns: int  # model calls of its last attempt, as are the next four
    prompt_tokens: int
    sampled_tokens: int
    """Those of external models as they reported them; those that a fork replayed were sampled for another rollout."""
    forks: int
    agents: list[str]  # names of its sub-agents that its calls were recorded with, sorted
    attempts: int
    lost: int
    refused: bool
    cause: Cause | None  # of the end of its last attempt
    failure: str | None  # the line of the error that names it; of a refused rollout, of its warning
    outcome: Outcome | None
    created_ns: int
    finished_ns: int
    finished_seq: int
    duration_s: float  # from its first claim to its end; 0 where it was never claimed


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryQuery:
    """A page of summaries of finished rollouts. Those without a reward come last, in either direction."""

    run_id: str | None = None  # none: all runs
    where: str = ""  # a filter: ``reward < 0.2 and step > 50 and agent = 'writer'`` (where.py)
    order_by: Order = "finished"
    descending: bool = True
    after: str | None = None  # the `next` of the page before, of the same order
    limit: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryPage:
    """Some summaries in order."""

    rows: list[RolloutSummary]
    next: str | None  # cursor of the next page; None where there is no more


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPoint:
    """A metric over a bucket of steps."""

    step: int
    value: float  # the last value of the bucket, its step and its time
    low: float
    high: float
    created_ns: int


SUMMARIES = RecordCodec(RolloutSummary)

MAX_TITLE_CHARS = 100
MAX_FAILURE_CHARS = 200
MAX_LIMIT = 1000
MAX_POINTS = 10_000

COLUMNS: Mapping[Order, str] = {
    "finished": "finished_ns",
    "reward": "reward",
    "step": "step",
    "turns": "turns",
    "sampled_tokens": "sampled_tokens",
    "duration": "duration_s",
}
"""The field that each order sorts by; ids decide between equal ones."""


def title_of(task: JSON) -> str:
    """The beginning of the first text of a task that has several words, else of its first text or its JSON, on one line."""
    texts = [value.strip() for value in task.values() if isinstance(value, str) and value.strip()]
    chosen = next((each for each in texts if " " in each), texts[0] if texts else orjson.dumps(task).decode())
    return text(" ".join(chosen[: 4 * MAX_TITLE_CHARS].split())[:MAX_TITLE_CHARS]) or ""


def task_key(task: JSON) -> str:
    """Hash of a task, whatever the order of its fields."""
    return hashlib.sha256(orjson.dumps(task, option=orjson.OPT_SORT_KEYS)).hexdigest()[:16]


def failure_of(state: str, error: str | None, warning: str | None, refused: bool) -> str | None:
    """The last line of what went wrong, where a traceback names it."""
    said = warning if refused else error
    if state == "succeeded" or not said or not said.strip():
        return None
    return text(said.strip().splitlines()[-1].strip()[:MAX_FAILURE_CHARS])


@dataclass(frozen=True, slots=True)
class SummaryPlace:
    """A row's place in an order."""

    value: float | None
    id: str


def check_query(query: SummaryQuery) -> SummaryPlace | None:
    """The place after which the page begins. InputError names what is wrong with the query, its filter excepted."""
    if query.order_by not in get_args(Order):
        raise InputError(f"order_by: expected one of {', '.join(get_args(Order))}, got {query.order_by!r}")
    if not 1 <= query.limit <= MAX_LIMIT:
        raise InputError(f"limit: expected 1 to {MAX_LIMIT}, got {query.limit}")
    if query.after is None:
        return None
    try:
        order_by, descending, value, row_id = orjson.loads(base64.urlsafe_b64decode(query.after))
        known = isinstance(value, int | float | None) and isinstance(row_id, str)
    except (ValueError, TypeError):
        known = False
    if not known or (order_by, descending) != (query.order_by, query.descending):
        raise InputError("after: expected the `next` of a page in the same order")
    return SummaryPlace(value, row_id)


def first_rows(rows: Iterable[RolloutSummary], query: SummaryQuery, count: int) -> list[RolloutSummary]:
    """The first of the rows in the order of the query."""

    def key(row: RolloutSummary) -> tuple[bool, Any, str]:
        value = getattr(row, COLUMNS[query.order_by])
        return (value is None) != query.descending, 0 if value is None else value, row.id

    return heapq.nlargest(count, rows, key) if query.descending else heapq.nsmallest(count, rows, key)


def is_after(row: RolloutSummary, place: SummaryPlace | None, query: SummaryQuery) -> bool:
    """True where the row comes after the place in the order of the query."""
    if place is None:
        return True
    value = getattr(row, COLUMNS[query.order_by])
    if (value is None) != (place.value is None):
        return value is None
    mine, other = (value, row.id), (place.value, place.id)
    if value is None:
        mine, other = (0, row.id), (0, place.id)
    return mine < other if query.descending else mine > other


def page_of(rows: Sequence[RolloutSummary], query: SummaryQuery) -> SummaryPage:
    """The page of rows in order, of which one more than its limit says that there is a next."""
    chosen = list(rows[: query.limit])
    if len(rows) <= query.limit:
        return SummaryPage(rows=chosen, next=None)
    last = chosen[-1]
    place = [query.order_by, query.descending, getattr(last, COLUMNS[query.order_by]), last.id]
    return SummaryPage(rows=chosen, next=base64.urlsafe_b64encode(orjson.dumps(place)).decode())


def check_points(max_points: int) -> None:
    """InputError for a number of points that no screen has."""
    if not 1 <= max_points <= MAX_POINTS:
        raise InputError(f"max_points: expected 1 to {MAX_POINTS}, got {max_points}")


def bucket_width(first: int, last: int, max_points: int) -> int:
    """Steps of a bucket, so that as many as `max_points` hold all from the first to the last."""
    return -(-(last - first + 1) // max_points)


def downsampled(metrics: Iterable[Metric], max_points: int) -> dict[str, list[SeriesPoint]]:
    """Points of metrics in the order of their `seq`: the last value of each bucket of steps, the lowest and the highest."""
    counted = [each for each in metrics if not each.abandoned and math.isfinite(each.value)]
    if not counted:
        return {}
    first = min(each.step for each in counted)
    width = bucket_width(first, max(each.step for each in counted), max_points)
    found: dict[tuple[str, int], SeriesPoint] = {}
    for each in counted:
        key = each.name, (each.step - first) // width
        low, high = (found[key].low, found[key].high) if key in found else (each.value, each.value)
        low, high = min(low, each.value), max(high, each.value)
        found[key] = SeriesPoint(step=each.step, value=each.value, low=low, high=high, created_ns=each.created_ns)
    series: dict[str, list[SeriesPoint]] = {}
    for (name, _), point in sorted(found.items()):
        series.setdefault(name, []).append(point)
    return series
