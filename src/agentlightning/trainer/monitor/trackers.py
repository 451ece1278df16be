"""Trackers by name: TensorBoard, Weights & Biases, MLflow, trackio; and a process for each, which no run waits for.

    python -m agentlightning.trainer.monitor.trackers --folder runs/ID --tracker NAME

A process reads metrics.jsonl, sends each row once, and lists what it has sent, so that a resumed run goes on where the
tracker was. Trackers are imported here alone.
"""

from __future__ import annotations

if __name__ == "__main__":
    from agentlightning.runtime.process_secrets import hide_memory

    hide_memory()  # before anything else is imported

import argparse
import asyncio
import contextlib
import fcntl
import importlib.util
import os
import signal
import sys
import traceback
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import orjson

from agentlightning.config.external import TRACKER_KEYS
from agentlightning.config.run import run_record
from agentlightning.errors import MissingExtraError
from agentlightning.records import JSON
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.runtime.children import inheritable, keep_files_private, receive_secrets, secrets_line
from agentlightning.runtime.disk import open_private
from agentlightning.trainer.checkpoint import RESUMED, RunFolder
from agentlightning.trainer.monitor.metrics import in_order, numbers

PROJECT = "agentlightning"
"""Name of the project or experiment, where the tracker's own variable names none."""
ORPHAN_TIMEOUT_S = 60
"""Seconds that a tracker whose trainer is gone may take to send what is left."""
END_TIMEOUT_S = 30.0
"""Seconds that a tracker has to send what is left when a run ends."""
MAX_PARAMS = 100
"""Parameters that MLflow takes at a time."""


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


TRACKERS: Mapping[str, Callable[[RunFolder, Mapping[str, str]], Tracker]] = {
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
    _known: set[str] = field(default_factory=set)
    _waiting: list[JSON] = field(default_factory=list)
    _read: int = 0

    def __post_init__(self) -> None:
        self._known.update(self.sent.read_text().splitlines() if self.sent.exists() else ())

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
                file.write(f"{_key(row)}\n")
            self._waiting.remove(row)

    def _take(self, line: bytes) -> None:
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            return  # a full disk or a power cut leaves half a line
        if row["kind"] != RESUMED and _key(row) not in self._known:
            self._known.add(_key(row))
            self._waiting.append(row)


def _key(row: JSON) -> str:
    return f"{row['step']} {row['kind']}"


def feed(open_tracker: Callable[[], Tracker], outbox: Outbox, news: Iterable[str], tell: Callable[[str], None]) -> None:
    """Send rows until the news end: each is empty where there are rows, the last one says how the run ended.

    What fails is told once, and tried again with the next row and at the end.
    """
    tracker: Tracker | None = None
    failing, state = False, "interrupted"

    def attempt() -> None:
        nonlocal tracker, failing
        try:
            if outbox.waiting():
                tracker = tracker or open_tracker()
                outbox.send(tracker)
            failing = False
        except Exception as error:  # whatever a tracker raises: it must not end
            traceback.print_exc()
            if not failing:
                tell(f"failed ({_in_one_line(error)}); it is tried again with each step, and no number is lost")
            tracker, failing = None, True

    attempt()
    for word in news:
        state = word or state
        attempt()
    attempt()  # a trainer that was killed said nothing of its last row
    if tracker is not None:
        try:
            tracker.close(state)
        except Exception as error:
            traceback.print_exc()
            tell(f"could not be closed ({_in_one_line(error)})")


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


class TrackerProcesses:
    """The processes of a run's trackers: ``async with``, they get `end_s` at its end. A failure is reported once."""

    def __init__(
        self,
        folder: RunFolder,
        names: Sequence[str],
        tell: Callable[[str], None],
        withhold: Iterable[str] = (),
        end_s: float = END_TIMEOUT_S,
    ) -> None:
        """withhold: variables with secrets; a tracker gets its own, by its standard input."""
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
            child = self._children[name] = await self._start(name)
            self._readers.add(self._background.start(f"tracker {name}", partial(self._read, name, child)))
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
        return {name: child.pid for name, child in self._children.items()}

    async def _start(self, name: str) -> Process:
        own = {key: os.environ[key] for key in TRACKER_KEYS.get(name, ()) if key in os.environ}
        program = "agentlightning.trainer.monitor.trackers"
        with open_private(self._folder.path / "logs" / f"tracker-{name}.log", "ab") as log:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", program, "--folder", str(self._folder.path), "--tracker", name),
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tracker", choices=sorted(TRACKERS), required=True)
    options = parser.parse_args()
    report = os.dup(1)  # standard output is for what a person should read; what a tracker prints goes to its log
    os.dup2(2, 1)
    keep_files_private()
    os.environ.update(receive_secrets())  # its keys, where its library looks for them
    for number in (signal.SIGINT, signal.SIGTERM):  # it ends when its trainer says so or is gone
        signal.signal(number, signal.SIG_IGN)
    folder = RunFolder(options.folder.parent, options.folder.name)
    beside = folder.path / "trackers"
    beside.mkdir(exist_ok=True)
    held = (beside / f"{options.tracker}.lock").open("ab")
    fcntl.flock(held, fcntl.LOCK_EX)  # the one of a trainer that was killed may still be sending

    def news() -> Iterable[str]:
        for line in sys.stdin:
            yield line.strip()
        signal.alarm(ORPHAN_TIMEOUT_S)

    def tell(text: str) -> None:
        with contextlib.suppress(OSError):  # its trainer is gone
            os.write(report, f"tracker {options.tracker} {text}\n".encode())

    settings = flat(run_record(folder.config()))
    outbox = Outbox(folder.path / "metrics.jsonl", beside / f"{options.tracker}.sent")
    feed(lambda: TRACKERS[options.tracker](folder, settings), outbox, news(), tell)


if __name__ == "__main__":
    main()
