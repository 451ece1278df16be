"""Rows of a run's metrics as analyses take them: one per training step, by name, read page by page from any store."""

from __future__ import annotations

from agentlightning.store.base import LightningStore
from agentlightning.store.scan import read_metrics


async def read_step_rows(store: LightningStore, run_id: str) -> list[dict[str, float]]:
    """The metrics of each training step, in order, with its number as "step"; steps that a crash undid are left out.

    Evaluations are no training steps, and left out, too: a row has the step's own time.
    """
    rows: dict[int, dict[str, float]] = {}
    async for page in read_metrics(store, run_id):
        for metric in page:
            if not metric.abandoned:
                rows.setdefault(metric.step, {"step": float(metric.step)})[metric.name] = metric.value
    return [rows[step] for step in sorted(rows) if "time/step_s" in rows[step]]
