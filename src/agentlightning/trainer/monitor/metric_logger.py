"""Metric logger: records a run's metrics in the store and in metrics.jsonl, checks its health, and tells alarms.

A training loop gives it every row, and `load_watch.py` what it finds between them. Trackers are child processes that read
metrics.jsonl themselves (`trackers.py`), so that whatever happens to one of them, the run neither ends nor waits.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from agentlightning.config.external import TRACKER_KEYS
from agentlightning.records import JSON, Metric
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.runtime.children import inheritable, secrets_line
from agentlightning.runtime.disk import open_private
from agentlightning.store.base import LightningStore
from agentlightning.trainer.checkpoint import RESUMED, RunFolder
from agentlightning.trainer.monitor.health_checks import ACTIVE, HEALTH_CHECKS, Alarm, HealthCheck, alarms, new_alarms
from agentlightning.trainer.monitor.metrics import derived, path_of
from agentlightning.trainer.progress import Progress

SUMMARY = ("train/reward_mean", "eval/greedy/reward_mean", "eval/sampled/reward_mean", "train/loss", "eval/loss")
"""Metrics that a list of runs shows."""
TRACKER_TIMEOUT_S = 30.0
"""Seconds that a tracker has to send what is left when a run ends."""


@dataclass(kw_only=True)
class MetricLogger:
    """Records one run's metrics and warns of problems that they show."""

    run_id: str
    folder: RunFolder
    store: LightningStore
    progress: Progress
    rules: Mapping[str, HealthCheck] = field(default_factory=lambda: HEALTH_CHECKS)
    """The checks; none where they are off."""
    on_row: Callable[[], None] = lambda: None
    """Called when metrics.jsonl has grown."""
    on_alarm: Callable[[int, Alarm], None] = lambda step, alarm: None
    """Called with each alarm that begins, and its step. Must not wait."""
    clock: Callable[[], float] = time.monotonic
    longest_pause_s: float = 0.0
    """The longest time between two rows of this process."""
    _rows: list[JSON] = field(init=False)
    _load: dict[str, Alarm] = field(init=False, default_factory=dict)
    """Alarms of the queue and the disk that hold now."""
    _row_s: float | None = field(init=False, default=None)
    _telling: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._rows = self.folder.metrics()

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
            await self._tell({"step": step, **shown}, step, new_alarms(self._rows, self.rules))
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

    async def _tell(self, summary: JSON, step: int, new: Sequence[Alarm]) -> None:
        """Updates the run's summary, and reports what begins."""
        if self.rules or self._load:
            active = [*alarms(self._rows, self.rules), *self._load.values()]
            summary = {**summary, ACTIVE: {alarm.name: alarm.text for alarm in active}}
        elif not summary:  # the last alarm of the load has ended, and no row has any
            summary = {ACTIVE: {}}
        await self.store.update_run(self.run_id, summary=summary)
        for alarm in new:
            self.progress.note(f"warning {alarm.name}: {alarm.text}")
            self.on_alarm(step, alarm)

    def resumed(self, step: int) -> None:
        """The run went back to the checkpoint of `step`: what was recorded of later steps is undone."""
        self.folder.append_metrics({"step": step, "kind": RESUMED, "time": time.time()})
        self._rows = [row for row in self._rows if row["step"] <= step]


class TrackerProcesses:
    """The child processes that send a run's numbers on, one for each tracker.

    ``async with``: they start with the block and get `end_s` at its end. What one of them cannot do is told once; the
    numbers stay in the store and in metrics.jsonl, and a resumed run sends what is missing.
    """

    def __init__(
        self,
        folder: RunFolder,
        names: Sequence[str],
        tell: Callable[[str], None],
        withhold: Iterable[str] = (),
        end_s: float = TRACKER_TIMEOUT_S,
    ) -> None:
        """withhold: variables of the environment with secrets; a tracker gets its own, by its standard input."""
        self._withhold = set(withhold)
        self._folder = folder
        self._names = names
        self._tell = tell
        self._end_s = end_s
        self._children: dict[str, Process] = {}
        self._background = BackgroundTasks()
        self._readers: set[asyncio.Task[None]] = set()
        self._ending = False
        self.state = "interrupted"
        """End of the run, for the trackers: finished, interrupted or failed."""

    async def __aenter__(self) -> TrackerProcesses:
        for name in self._names:
            self._children[name] = await self._start(name)
            self._readers.add(
                self._background.start(f"tracker {name}", partial(self._read, name, self._children[name]))
            )
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, asyncio.CancelledError):
            self.state = "failed"
        self._ending = True
        for child in self._children.values():
            _write(child, f"{self.state}\n".encode()).close()
        await asyncio.gather(*(self._end(name, child) for name, child in self._children.items()), *self._readers)

    def poke(self) -> None:
        """metrics.jsonl has grown. Never waits."""
        for child in self._children.values():
            _write(child, b"\n")

    def pids(self) -> dict[str, int]:
        """Process ids by tracker."""
        return {name: child.pid for name, child in self._children.items()}

    async def _start(self, name: str) -> Process:
        own = {key: os.environ[key] for key in TRACKER_KEYS.get(name, ()) if key in os.environ}
        program = "agentlightning.trainer.monitor.trackers"
        with open_private(self._folder.path / "logs" / f"tracker-{name}.log", "ab") as log:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", program, "--folder", str(self._folder.path), "--tracker", name),
                env=inheritable(os.environ, {*self._withhold, *own}),
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the trainer alone
            )
        _write(child, secrets_line(own))
        return child

    async def _end(self, name: str, child: Process) -> None:
        try:
            await asyncio.wait_for(child.wait(), self._end_s)
        except TimeoutError:
            child.kill()
            self._tell(f"tracker {name} did not take what was left within {self._end_s:.0f} s")

    async def _read(self, name: str, child: Process) -> None:
        """Passes its warnings on, until it ends."""
        assert child.stdout is not None
        async for line in child.stdout:
            self._tell(line.decode(errors="replace").rstrip("\n"))
        if not self._ending:
            self._tell(
                f"tracker {name} ended, see logs/tracker-{name}.log; what it lacks is in metrics.jsonl, and is sent when "
                "the run is resumed"
            )


def _write(child: Process, line: bytes) -> asyncio.StreamWriter:
    """Dropped where the child is gone: it reads the file anyway."""
    assert child.stdin is not None
    if child.returncode is None:
        child.stdin.write(line)
    return child.stdin
