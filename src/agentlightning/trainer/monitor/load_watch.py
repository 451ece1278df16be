"""Load watch: what no training step shows of a run: its queue, its disk, its silence, and workers that do not come.

Training drives `LoadWatch` alongside its loop, and the metric logger reports its alarms like those of steps; the
processes of a run whose workers are started elsewhere drive `WorkerAbsence`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agentlightning.errors import StoreError
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.base import LightningStore
from agentlightning.trainer.monitor.health_checks import Alarm
from agentlightning.trainer.monitor.metric_logger import MetricLogger

LOOK_S = 30.0
MIN_FREE_BYTES = 2**30
"""Free space of the run's folder: below it another checkpoint may not fit."""
WORKERLESS_S = 120.0
"""Seconds without any worker while rollouts wait: workers are restarted within a minute."""
QUEUED_S = 1800.0
SILENT_S = 1800.0
"""Least seconds without a step or an evaluation."""
SILENT_TIMES = 10
"""A silence also has to be this many times the longest pause between two rows so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The state of a run between its steps."""

    queued: int = 0
    oldest_queued_s: float = 0.0
    workerless_s: float = 0.0
    """Seconds for which rollouts have waited and no worker was seen."""
    free_bytes: int = MIN_FREE_BYTES
    """Of the disk that holds the run's folder."""
    silent_s: float = 0.0
    """Seconds since a step or an evaluation was recorded; 0 before the first of this process."""
    longest_pause_s: float = 0.0
    """The longest time between two of them; 0 before the second."""


def load_alarms(load: Load) -> list[Alarm]:
    """The alarms of a moment."""
    found: dict[str, str] = {}
    if load.queued and load.workerless_s >= WORKERLESS_S:
        found["queue_without_workers"] = (
            f"{load.queued} rollouts wait and no worker was seen for {_minutes(load.workerless_s)}: start some with agl "
            "worker, or check the labels of the run (agent.labels)"
        )
    elif load.oldest_queued_s >= QUEUED_S:
        found["queue_old"] = (
            f"a rollout has waited {_minutes(load.oldest_queued_s)} for a worker, and {load.queued} wait: add workers, or "
            "raise agent.concurrency; agl runs bottlenecks RUN shows what limits the run"
        )
    if load.free_bytes < MIN_FREE_BYTES:
        found["disk_filling"] = (
            f"{load.free_bytes / 2**20:,.0f} MiB are left on the disk of the run's folder: free some with agl runs delete, "
            "or lower trainer.keep_checkpoints; a checkpoint that does not fit ends the run"
        )
    if load.longest_pause_s and load.silent_s >= max(SILENT_S, SILENT_TIMES * load.longest_pause_s):
        found["run_silent"] = (
            f"no step ended for {_minutes(load.silent_s)}, {load.silent_s / load.longest_pause_s:.0f} times the longest "
            f"pause before ({_minutes(load.longest_pause_s)}): see agl rollouts list RUN and the run's logs folder"
        )
    return [Alarm(name, text) for name, text in found.items()]


@dataclass(kw_only=True)
class LoadWatch:
    """``async with`` around a training loop."""

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
        await self.logger.report_load(load_alarms(await self._load()))

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def _load(self) -> Load:
        own = await self.store.statistics(self.logger.run_id)
        queued, oldest_s, workers = (own[0].queued, own[0].oldest_queued_s, own[0].workers) if own else (0, 0.0, 0)
        if not queued or workers:
            self._workerless_since = None
        elif self._workerless_since is None:
            self._workerless_since = self.clock()
        since = self._workerless_since
        return Load(
            queued=queued,
            oldest_queued_s=oldest_s,
            workerless_s=0.0 if since is None else self.clock() - since,
            free_bytes=shutil.disk_usage(self.logger.folder.path).free,
            silent_s=self.logger.silent_s(),
            longest_pause_s=self.logger.longest_pause_s,
        )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


ABSENCE_S = 60.0
"""Workers ask for work, or beat, three times as often at least."""


class WorkerAbsence:
    """The workers of one run; `tell` gets a sentence each time that they have been absent for a while."""

    def __init__(
        self,
        store: LightningStore,
        run_id: str,
        labels: Sequence[str],
        tell: Callable[[str], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._labels = labels
        self._tell = tell
        self._sleep = sleep
        self._seen_ns = 0
        self._told = False

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            await self._sleep(ABSENCE_S)
            with contextlib.suppress(StoreError):  # a store that is away is told by whoever needs it
                await self._look()

    async def _look(self) -> None:
        # Compared with what the last look saw, not with a clock: the store's may be another machine's.
        before, self._seen_ns = (
            self._seen_ns,
            max((one.seen_ns for one in await self._store.workers(self._run_id)), default=0),
        )
        counts = await self._store.count(self._run_id)
        queued = sum(number for (_, state), number in counts.items() if state == "queued")
        absent = bool(queued) and self._seen_ns == before
        if absent and not self._told:
            asked = f" with {', '.join(self._labels)}" if self._labels else ""
            self._tell(f"{queued} rollouts wait, and no worker{asked} has asked for work for {ABSENCE_S:g} s")
        self._told = absent
