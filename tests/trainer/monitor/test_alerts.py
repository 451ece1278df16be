"""Alarms of a run: what no step shows, and how alarms are sent."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from loop_doubles import Noting

from agentlightning.config.external import secret_variables
from agentlightning.config.run import AlertsConfig
from agentlightning.errors import ConfigError, StoreError
from agentlightning.records import NewRollout
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.monitor.health_checks import Alarm, Load, active_alarms, load_alarms
from agentlightning.trainer.monitor.metric_logger import LoadWatch, MetricLogger
from agentlightning.trainer.monitor.senders import AlertSender

ALARM = Alarm("no_signal", "nothing can be learned")


def test_a_url_in_place_of_a_variable_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError, match=r"webhook_env: expected the name of an environment variable, .*not the URL$"):
        AlertsConfig(webhook_env="https://hooks.slack.com/services/T0/B0/SECRET")


def test_agents_and_commands_do_not_inherit_the_webhook() -> None:
    assert secret_variables({"alerts": {"webhook_env": "HOOK"}}) == {"HOOK"}


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (Load(queued=3, workerless_s=120), "queue_without_workers"),
        (Load(queued=3, workerless_s=119), None),
        (Load(queued=3, oldest_queued_s=1800), "queue_old"),
        (Load(queued=3, oldest_queued_s=1799), None),
        (Load(free_bytes=2**30 - 1), "disk_filling"),
        (Load(silent_s=1800, longest_pause_s=180), "run_silent"),
        (Load(paused=["5 of the last 5 attempts"]), "workers_paused"),
        (Load(silent_s=1e6), None),
        (Load(silent_s=1799, longest_pause_s=1), None),
        (Load(silent_s=1800, longest_pause_s=181), None),
    ],
)
def test_an_alarm_of_the_load_begins_at_its_bound_and_is_in_the_docs(load: Load, name: str | None) -> None:
    assert [alarm.name for alarm in load_alarms(load)] == ([] if name is None else [name])
    docs = (Path(__file__).parents[3] / "docs" / "console.md").read_text()
    assert name is None or f"| `{name}` |" in docs


def logger(store: InMemoryLightningStore, root: Path) -> tuple[MetricLogger, Noting]:
    folder, notes = RunFolder(root, "run"), Noting()
    folder.make()
    return MetricLogger(run_id="run", folder=folder, store=store, progress=notes), notes


async def active(store: InMemoryLightningStore) -> list[str]:
    (run,) = await store.runs(ids=["run"])
    return list(active_alarms(run))


async def test_an_alarm_that_began_while_the_store_was_away_is_told_when_it_is_back(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    class Away(InMemoryLightningStore):
        async def update_run(self, *_: Any, **__: Any) -> Any:
            raise StoreError("away")

    watched, notes = logger(store, tmp_path)
    watched.store = Away()
    with pytest.raises(StoreError):
        await watched.report_load([Alarm("disk_filling", "little is left")])
    watched.store = store

    await watched.report_load([Alarm("disk_filling", "little is left")])

    assert notes.notes == ["warning disk_filling: little is left"]


async def test_rollouts_that_wait_without_a_worker_are_told_until_one_comes(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    watched, notes = logger(store, tmp_path)
    now = [0.0]
    watch = LoadWatch(store=store, logger=watched, clock=lambda: now[0])
    await store.enqueue([NewRollout(run_id="run", group_id="g", replica=0, task={})])

    await watch.look()
    assert await active(store) == []
    now[0] = 130.0
    await watch.look()
    await watch.look()

    assert await active(store) == ["queue_without_workers"]
    assert [note.partition(":")[0] for note in notes.notes] == ["warning queue_without_workers"]

    await watched.record(1, "step", {"train/reward_mean": 0.9})
    assert await active(store) == ["queue_without_workers"]
    await watched.report_load([])
    assert await active(store) == []


class Webhook:
    """A server that keeps what it is told, and answers as it is told."""

    def __init__(self) -> None:
        self.got: list[Any] = []
        self.answers: list[bytes | None] = []
        self.came = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        self.got.append(orjson.loads(await reader.readexactly(length)))
        answer = self.answers.pop(0) if self.answers else b"200 OK"
        self.came.set()
        if answer is None:
            await reader.read()  # it hangs until the other side gives up
        else:
            writer.write(b"HTTP/1.1 " + answer + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()


@asynccontextmanager
async def webhook(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Webhook]:
    hook = Webhook()
    server = await asyncio.start_server(hook.serve, "127.0.0.1", 0)
    monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/services/SECRET")
    async with server:
        yield hook


def unheard(text: str) -> None:
    raise AssertionError(text)


HOOK = AlertsConfig(webhook_env="HOOK")


@pytest.mark.parametrize(
    ("answers", "told", "tries"),
    [
        ([], [], 2),
        ([b"503 Busy"], [], 3),  # asked again
        ([b"404 Not Found"] * 2, ["alerts: the webhook answered 404"], 2),  # told once, without its URL
    ],
)
async def test_an_alarm_reaches_a_webhook_in_slack_s_format(
    monkeypatch: pytest.MonkeyPatch, answers: list[bytes | None], told: list[str], tries: int
) -> None:
    notes: list[str] = []
    async with webhook(monkeypatch) as hook, AlertSender(HOOK, "run", notes.append) as alerts:
        hook.answers = answers
        for step in (3, 4):
            alerts.put(step, ALARM)
        await hook.came.wait()

    assert hook.got[0] == {"text": "run run, step 3: no_signal: nothing can be learned"}
    assert (notes, len(hook.got)) == (told, tries)


async def test_a_command_reads_the_alarm_and_inherits_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = tmp_path / "got"
    program = f"import os, sys; open({str(got)!r}, 'w').write(sys.stdin.read() + str('HOOK' in os.environ))"
    async with webhook(monkeypatch):
        settings = AlertsConfig(webhook_env="HOOK", command=(sys.executable, "-c", program))
        async with AlertSender(settings, "run", unheard) as alerts:
            alerts.put(3, ALARM)

    assert got.read_text() == "run run, step 3: no_signal: nothing can be learned\nFalse"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("/nothing/there",), "cannot be started: No such file or directory"),
        ((sys.executable, "-c", "raise SystemExit(3)"), "ended with exit code 3"),
    ],
)
async def test_a_command_that_fails_is_told_once(command: tuple[str, ...], why: str) -> None:
    told: list[str] = []
    async with AlertSender(AlertsConfig(command=command), "run", told.append) as alerts:
        alerts.put(3, ALARM)
        alerts.put(4, ALARM)

    assert told == [f"alerts: the command {why}"]


@pytest.mark.parametrize("url", ["", "http://localhost:70000/hook", "http://localhost:x/hook", "http://[::1/hook"])
def test_a_variable_without_a_url_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HOOK", url)
    with pytest.raises(ConfigError, match=r"expected the variable HOOK to hold an http\(s\) URL$"):
        AlertSender(HOOK, "run", unheard)
