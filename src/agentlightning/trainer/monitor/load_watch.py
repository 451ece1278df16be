"""Load watch: looks every half minute at what no training step shows of a run: its queue, its disk, its silence.

Driven by the training beside its loop; what it finds are alarms as those of steps, and the metric logger tells them.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.base import LightningStore
from agentlightning.trainer.monitor.alert_rules import Load, load_alarms
from agentlightning.trainer.monitor.metric_logger import MetricLogger

LOOK_S = 30.0


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
        """Looks once, and tells what begins."""
        await self.logger.tell_load(load_alarms(await self._load()))

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
