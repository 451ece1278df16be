"""Rows of a run's metrics as analyses take them: one per training step, by name; the latest steps, whatever the run has."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.store.base import LightningStore

STEP_S = "time/step_s"
ROOM = 2
"""Steps that are read for each that is asked for: some are evaluations only, and new ones come while it is read."""


async def read_latest_rows(
    store: LightningStore, run_id: str, latest: int, names: Sequence[str] | None = None
) -> list[dict[str, float]]:
    """At most the `latest` training steps, oldest first, with their metrics (all, if `names` is None) and number as "step".

    Steps that a crash undid are left out, and evaluations: a row has the step's own time.
    """
    ends = (await store.series(run_id, [STEP_S], max_points=1)).get(STEP_S)
    if not ends:
        return []
    after = ends[-1].step - latest
    series = await store.series(
        run_id, None if names is None else [STEP_S, *names], max_points=ROOM * latest, after_step=after
    )
    rows: dict[int, dict[str, float]] = {}
    for name, points in series.items():
        for point in points:
            rows.setdefault(point.step, {"step": float(point.step)})[name] = point.value
    return [rows[step] for step in sorted(rows) if STEP_S in rows[step]][-latest:]
