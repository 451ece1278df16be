"""Metrics of a run over its steps, in SQL: as many points as a screen has, whatever the run has logged.

Driven by the store's reads. Which rows count, and which is the last of a bucket, the database decides: only points leave it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import ColumnElement, Connection, false, func, select

from agentlightning.store.base import SeriesPoint
from agentlightning.store.sql.lifecycle import require_runs
from agentlightning.store.sql.tables import metrics
from agentlightning.store.summaries import bucket_width


def read_series(
    connection: Connection, run_id: str, names: Sequence[str] | None, max_points: int, after_step: int | None
) -> dict[str, list[SeriesPoint]]:
    require_runs(connection, {run_id})
    chosen: list[ColumnElement[bool]] = [
        metrics.c.run_id == run_id,
        metrics.c.abandoned == false(),
        metrics.c.value.is_not(None),
    ]
    if names is not None:
        chosen.append(metrics.c.name.in_(names))
    if after_step is not None:
        chosen.append(metrics.c.step > after_step)
    first, last = connection.execute(select(func.min(metrics.c.step), func.max(metrics.c.step)).where(*chosen)).one()
    if first is None:
        return {}
    bucket = (metrics.c.step - first) // bucket_width(first, last, max_points)
    buckets = (
        select(
            func.min(metrics.c.value).label("low"),
            func.max(metrics.c.value).label("high"),
            func.max(metrics.c.seq).label("seq"),
        )
        .where(*chosen)
        .group_by(metrics.c.name, bucket)
        .subquery()
    )
    points = select(metrics, buckets.c.low, buckets.c.high).join(buckets, buckets.c.seq == metrics.c.seq)
    found: defaultdict[str, list[SeriesPoint]] = defaultdict(list)
    for row in connection.execute(points.order_by(metrics.c.name, metrics.c.step)):
        point = SeriesPoint(step=row.step, value=row.value, low=row.low, high=row.high, created_ns=row.created_ns)
        found[row.name].append(point)
    return dict(found)
