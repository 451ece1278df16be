"""Trackers by name: TensorBoard, Weights & Biases, MLflow, trackio; and the threads that feed them.

Each tracker of a run has a thread. It reads metrics.jsonl, sends each row once, and lists what it has sent, so that a
resumed run continues where the tracker was. A step that a crash undid is executed again from the same rollouts and
weights and gives the same numbers: the tracker keeps the first. Whatever happens to a tracker, the run neither ends nor
waits for it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import orjson

from agentlightning.config.run import run_record
from agentlightning.errors import MissingExtraError
from agentlightning.records import JSON
from agentlightning.trainer.checkpoint import RESUMED, RunFolder
from agentlightning.trainer.monitor.metrics import in_order, numbers

PROJECT = "agentlightning"
"""Name of the project or experiment, where the tracker's own variable names none."""
TRACKER_TIMEOUT_S = 30.0
"""Seconds that a tracker has to send what is left when a run ends."""
MAX_PARAMS = 100
"""Parameters that MLflow takes at a time."""

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Sends metrics to one tracker. Whatever it raises is reported once, and it is opened again with the next row."""

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Numbers of a step by tracker's names, with the time in seconds since the epoch; on disk or on their way when it
        returns."""

    def close(self, state: str) -> None:
        """The run is finished, interrupted (to be resumed) or failed."""


def check_trackers(names: Sequence[str]) -> None:
    """MissingExtraError where one is not installed: package and extra have the tracker's name."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError(name, name)


class TensorBoard:
    """Event files under the run's folder: ``tensorboard --logdir runs`` shows all runs."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, str]) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder.path / "tensorboard"))

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, wall_time=time)
        self._writer.flush()

    def close(self, state: str) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases with the run's id; WANDB_API_KEY, WANDB_MODE and the like are W&B's own variables."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, str]) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=folder.run_id,
            name=folder.run_id,
            dir=str(folder.path),
            resume="allow",
            config=dict(settings),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)


class MLflow:
    """A run of MLflow with the tag agl_run: at MLFLOW_TRACKING_URI, else in ``mlflow.db`` beside the runs' folders."""

    STATES: Mapping[str, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}

    def __init__(self, folder: RunFolder, settings: Mapping[str, str]) -> None:
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        root = folder.path.resolve().parent
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._metric = entities.Metric
        self._client = MlflowClient(tracking_uri=uri or f"sqlite:///{root / 'mlflow.db'}")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        known = self._client.get_experiment_by_name(name)
        artifacts = None if uri else (root / "mlflow-artifacts").as_uri()
        experiment = known.experiment_id if known else self._client.create_experiment(name, artifacts)
        found = self._client.search_runs([experiment], f"tags.agl_run = '{folder.run_id}'", max_results=1)
        if found:
            run = found[0]
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            run = self._client.create_run(experiment, tags={"agl_run": folder.run_id}, run_name=folder.run_id)
        self._id: str = run.info.run_id
        if not run.data.params:
            params = [entities.Param(key, value[:500]) for key, value in settings.items()]
            for start in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS])

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._client.log_batch(
            self._id, metrics=[self._metric(name, value, int(time * 1000), step) for name, value in values.items()]
        )

    def close(self, state: str) -> None:
        self._client.set_terminated(self._id, self.STATES[state])


