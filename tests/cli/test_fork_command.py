"""``agl rollouts fork`` enqueues forks, and what is read about rollouts says where a replay ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import build
from agentlightning.cli.app import app
from agentlightning.records import Call, Claim, Finish, NewRollout, Rollout, RunState, WorkerStatus
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store

WORKER = WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'agl.db'}"


def agl(store: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["rollouts", *arguments, "--store", store])


def call(claim: Claim, number: int, replayed_id: str | None = None) -> Call:
    return build.call(claim, f"0-{claim.rollout.id}-{number}", replayed_id=replayed_id)


def finished(store: str, replayed: int | None = None) -> str:
    """Finishes a rollout of three calls, or the next fork, which replays so many and then samples; returns its id."""

    async def work() -> str:
        async with open_store(store) as opened:
            if replayed is None:
                await opened.create_run("name", {}, "run")
                await opened.enqueue([NewRollout(run_id="run", task={"q": "x"}, group_id="g")])
            [claim] = await opened.claim(WORKER)
            calls = [call(claim, number, "a" * (number < (replayed or 0)) or None) for number in range(3)]
            calls = [one if one.replayed_id is None else call(claim, n, f"r-{n}") for n, one in enumerate(calls)]
            await opened.append_calls(calls)
            await opened.finish([Finish(lease=claim.lease, state="succeeded")])
            return claim.rollout.id

    return asyncio.run(work())


def rollouts(store: str, ids: list[str]) -> list[Rollout]:
    async def read() -> list[Rollout]:
        async with open_store(store) as opened:
            return await opened.rollouts(RolloutQuery(ids=ids))

    return asyncio.run(read())


def test_forks_are_enqueued_and_their_ids_printed_with_what_they_wait_for(store: str) -> None:
    origin = finished(store)
    enqueued = agl(store, "fork", origin, "--calls", "2", "--count", "2")
    forks = [one.fork for one in rollouts(store, enqueued.stdout.split())]
    assert [(one.rollout_id, one.calls) for one in forks if one] == [(origin, 2)] * 2
    assert enqueued.stderr == ""
    end_run(store, "interrupted")
    assert "agl train --resume run" in agl(store, "fork", origin, "--calls", "2").stderr
    end_run(store, "finished")
    assert "agl rollouts execute run" in agl(store, "fork", origin, "--calls", "2").stderr


def end_run(store: str, state: RunState) -> None:
    async def work() -> None:
        async with open_store(store) as opened:
            await opened.update_run("run", state=state)

    asyncio.run(work())


def test_what_cannot_be_forked_is_refused_with_a_sentence(store: str, tmp_path: Path) -> None:
    origin = finished(store)
    assert "expected 0 to 2 calls" in str(agl(store, "fork", origin, "--calls", "3").exception)

    async def open_session() -> str:
        async with open_store(store) as opened:
            new = NewRollout(run_id="run", task={}, group_id="someone")
            return (await opened.open_session(new, 60.0)).rollout.id

    session = asyncio.run(open_session())
    assert "no agent can be started" in str(agl(store, "fork", session, "--calls", "0").exception)


def test_lists_and_the_rollout_say_where_a_replay_ended(store: str) -> None:
    origin = finished(store)
    agl(store, "fork", origin, "--calls", "2")
    forked = finished(store, replayed=1)
    for arguments in (("list", "run"), ("list", "run", "--where", "turns > 0"), ("show", forked)):
        assert "the replay ended after 1 of 2 calls" in agl(store, *arguments).stdout
    shown = agl(store, "show", forked).stdout
    assert f"fork of rollout {origin}, attempt 1, after 2 calls" in shown
    assert shown.count("replayed") == 1
