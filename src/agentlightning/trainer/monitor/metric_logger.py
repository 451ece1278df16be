"""Metric logger: records a run's metrics in the store and in metrics.jsonl, checks its health, and tells alarms.

A training loop gives it every row, and `LoadWatch` what the queue, the disk and a silence show between them.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentlightning.records import JSON, Metric
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.base import LightningStore
from agentlightning.store.scan import find_run
from agentlightning.trainer.checkpoint import RESUMED, RunFolder
from agentlightning.trainer.monitor.health_checks import (
    ACTIVE,
    BEGUN,
    HEALTH_CHECKS,
    MAX_BEGUN,
    Alarm,
    HealthCheck,
    Load,
    alarms,
    begun_alarms,
    load_alarms,
)
from agentlightning.trainer.monitor.metrics import derived, path_of
from agentlightning.trainer.progress import Progress

SUMMARY = ("train/reward_mean", "eval/greedy/reward_mean", "eval/sampled/reward_mean", "train/loss", "eval/loss")
"""Metrics that a list of runs shows."""
QUIET = 20
"""Rows during which an alarm that ceased and comes back is not reported again."""
LOOK_S = 30.0


@dataclass(kw_only=True)
class MetricLogger:
    """Records one run's metrics and warns of problems that they show."""

    run_id: str
    folder: RunFolder
    store: LightningStore
    progress: Progress
    rules: Mapping[str, HealthCheck] = field(default_factory=lambda: HEALTH_CHECKS)
    on_row: Callable[[], None] = lambda: None
    """Called when metrics.jsonl has grown."""
    on_alarm: Callable[[int, Alarm], None] = lambda step, alarm: None
    """Called with each alarm that begins, and its step. Must not wait."""
    clock: Callable[[], float] = time.monotonic
    longest_pause_s: float = 0.0
    """The longest time between two rows of this process."""
    _rows: list[JSON] = field(init=False)
    _held: dict[str, int] = field(init=False, default_factory=dict)
    """By alarm, the number of rows after which it held last."""
    _load: dict[str, Alarm] = field(init=False, default_factory=dict)
    """Alarms of the queue and the disk that hold now."""
    _row_s: float | None = field(init=False, default=None)
    _telling: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._rows = self.folder.metrics()
        self._check()

    def silent_s(self) -> float:
        """Seconds since the last row; 0 before the first of this process."""
        return 0.0 if self._row_s is None else self.clock() - self._row_s

    async def record(self, step: int, kind: str, metrics: Mapping[str, float]) -> dict[str, float]:
        """Records the metrics of a step, and returns them under their paths with those that follow from them.

        kind: step, or the name of an evaluation.
        """
        metrics = {path_of(name): value for name, value in metrics.items()}
        metrics |= derived(metrics)
        await self.store.log_metrics(
            [Metric(run_id=self.run_id, step=step, name=name, value=value) for name, value in metrics.items()]
        )
        row = {"step": step, "kind": kind, "time": time.time(), **metrics}
        async with self._telling:
            self._rows.append(row)
            shown: JSON = {name: metrics[name] for name in SUMMARY if name in metrics}
            await self._tell({"step": step, **shown}, step, self._check())
        self.folder.append_metrics(row)
        self.on_row()
        self.longest_pause_s = max(self.longest_pause_s, self.silent_s())
        self._row_s = self.clock()
        return metrics

    async def report_load(self, found: Sequence[Alarm]) -> None:
        """Reports the alarms of a moment that did not hold at the last look."""
        async with self._telling:
            new = [alarm for alarm in found if alarm.name not in self._load]
            if not new and len(found) == len(self._load):
                return
            before, self._load = self._load, {alarm.name: alarm for alarm in found}
            try:
                await self._tell({}, max((row["step"] for row in self._rows), default=0), new)
            except BaseException:  # the store is away: report it again at the next look
                self._load = before
                raise

    def resumed(self, step: int) -> None:
        """The run went back to the checkpoint of `step`: what was recorded of later steps is undone."""
        self.folder.append_metrics({"step": step, "kind": RESUMED, "time": time.time()})
        self._rows = [row for row in self._rows if row["step"] <= step]
        self._held.clear()
        self._check()

    def _check(self) -> list[Alarm]:
        """The alarms that hold after the last row and did not after any of the QUIET rows before it."""
        now, count = alarms(self._rows, self.rules), len(self._rows)
        new = [alarm for alarm in now if count - self._held.get(alarm.name, -QUIET - 1) > QUIET]
        self._held |= {alarm.name: count for alarm in now}
        return new

    async def _tell(self, summary: JSON, step: int, new: Sequence[Alarm]) -> None:
        """Updates the run's summary, and reports what begins."""
        active = [*alarms(self._rows, self.rules), *self._load.values()]
        if self.rules or active or not summary:
            summary = {**summary, ACTIVE: {alarm.name: alarm.text for alarm in active}}
        if new:
            summary[BEGUN] = await self._begun(step, new)
        await self.store.update_run(self.run_id, summary=summary)
        for alarm in new:
            self.progress.note(f"warning {alarm.name}: {alarm.text}")
            self.on_alarm(step, alarm)

    async def _begun(self, step: int, new: Sequence[Alarm]) -> list[JSON]:
        """The alarms that began in this run, with new ones of this step; those of steps that were undone are left out."""
        known = begun_alarms(await find_run(self.store, self.run_id))
        # A row that was recorded just before its process was killed is recorded again.
        kept = [one for one in known if one[0] <= step and one[:2] not in {(step, alarm.name) for alarm in new}]
        every = [*kept, *((step, alarm.name, alarm.text) for alarm in new)]
        return [{"step": at, "name": name, "text": text} for at, name, text in every[-MAX_BEGUN:]]


PAUSED_SEEN_NS = 60 * 10**9
"""Age of a worker's last word after which it is gone, and not paused."""


@dataclass(kw_only=True)
class LoadWatch:
    """``async with`` around a training loop: reports what no row shows."""

    store: LightningStore
    logger: MetricLogger
    clock: Callable[[], float] = time.monotonic
    _workerless_since: float | None = None
    _background: BackgroundTasks = field(default_factory=BackgroundTasks)

    async def __aenter__(self) -> LoadWatch:
        self._background.start("load watch", self._look_for_ever)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._background.stop()

    async def look(self) -> None:
        """Looks once, and reports what begins."""
        own = await self.store.statistics(self.logger.run_id)
        queued, oldest_s, workers = (own[0].queued, own[0].oldest_queued_s, own[0].workers) if own else (0, 0.0, 0)
        seen_ns = time.time_ns() - PAUSED_SEEN_NS
        known = await self.store.workers(self.logger.run_id) if workers else []
        paused = [worker.paused for worker in known if worker.paused and worker.seen_ns > seen_ns]
        now = self.clock()
        since = (now if self._workerless_since is None else self._workerless_since) if queued and not workers else None
        self._workerless_since = since
        load = Load(
            queued=queued,
            oldest_queued_s=oldest_s,
            paused=paused,
            workerless_s=0.0 if since is None else now - since,
            free_bytes=shutil.disk_usage(self.logger.folder.path).free,
            silent_s=self.logger.silent_s(),
            longest_pause_s=self.logger.longest_pause_s,
        )
        await self.logger.report_load(load_alarms(load))

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()
