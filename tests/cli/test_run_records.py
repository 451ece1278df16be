"""``agl runs delete|export`` and ``agl runs list --queue``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentlightning.cli.app import app
from agentlightning.errors import ConfigError, ConflictError, NotFoundError
from agentlightning.records import Finish, NewRollout, Run, WorkerStatus
from agentlightning.store.open import open_store

STORE = ("--store", "sqlite:///agl.db")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with the runs `old`, finished, and `now`, running; each has a rollout that succeeded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)

    async def fill() -> None:
        async with open_store("sqlite:///agl.db") as store:
            for run_id in ("old", "now"):
                await store.create_run(run_id, {}, run_id)
                await store.enqueue([NewRollout(run_id=run_id, task={"q": 1}, group_id="g")])
                worker = WorkerStatus(id="w", run_id=run_id, host="h", pid=1, running=0, seen_ns=0)
                [claim] = await store.claim(worker)
                await store.finish([Finish(lease=claim.lease, state="succeeded")])
            await store.enqueue([NewRollout(run_id="now", task={"q": 1}, group_id="h")])
            await store.update_run("old", "finished")

    asyncio.run(fill())
    return tmp_path


def agl(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, *STORE])


def runs() -> list[str]:
    async def read() -> list[Run]:
        async with open_store("sqlite:///agl.db") as store:
            return await store.runs()

    return sorted(run.id for run in asyncio.run(read()))


def test_a_run_is_deleted_unless_it_is_running() -> None:
    assert isinstance(agl("runs", "delete", "old", "now").exception, ConflictError)
    assert isinstance(agl("runs", "delete", "nowhere").exception, NotFoundError)
    assert runs() == ["now", "old"]
    assert agl("runs", "delete", "old").output == "1 deleted\n"
    assert agl("runs", "delete", "now", "--force", "--yes").output == "1 deleted\n"
    assert runs() == []


def test_with_a_search_goes_what_its_optimizer_model_was_asked() -> None:
    async def add() -> None:
        async with open_store("sqlite:///agl.db") as store:
            await store.create_run("optimizer old", {}, "old-optimizer")
            await store.create_run("somebody else's", {}, "now-optimizer")

    asyncio.run(add())
    assert agl("runs", "delete", "old", "now", "--force").output == "3 deleted\n"
    assert runs() == ["now-optimizer"]


def test_a_run_is_exported_to_a_new_folder(folder: Path) -> None:
    result = agl("runs", "export", "old", "--to", "out")
    assert result.output == "1 rollouts, 1 attempts: out\n"
    assert json.loads((folder / "out" / "rollouts.jsonl").read_text())["state"] == "succeeded"
    assert isinstance(agl("runs", "export", "old", "--to", "out").exception, ConfigError)


def test_old_runs_are_deleted_but_running_ones_after_a_list_of_them() -> None:
    assert isinstance(agl("runs", "delete").exception, ConfigError)
    assert isinstance(agl("runs", "delete", "old", "--dry-run").exception, ConfigError)
    said = agl("runs", "delete", "--older-than", "0h", "--dry-run").output
    assert said.startswith("old  old  finished: unchanged since ")
    assert said.endswith("1 runs would be deleted\n")
    assert agl("runs", "delete", "--older-than", "30d").output == "0 runs deleted\n"
    assert agl("runs", "delete", "--older-than", "0h", "--yes").output.endswith("1 runs deleted\n")
    assert runs() == ["now"]


def test_the_queues_of_running_runs_are_listed_on_request() -> None:
    said = agl("runs", "list", "--queue").output
    assert "oldest queued" in said
    assert [line.split()[:2] for line in said.splitlines()[1:]] == [["now", "1"]]
    agl("runs", "delete", "now", "--force")
    assert agl("runs", "list", "--queue").output == "no run is running\n"
