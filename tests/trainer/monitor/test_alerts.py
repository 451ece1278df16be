"""Alarms: bounds of one's own, what no step shows, what people say of them, and how they are sent."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from notes import Notes
from pydantic import ValidationError

from agentlightning.config.alerts import AlertRuleConfig, AlertsConfig
from agentlightning.config.external import secret_variables
from agentlightning.errors import ConfigError, InputError, StoreError
from agentlightning.records import NewRollout
from agentlightning.store.sql.store import InMemoryLightningStore
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.monitor.alert_rules import LOAD_CHECKS, Load, alert_checks, load_alarms
from agentlightning.trainer.monitor.alert_sender import FILE, SENT, AlertSender
from agentlightning.trainer.monitor.alert_state import (
    MAX_HISTORY,
    acknowledged,
    active_alarms,
    begun,
    history,
    shown_alerts,
    silenced,
)
from agentlightning.trainer.monitor.health_checks import Alarm, History
from agentlightning.trainer.monitor.load_watch import LoadWatch
from agentlightning.trainer.monitor.metric_logger import MetricLogger

LOW = {"low": AlertRuleConfig(metric="train/reward_mean", below=0.5, steps=2)}
ALARM = Alarm("no_signal", "nothing can be learned")


def rewards(*values: float) -> History:
    return History(steps=[{"step": at, "train/reward_mean": value} for at, value in enumerate(values)], base={})


def test_a_bound_holds_where_all_of_the_last_steps_are_beyond_it() -> None:
    check = alert_checks(LOW)["low"]

    assert check(rewards(0.1)) is None
    assert check(rewards(0.9, 0.1)) is None
    assert check(rewards(0.9, 0.1, 0.2)) == "train/reward_mean is 0.2, below 0.5 in all of the last 2 steps"


@given(st.lists(st.floats(allow_nan=True), max_size=6), st.integers(1, 4), st.floats(-10, 10))
def test_a_bound_from_above_is_one_from_below_of_negated_values(values: list[float], steps: int, bound: float) -> None:
    above = alert_checks({"a": AlertRuleConfig(metric="train/reward_mean", above=bound, steps=steps)})["a"]
    below = alert_checks({"a": AlertRuleConfig(metric="train/reward_mean", below=-bound, steps=steps)})["a"]

    assert (above(rewards(*values)) is None) == (below(rewards(*(-value for value in values))) is None)


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ({"no_signal": LOW["low"]}, "alerts.rules.no_signal: expected another name"),
        ({"mine": AlertRuleConfig(metric="train/reward", above=1)}, "alerts.rules.mine.metric: expected a metric"),
        (
            {"mine": AlertRuleConfig(metric="policies/a/train/loss", above=1)},
            "alerts.rules.mine.metric: expected a metric",
        ),
    ],
)
def test_a_rule_that_could_never_hold_is_refused(rules: dict[str, AlertRuleConfig], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        alert_checks(rules)


@pytest.mark.parametrize(
    ("table", "named"),
    [
        (
            {"webhook_env": "https://hooks.slack.com/services/T0/B0/SECRET"},
            "expected the name of an environment variable",
        ),
        ({"rules": {"a b": {"metric": "train/loss", "above": 1}}}, "expected names of letters"),
        ({"rules": {"a": {"metric": "train/loss"}}}, "expected either above or below"),
        ({"rules": {"a": {"metric": "eval/loss", "above": 1}}}, "expected one of training steps"),
    ],
)
def test_settings_that_mean_nothing_are_refused(table: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        AlertsConfig.model_validate(table)


def test_agents_and_commands_do_not_inherit_the_webhook() -> None:
    assert secret_variables({"alerts": {"webhook_env": "HOOK"}}) == {"HOOK"}


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (Load(queued=3, workerless_s=120), "queue_without_workers"),
        (Load(queued=3, oldest_queued_s=1800), "queue_old"),
        (Load(free_bytes=2**30 - 1), "disk_filling"),
        (Load(silent_s=1800, longest_pause_s=180), "run_silent"),
    ],
)
def test_what_no_step_shows_is_told(load: Load, name: str) -> None:
    assert [alarm.name for alarm in load_alarms(load)] == [name]


@pytest.mark.parametrize(
    "load",
    [
        Load(),
        Load(queued=3, workerless_s=119),
        Load(queued=3, oldest_queued_s=1799),
        Load(silent_s=1e6),
        Load(silent_s=1799, longest_pause_s=1),
        Load(silent_s=1800, longest_pause_s=181),
    ],
)
def test_what_is_usual_is_not_told(load: Load) -> None:
    assert load_alarms(load) == []


def logger(store: InMemoryLightningStore, root: Path) -> tuple[MetricLogger, Notes]:
    folder, notes = RunFolder(root, "run"), Notes()
    folder.make()
    return MetricLogger(run_id="run", folder=folder, store=store, progress=notes, rules=alert_checks(LOW)), notes


async def run_of(store: InMemoryLightningStore) -> Any:
    return (await store.runs(ids=["run"]))[0]


async def log_rewards(watched: MetricLogger, first: int, *values: float) -> None:
    for step, value in enumerate(values, first):
        await watched.record(step, "step", {"train/reward_mean": value})


async def test_an_alarm_is_in_the_history_and_told_once_while_it_lasts(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    watched, notes = logger(store, tmp_path)
    told: list[tuple[int, str]] = []
    watched.on_alarm = lambda step, alarm: told.append((step, alarm.name))

    await log_rewards(watched, 1, 0.1, 0.1, 0.1, 0.9)

    run = await run_of(store)
    assert told == [(2, "low")]
    assert len(notes.notes) == 1
    assert [(one["step"], one["name"]) for one in history(run)] == [(2, "low")]
    assert active_alarms(run) == {}
    assert [(one.name, one.state, one.since_step) for one in shown_alerts(run, 0)] == [("low", "ended", 2)]


async def test_a_silenced_alarm_is_in_the_history_and_is_not_told(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    watched, notes = logger(store, tmp_path)
    await store.update_run("run", summary=silenced(await run_of(store), "low", 2**62))

    await log_rewards(watched, 1, 0.1, 0.1)

    run = await run_of(store)
    assert notes.notes == []
    assert [(one.state, one.since_step) for one in shown_alerts(run, 0)] == [("silenced", 2)]
    assert [one.state for one in shown_alerts(run, 2**62)] == ["active"]


async def test_an_acknowledgement_ends_with_its_alarm(store: InMemoryLightningStore, tmp_path: Path) -> None:
    watched, _ = logger(store, tmp_path)
    await log_rewards(watched, 1, 0.1, 0.1)
    await store.update_run("run", summary=acknowledged(await run_of(store), "low"))
    assert [one.state for one in shown_alerts(await run_of(store), 0)] == ["acknowledged"]

    await log_rewards(watched, 3, 0.9, 0.1, 0.1)

    assert [one.state for one in shown_alerts(await run_of(store), 0)] == ["active"]


async def test_what_is_said_of_an_alarm_that_is_not_there_is_refused(store: InMemoryLightningStore) -> None:
    run = await run_of(store)
    with pytest.raises(InputError, match="expected an alarm that holds; none holds"):
        acknowledged(run, "low")
    with pytest.raises(InputError, match="no such alarm"):
        silenced(run, "lo", 1)
    assert silenced(run, "white/low", 1) == {"alert:white/low": {"silenced_until_ns": 1}}


WRONG: list[Any] = [None, 7, -1.5, 1e300, True, "text", [], [1, "a"], {}, {"a": 1}, [{"step": [], "name": {}}],
                    [{"step": 1, "name": "low", "time": 1e300, "text": "x"}], {"low": 1}, {"low": None},
                    {"acknowledged": 1}, {"silenced_until_ns": "soon"}, {"silenced_until_ns": 1e300},
                    {"silenced_until_ns": 2**64 - 1}]  # fmt: skip


@pytest.mark.parametrize("key", ["alarms", "alert_history", "alert:low", "alert:"])
@pytest.mark.parametrize("value", WRONG)
async def test_a_summary_that_somebody_filled_with_anything_ends_neither_the_run_nor_the_list_of_alarms(
    store: InMemoryLightningStore, tmp_path: Path, key: str, value: Any
) -> None:
    watched, notes = logger(store, tmp_path)
    await store.update_run("run", summary={key: value})
    run = await run_of(store)
    assert all(isinstance(one.state, str) for one in shown_alerts(run, 0))
    assert silenced(run, "low", 1)["alert:low"]["silenced_until_ns"] == 1

    await log_rewards(watched, 1, 0.1, 0.1)

    run = await run_of(store)
    assert [(one["step"], one["name"]) for one in history(run)][-1] == (2, "low")
    assert shown_alerts(run, 0)[0].name == "low"
    assert len(notes.notes) == 1


async def test_an_alarm_that_began_while_the_store_was_away_is_told_when_it_is_back(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    class Away(InMemoryLightningStore):
        async def update_run(self, *_: Any, **__: Any) -> Any:
            raise StoreError("away")

    watched, notes = logger(store, tmp_path)
    watched.store = Away()
    with pytest.raises(StoreError):
        await watched.tell_load([Alarm("disk_filling", "little is left")])
    watched.store = store

    await watched.tell_load([Alarm("disk_filling", "little is left")])

    assert notes.notes == ["warning disk_filling: little is left"]


def test_the_history_is_bounded_and_has_no_step_twice() -> None:
    summary: dict[str, Any] = {}
    for step in range(2 * MAX_HISTORY):
        for _ in range(2):  # a step that a crash undid is executed again
            summary |= begun(summary, [ALARM], step, step)

    assert [one["step"] for one in summary["alert_history"]] == list(range(MAX_HISTORY, 2 * MAX_HISTORY))


async def test_rollouts_that_wait_without_a_worker_are_told_until_one_comes(
    store: InMemoryLightningStore, tmp_path: Path
) -> None:
    watched, notes = logger(store, tmp_path)
    now = [0.0]
    watch = LoadWatch(store=store, logger=watched, clock=lambda: now[0])
    await store.enqueue([NewRollout(run_id="run", group_id="g", replica=0, task={})])

    await watch.look()
    assert active_alarms(await run_of(store)) == {}
    now[0] = 130.0
    await watch.look()
    await watch.look()

    assert list(active_alarms(await run_of(store))) == ["queue_without_workers"]
    assert [note.partition(":")[0] for note in notes.notes] == ["warning queue_without_workers"]

    await log_rewards(watched, 1, 0.9)
    assert list(active_alarms(await run_of(store))) == ["queue_without_workers"]
    await watched.tell_load([])
    assert active_alarms(await run_of(store)) == {}


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


def sender(folder: Path, settings: AlertsConfig, tell: Callable[[str], None]) -> AlertSender:
    return AlertSender(settings, "run", folder, tell)


def unheard(text: str) -> None:
    raise AssertionError(text)


async def test_an_alarm_reaches_a_webhook_in_slack_s_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with webhook(monkeypatch) as hook, sender(tmp_path, AlertsConfig(webhook_env="HOOK"), unheard) as alerts:
        alerts.put(3, ALARM)
        alerts.put(3, ALARM)
        await hook.came.wait()

    assert hook.got == [{"text": "run run, step 3: no_signal: nothing can be learned"}]


async def test_a_webhook_that_is_busy_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with webhook(monkeypatch) as hook, sender(tmp_path, AlertsConfig(webhook_env="HOOK"), unheard) as alerts:
        hook.answers = [b"503 Busy"]
        alerts.put(3, ALARM)

    assert len(hook.got) == 2


async def test_a_webhook_that_refuses_is_told_once_without_its_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    async with webhook(monkeypatch) as hook, sender(tmp_path, AlertsConfig(webhook_env="HOOK"), told.append) as alerts:
        hook.answers = [b"404 Not Found", b"404 Not Found"]
        alerts.put(3, ALARM)
        alerts.put(4, ALARM)

    assert told == [f"alerts: the webhook answered 404; every alarm is in {FILE}"]
    assert [orjson.loads(line)["step"] for line in (tmp_path / FILE).read_bytes().splitlines()] == [3, 4]


async def test_what_a_kill_left_unsent_is_sent_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = AlertsConfig(webhook_env="HOOK")
    async with webhook(monkeypatch) as hook:
        killed = sender(tmp_path, settings, unheard)
        killed.put(3, ALARM)
        killed.put(4, ALARM)
        (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes() + b'{"step": 5, "na')  # it died in a line

        async with sender(tmp_path, settings, unheard) as alerts:
            alerts.put(4, ALARM)  # a step that is executed again
            alerts.put(6, ALARM)
        async with sender(tmp_path, settings, unheard):
            pass

    assert [one["text"].partition(":")[0] for one in hook.got] == [f"run run, step {step}" for step in (3, 4, 6)]
    assert int((tmp_path / SENT).read_bytes()) == (tmp_path / FILE).stat().st_size


async def test_a_command_reads_the_alarm_and_inherits_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = tmp_path / "got"
    program = f"import os, sys; open({str(got)!r}, 'w').write(sys.stdin.read() + str('HOOK' in os.environ))"
    async with webhook(monkeypatch):
        settings = AlertsConfig(webhook_env="HOOK", command=(sys.executable, "-c", program))
        async with sender(tmp_path, settings, unheard) as alerts:
            alerts.put(3, ALARM)

    assert got.read_text() == "run run, step 3: no_signal: nothing can be learned\nFalse"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("/nothing/there",), "cannot be started: No such file or directory"),
        ((sys.executable, "-c", "raise SystemExit(3)"), "ended with exit code 3"),
    ],
)
async def test_a_command_that_fails_is_told_once(tmp_path: Path, command: tuple[str, ...], why: str) -> None:
    told: list[str] = []
    async with sender(tmp_path, AlertsConfig(command=command), told.append) as alerts:
        alerts.put(3, ALARM)
        alerts.put(4, ALARM)

    assert told == [f"alerts: the command {why}; every alarm is in {FILE}"]


async def test_a_folder_that_cannot_be_written_costs_the_run_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    async with sender(tmp_path / "gone", AlertsConfig(), told.append) as alerts:
        alerts.put(3, ALARM)

    assert told == [f"alerts: {FILE} cannot be written: No such file or directory"]


def test_a_variable_without_a_url_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    with pytest.raises(ConfigError, match="expected the variable HOOK to hold an http"):
        sender(tmp_path, AlertsConfig(webhook_env="HOOK"), unheard)


@pytest.mark.parametrize("url", ["http://localhost:70000/hook", "http://localhost:x/hook", "http://[::1/hook"])
def test_a_url_that_no_host_can_have_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("HOOK", url)
    with pytest.raises(ConfigError, match=r"expected the variable HOOK to hold an http\(s\) URL$"):
        sender(tmp_path, AlertsConfig(webhook_env="HOOK"), unheard)


def test_the_page_of_alerts_has_every_check_of_the_load() -> None:
    page = (Path(__file__).parents[3] / "docs" / "alerts.md").read_text()

    assert [name for name in LOAD_CHECKS if f"| `{name}` |" not in page] == []
