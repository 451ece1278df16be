"""Summaries and series until the store has them: made of what it gives, for small stores."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from agentlightning.errors import InputError
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import read_metrics
from agentlightning.types import FINAL_STATES, Mode, Outcome, Rollout, RolloutState


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    id: str
    run_id: str
    mode: Mode
    step: int
    state: RolloutState
    group_id: str
    replica: int
    task_key: str
    title: str
    reward: float | None
    turns: int
    prompt_tokens: int
    sampled_tokens: int
    forks: int
    agents: list[str]
    attempts: int
    lost: int
    refused: bool
    failure: str | None
    outcome: Outcome | None
    created_ns: int
    finished_ns: int
    finished_seq: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryQuery:
    run_id: str | None = None
    where: str = ""
    order_by: str = "finished"
    descending: bool = True
    after: str | None = None
    limit: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryPage:
    rows: list[RolloutSummary]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPoint:
    step: int
    value: float
    low: float
    high: float
    created_ns: int


async def summaries(store: LightningStore, query: SummaryQuery) -> SummaryPage:
    found = [_row(one) for one in await store.rollouts(RolloutQuery(run_id=query.run_id)) if one.state in FINAL_STATES]
    for part in filter(None, query.where.split(" and ")):
        name, _, value = part.partition(" = ")
        if not value or name not in RolloutSummary.__slots__:
            raise InputError(f"where: expected FIELD = 'value', got {part!r}")
        found = [row for row in found if str(getattr(row, name)) == value.strip("'")]
    key = {"finished": "finished_seq", "duration": "duration_s"}.get(query.order_by, query.order_by)
    found.sort(key=lambda row: getattr(row, key) or 0, reverse=query.descending)
    start = int(query.after or 0)
    rows = found[start : start + query.limit]
    return SummaryPage(rows=rows, next=str(start + query.limit) if start + query.limit < len(found) else None)


def _row(one: Rollout) -> RolloutSummary:
    return RolloutSummary(
        id=one.id, run_id=one.run_id, mode=one.mode, step=one.step, state=one.state, group_id=one.group_id,
        replica=one.replica, task_key=hashlib.sha256(orjson.dumps(one.task)).hexdigest()[:16],
        title=orjson.dumps(one.task).decode()[:100], reward=one.reward, turns=one.calls, prompt_tokens=0, sampled_tokens=0,
        forks=0, agents=[], attempts=one.attempt, lost=one.lost, refused=one.refused, failure=one.error, outcome=one.outcome,
        created_ns=one.created_ns, finished_ns=one.finished_ns or 0, finished_seq=one.finished_seq or 0,
        duration_s=((one.finished_ns or 0) - (one.started_ns or 0)) / 1e9,
    )  # fmt: skip


async def series(
    store: LightningStore,
    run_id: str,
    names: Sequence[str] | None = None,
    max_points: int = 500,
    after_step: int | None = None,
) -> dict[str, list[SeriesPoint]]:
    found: dict[str, dict[int, SeriesPoint]] = {}
    async for page in read_metrics(store, run_id):
        for one in page:
            if not one.abandoned and (after_step is None or one.step > after_step):
                point = SeriesPoint(
                    step=one.step, value=one.value, low=one.value, high=one.value, created_ns=one.created_ns
                )
                found.setdefault(one.name, {})[one.step] = point
    return {name: [points[step] for step in sorted(points)] for name, points in found.items()}
