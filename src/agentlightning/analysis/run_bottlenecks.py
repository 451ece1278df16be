"""Bottlenecks of a stored run, and what the changes that they ask for were worth in earlier runs.

``agl runs bottlenecks`` and the console's page drive it. Reads the metrics of the latest steps and, of a few other runs, two
metrics more; never all steps, and no rollout.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from agentlightning.analysis.bottlenecks import LATEST, Bottleneck, BottleneckReport, MeasuredChange, find_bottlenecks
from agentlightning.analysis.run_settings import SEED, SettingDifference, differing, flat_settings
from agentlightning.analysis.step_rows import STEP_S, read_latest_rows
from agentlightning.analysis.suggestions import MAX_RUNS, comparable
from agentlightning.errors import InputError
from agentlightning.records import Run
from agentlightning.store.base import LightningStore
from agentlightning.store.scan import find_run

MAX_STEPS = 1000
"""Steps that can be averaged."""
MAX_EARLIER = 3
"""Other runs that are told with a finding."""
MAX_READ = 2 * MAX_EARLIER
"""Other runs that are read for it: some have no step yet."""
ROLLOUTS, SPEED = "rollout/count", "sampler/tokens_per_s"
NO_TIME = frozenset({SEED, "trainer.steps", "trainer.epochs"})
"""Settings that change no step's time."""


class Changed(NamedTuple):
    """Another run in which settings of a finding differ."""

    run_id: str
    settings: list[SettingDifference]
    others: list[str]


async def read_bottlenecks(store: LightningStore, run_id: str, latest: int = LATEST) -> BottleneckReport:
    """The report on a run's latest steps. NotFoundError where there is no such run, InputError for more than MAX_STEPS."""
    if not 1 <= latest <= MAX_STEPS:
        raise InputError(f"steps: expected 1 to {MAX_STEPS}, got {latest}")
    run = await find_run(store, run_id)
    rows = await read_latest_rows(store, run_id, latest)
    speeds = (await store.series(run_id, [SPEED], max_points=1)).get(SPEED)
    found = find_bottlenecks(rows, latest, speeds[-1].high if speeds else math.nan)
    own = seconds_per_rollout(rows)
    if own is None or not found.findings:
        return found
    runs = [one for one in await store.runs(limit=MAX_RUNS) if one.id != run_id]
    # In a thread: a thousand configurations take longer than a server's event loop may stand still.
    changed = await asyncio.to_thread(_changed, run, runs, found.findings)
    needed = {one.run_id for each in changed.values() for one in each}
    seconds = {
        one: seconds_per_rollout(await read_latest_rows(store, one, LATEST, [ROLLOUTS])) for one in sorted(needed)
    }
    return dataclasses.replace(
        found,
        findings=[
            dataclasses.replace(finding, earlier=_measured(changed[finding.name], seconds, own))
            for finding in found.findings
        ],
    )


def seconds_per_rollout(rows: Sequence[Mapping[str, float]]) -> float | None:
    """Mean over these steps; None where no step has both numbers."""
    known = [row[STEP_S] / row[ROLLOUTS] for row in rows if row.get(ROLLOUTS, 0) > 0 and row.get(STEP_S, 0) > 0]
    return statistics.fmean(known) if known else None


def _measured(changed: Sequence[Changed], seconds: Mapping[str, float | None], own: float) -> list[MeasuredChange]:
    found = [
        MeasuredChange(run_id=one.run_id, settings=one.settings, others=one.others, seconds=took, own_seconds=own,
                       gain=1 - took / own)
        for one in changed
        if (took := seconds[one.run_id]) is not None
    ]  # fmt: skip
    return found[:MAX_EARLIER]


def _changed(run: Run, runs: Sequence[Run], findings: Sequence[Bottleneck]) -> dict[str, list[Changed]]:
    """By finding: runs of the same model, tasks and agent in which a setting of it differs, those with the fewest other
    differences first."""
    own = flat_settings(run.config)
    found = {}
    for finding in findings:
        changed = []
        for other in runs:
            if not comparable(own, other, but=finding.settings):
                continue
            rows = [row for row in differing([own, flat_settings(other.config)]) if row.name not in NO_TIME]
            if asked := [row for row in rows if row.name in finding.settings]:
                changed.append(Changed(other.id, asked, [row.name for row in rows if row not in asked]))
        found[finding.name] = sorted(changed, key=lambda one: len(one.others))[:MAX_READ]
    return found
