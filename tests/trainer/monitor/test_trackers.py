"""TrackerProcesses: each row reaches them once, whatever ends in between; and the real ones, in processes of their own."""

import asyncio
import fcntl
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentlightning.config.run import Config, parse_config
from agentlightning.errors import MissingExtraError
from agentlightning.trainer.checkpoint import RESUMED, RunFolder
from agentlightning.trainer.monitor.metrics import path_of
from agentlightning.trainer.monitor.trackers import TRACKERS, Outbox, TrackerProcesses, check_trackers, feed

Logged = tuple[int, dict[str, float]]


class Remembering:
    """A tracker that keeps what it is told, and fails while `broken` says so."""

    def __init__(self, got: list[Logged], broken: Callable[[], bool] = lambda: False) -> None:
        self.got = got
        self.broken = broken
        self.ended: str | None = None

    def log(self, step: int, time: float, values: Mapping[str, float]) -> None:
        if self.broken():
            raise ConnectionError("the tracker's server is away")
        self.got.append((step, dict(values)))

    def close(self, state: str) -> None:
        self.ended = state


def row(step: int, kind: str = "step", **values: float) -> bytes:
    numbers = {path_of(name): value for name, value in values.items()}
    return orjson.dumps({"step": step, "kind": kind, "time": 1.7e9 + step} | numbers) + b"\n"


def append(folder: Path, *rows: bytes) -> None:
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"".join(rows))


def outbox(folder: Path) -> Outbox:
    return Outbox(folder / "metrics.jsonl", folder / "sent")


def unheard(text: str) -> None:
    raise AssertionError(text)


def test_rows_are_sent_in_order_with_their_metrics_by_group(tmp_path: Path) -> None:
    tracker = Remembering([])
    first = row(0, "eval/greedy", **{"eval/greedy/reward_mean": 0.25})
    append(tmp_path, first[:10])
    box = outbox(tmp_path)
    box.send(tracker)  # half a line
    assert tracker.got == []
    append(
        tmp_path, first[10:], row(1, **{"odd": 2.0, "policy/entropy": 0.1, "train/reward_mean": 0.5, "loss": math.nan})
    )
    feed(lambda: tracker, outbox(tmp_path), ["finished"], unheard)
    assert tracker.got == [
        (0, {"eval/greedy/reward_mean": 0.25}),
        (1, {"train/reward_mean": 0.5, "policy/entropy": 0.1, "odd": 2.0}),
    ]
    assert tracker.ended == "finished"


def test_a_resumed_run_goes_on_where_the_tracker_was_and_repeats_no_step(tmp_path: Path) -> None:
    got: list[Logged] = []
    append(tmp_path, row(1, loss=1.0), row(2, loss=2.0), row(2, "eval/greedy", **{"eval/greedy/reward_mean": 0.5}))
    feed(lambda: Remembering(got), outbox(tmp_path), [], unheard)
    append(
        tmp_path,
        row(1, RESUMED),
        row(2, loss=2.0),
        row(2, "eval/greedy", **{"eval/greedy/reward_mean": 0.5}),
        row(3, loss=3.0),
    )
    feed(lambda: Remembering(got), outbox(tmp_path), [], unheard)
    assert [step for step, _ in got] == [1, 2, 2, 3]


def test_a_tracker_that_fails_is_told_of_once_and_gets_everything_when_it_is_back(tmp_path: Path) -> None:
    got: list[Logged] = []
    away, told = [True], []

    def news() -> Any:
        for step in (1, 2, 3, 4):
            append(tmp_path, row(step, loss=1.0))
            away[0] = step < 4
            yield ""

    feed(lambda: Remembering(got, lambda: away[0]), outbox(tmp_path), news(), told.append)
    assert [step for step, _ in got] == [1, 2, 3, 4]
    (text,) = told
    assert "ConnectionError: the tracker's server is away" in text


def test_a_tracker_whose_package_is_missing_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers(list(TRACKERS))
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[wandb\]'"):
        check_trackers(["wandb"])


