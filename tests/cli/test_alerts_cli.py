"""``agl alerts``: what a run warns of, and what somebody said of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest
import yaml
from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.errors import InputError
from agentlightning.store.open import open_store

TEXT = "nothing can be learned [bold]"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGL_STORE", "sqlite:///agl.db")

    async def fill() -> None:
        async with open_store("sqlite:///agl.db") as opened:
            for run_id in ("one", "two"):
                await opened.create_run("", {}, run_id)
            begun = [{"step": 4, "time": 1.7e9, "name": name, "text": TEXT} for name in ("no_signal", "reward_flat")]
            await opened.update_run("one", summary={"alarms": {"no_signal": TEXT}, "alert_history": begun})

    asyncio.run(fill())


def agl(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["alerts", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def states(run_id: str) -> dict[str, str]:
    return {one["name"]: one["state"] for one in orjson.loads(agl("list", run_id, "--json"))["alerts"]}


def test_all_runs_are_listed_with_what_holds_and_one_with_what_ended_too() -> None:
    assert agl("list").splitlines() == [f"one  no_signal [active since step 4]: {TEXT}"]
    assert states("one") == {"no_signal": "active", "reward_flat": "ended"}
    assert agl("list", "two").splitlines() == ["nothing is warned of"]


def test_an_alarm_is_acknowledged_silenced_and_heard_again() -> None:
    agl("ack", "one", "no_signal")
    assert states("one")["no_signal"] == "acknowledged"
    agl("silence", "one", "no_signal", "--hours", "1")
    assert states("one")["no_signal"] == "silenced"
    assert "[silenced for 1.0 h since step 4]" in agl("list", "one")
    agl("silence", "one", "no_signal", "--hours", "0")
    assert states("one")["no_signal"] == "acknowledged"


def test_an_alarm_that_no_run_has_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="no_signals: no such alarm"):
        agl("silence", "two", "no_signals")


def test_rules_and_dashboard_are_printed() -> None:
    assert yaml.safe_load(agl("prometheus"))["groups"]
    assert orjson.loads(agl("grafana"))["panels"]