class Trackio:
    """A run of trackio with the run's id: in trackio's own folder (TRACKIO_DIR), or where its variables say."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, str]) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=folder.run_id,
            config=dict(settings),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, state: str) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[RunFolder, Mapping[str, str]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


@dataclass
class Outbox:
    """Rows of metrics.jsonl that a tracker has not got. `sent` lists what it has: a step and a kind a line."""

    rows: Path
    sent: Path
    _known: set[tuple[int, str]] = field(default_factory=set)
    _waiting: list[JSON] = field(default_factory=list)
    _read: int = 0

    def __post_init__(self) -> None:
        for line in self.sent.read_text().splitlines() if self.sent.exists() else ():
            step, _, kind = line.partition(" ")
            if step.isdigit() and kind:
                self._known.add((int(step), kind))

    def waiting(self) -> list[JSON]:
        """The rows to send, oldest first; the last line counts once it is whole."""
        if self.rows.exists():
            with self.rows.open("rb") as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]
            self._read += len(whole) + 1 if whole else 0
            for line in whole.splitlines():
                self._take(line)
        return self._waiting

    def send(self, tracker: Tracker) -> None:
        """Send all that waits, and remember it row by row."""
        for row in list(self.waiting()):
            values = numbers(row)
            tracker.log(row["step"], row["time"], {path: values[path] for path in in_order(values)})
            with self.sent.open("a") as file:
                file.write(f"{row['step']} {row['kind']}\n")
            self._waiting.remove(row)

    def _take(self, line: bytes) -> None:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            return  # a full disk or a power cut leaves half a line
        key = (row["step"], row["kind"])
        if row["kind"] != RESUMED and key not in self._known:
            self._known.add(key)
            self._waiting.append(row)


class TrackerThreads:
    """The threads that send a run's numbers on, one for each tracker.

    ``async with``: they start with the block and get `end_s` at its end. A failure is reported once and tried again with
    each row; the numbers stay in the store and in metrics.jsonl, and a resumed run sends what is missing.
    """

    def __init__(
        self, folder: RunFolder, names: Sequence[str], tell: Callable[[str], None], end_s: float = TRACKER_TIMEOUT_S
    ) -> None:
        self._tell = tell
        self._end_s = end_s
        self._feeds = {name: _Feed(name, folder, tell) for name in names}
        self.state = "interrupted"
        """End of the run, for the trackers: finished, interrupted or failed."""

    async def __aenter__(self) -> TrackerThreads:
        for feed in self._feeds.values():
            feed.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, asyncio.CancelledError):
            self.state = "failed"
        for feed in self._feeds.values():
            feed.rows.put(self.state)
        deadline = time.monotonic() + self._end_s
        for name, feed in self._feeds.items():
            await asyncio.to_thread(feed.join, max(0.0, deadline - time.monotonic()))
            if feed.is_alive():  # a daemon, which does not hold up the end of the process
                self._tell(f"tracker {name} did not take what was left within {self._end_s:.0f} s")

    def poke(self) -> None:
        """metrics.jsonl has grown. Never waits."""
        for feed in self._feeds.values():
            feed.rows.put("")


class _Feed(threading.Thread):
    """Sends rows to one tracker until it is told how the run ended."""

    def __init__(self, name: str, folder: RunFolder, tell: Callable[[str], None]) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self.rows: queue.SimpleQueue[str] = queue.SimpleQueue()
        """An empty text where there are new rows; the end of the run last."""
        self._kind = name
        self._folder = folder
        self._report = tell
        self._tracker: Tracker | None = None
        self._failing = False

    def run(self) -> None:
        sent = self._folder.path / "trackers" / f"{self._kind}.sent"
        sent.parent.mkdir(exist_ok=True)
        outbox = Outbox(self._folder.path / "metrics.jsonl", sent)
        self._send(outbox)
        while not (state := self.rows.get()):
            self._send(outbox)
        self._send(outbox)
        if self._tracker is not None:
            try:
                self._tracker.close(state)
            except Exception as error:
                log.exception("tracker %s", self._kind)
                self._report(f"tracker {self._kind} could not be closed ({_in_one_line(error)})")

    def _send(self, outbox: Outbox) -> None:
        try:
            if outbox.waiting():
                self._tracker = self._tracker or self._open()
                outbox.send(self._tracker)
            self._failing = False
        except Exception as error:  # whatever a tracker raises: the run goes on
            log.exception("tracker %s", self._kind)
            if not self._failing:
                self._report(
                    f"tracker {self._kind} failed ({_in_one_line(error)}); it is tried again with each step, and no number "
                    "is lost"
                )
            self._tracker, self._failing = None, True

    def _open(self) -> Tracker:
        return TRACKERS[self._kind](self._folder, flat(run_record(self._folder.config())))


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """A configuration by dotted names, as text.

    >>> flat({"trainer": {"steps": 3, "seed": 0}, "external": {}})
    {'trainer.steps': '3', 'trainer.seed': '0'}
    """
    found: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = str(value)
    return found


def _in_one_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".replace("\n", " ")
    return text if len(text) <= 300 else f"{text[:300]}…"