def config(trackers: tuple[str, ...] = ()) -> Config:
    return parse_config(
        {
            "model": {"path": "m"},
            "agent": {"run": "a.py:f"},
            "data": {"train": "t"},
            "trainer": {"trackers": list(trackers)},
            "store": {"url": "postgresql://u:secret-password@db/agl"},
        }
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    for name in ("WANDB_API_KEY", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB__SERVICE_WAIT", "200")  # seconds that W&B waits for its own process; by itself, 30
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    made = RunFolder(tmp_path / "runs", "20261121-1")
    made.create(config())
    return made


async def fed(folder: RunFolder, name: str, state: str, *rows: bytes) -> list[str]:
    """What was told while a process of the tracker sent these rows and ended."""
    told: list[str] = []
    trackers = TrackerProcesses(folder, [name], told.append, end_s=250)
    async with trackers:
        for each in rows:
            append(folder.path, each)
            trackers.poke()
        trackers.state = state
    return told


def read_tensorboard(folder: RunFolder) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    return [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors("policy/entropy")]


def records(log: bytes) -> Iterator[bytes]:
    """Of a LevelDB log: blocks of 32 KiB of (checksum 4, length 2, type 1, data), after a header of W&B's own."""
    at, data = 7, b""
    while at + 7 <= len(log):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(log[at + 4 : at + 6], "little"), log[at + 6]
        data += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield data
            data = b""


def read_wandb(folder: RunFolder) -> list[tuple[int, float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted((folder.path / "wandb").glob("offline-run-*/*.wandb")):
        assert path.name == f"run-{folder.run_id}.wandb"
        for data in records(path.read_bytes()):
            record = Record.FromString(data)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if "policy/entropy" in items:
                found.append((int(items["_step"]), float(items["policy/entropy"])))
    return found


def read_mlflow(folder: RunFolder) -> list[tuple[int, float]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder.path.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("agentlightning")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == folder.run_id
    assert run.info.status == "FINISHED"
    assert run.data.params["trainer.steps"] == "100"
    assert "secret-password" not in str(run.data.params)
    return [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "policy/entropy")]


def read_trackio(folder: RunFolder) -> list[tuple[int, float]]:
    program = "import sys, trackio, json\n"
    program += f"run = trackio.Api().runs('agentlightning')[0]; assert run.name == {folder.run_id!r}\n"
    program += "from trackio.sqlite_storage import SQLiteStorage\n"
    program += f"rows = SQLiteStorage.get_logs('agentlightning', {folder.run_id!r})\n"
    program += "print(json.dumps([[row['step'], row['policy/entropy']] for row in rows if 'policy/entropy' in row]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [(step, value) for step, value in orjson.loads(done.stdout.splitlines()[-1])]


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "tensorboard",
        pytest.param("wandb", marks=pytest.mark.slow),
        *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long]) for name in ("mlflow", "trackio")),
    ],
)
async def test_a_real_tracker_shows_each_step_once_also_after_the_run_was_resumed(folder: RunFolder, name: str) -> None:
    first = [row(step, entropy=step / 4, loss=1.0) for step in (1, 2, 3)]
    assert await fed(folder, name, "interrupted", *first) == []
    resumed = [row(2, RESUMED), first[2], row(4, entropy=1.0, loss=1.0)]
    assert await fed(folder, name, "finished", *resumed) == []
    assert READERS[name](folder) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]


async def test_a_tracker_that_cannot_work_is_told_of_once_and_keeps_others_from_its_run(folder: RunFolder) -> None:
    """The one of a trainer that was killed may still be sending when the run is resumed."""
    told: list[str] = []
    heard = asyncio.Event()

    def tell(text: str) -> None:
        told.append(text)
        heard.set()

    (folder.path / "tensorboard").write_text("a file where its folder should be")
    append(folder.path, row(1, loss=1.0), row(2, loss=1.0))
    async with TrackerProcesses(folder, ["tensorboard"], tell, end_s=250):
        await heard.wait()
        with (folder.path / "trackers" / "tensorboard.lock").open("rb") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert len(told) == 1
    assert told[0].startswith("tracker tensorboard failed (")


async def test_a_tracker_that_is_killed_is_told_of_and_the_next_one_sends_what_is_missing(folder: RunFolder) -> None:
    told: list[str] = []
    heard = asyncio.Event()

    def tell(text: str) -> None:
        told.append(text)
        heard.set()

    trackers = TrackerProcesses(folder, ["tensorboard"], tell)
    async with trackers:
        (pid,) = trackers.pids().values()
        os.kill(pid, signal.SIGKILL)
        await heard.wait()
        append(folder.path, row(1, entropy=0.5))
        trackers.poke()
    assert "is sent when the run is resumed" in told[0]
    assert await fed(folder, "tensorboard", "finished") == []
    assert read_tensorboard(folder) == [(1, 0.5)]


async def test_a_tracker_sends_what_is_left_when_its_trainer_is_killed(folder: RunFolder) -> None:
    program = f"""
import asyncio, os, signal
from pathlib import Path
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.monitor.trackers import TrackerProcesses
async def main():
    folder = RunFolder(Path({str(folder.path.parent)!r}), {folder.run_id!r})
    async with TrackerProcesses(folder, ["tensorboard"], print) as trackers:
        with (folder.path / "metrics.jsonl").open("ab", buffering=0) as file:
            file.write({row(1, entropy=0.5)!r})
            trackers.poke()
            while not (folder.path / "trackers" / "tensorboard.sent").exists():
                await asyncio.sleep(0)
            file.write({row(2, entropy=0.25)!r})
        print(*trackers.pids().values(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert await fed(folder, "tensorboard", "finished") == []  # waits for the one that was left alone
    assert read_tensorboard(folder) == [(1, 0.5), (2, 0.25)]
    (file,) = (folder.path / "tensorboard").iterdir()
    assert f".{done.stdout.strip()}." in file.name  # it was that one that sent both


def test_a_tracker_that_never_opens_ends_quietly_with_its_run(tmp_path: Path) -> None:
    def refuse() -> Remembering:
        raise RuntimeError("no API key")

    told: list[str] = []
    append(tmp_path, row(1, loss=1.0))
    feed(refuse, outbox(tmp_path), ["", "", "finished"], told.append)
    assert len(told) == 1
    assert not (tmp_path / "sent").exists()
