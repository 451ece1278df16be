"""``agl runs show --drift``: the figures come from the record, in pages."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import build
from agentlightning.errors import NotFoundError
from agentlightning.records import Call, NewRollout, Rollout, WorkerStatus
from agentlightning.store.base import LightningStore
from agentlightning.store.open import open_store
from build import agl


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGL_STORE", raising=False)


def call(rollout: Rollout, number: int, parent: int | None, cause: str | None = None, lost: int = 0) -> Call:
    return build.call(
        rollout,
        f"{rollout.id}-{number}",
        parent_id=None if parent is None else f"{rollout.id}-{parent}",
        sampled_ids=[2] * 10,
        policy="" if cause == "outside" else "default",
        fork_cause=None if cause == "outside" else cause,
        untrained_tokens=lost,
    )


async def fill(store: LightningStore, rollouts: int) -> None:
    """Each rollout: a first turn, one that continues it, one that forks, one of an external model."""
    await store.create_run("run", {}, "run")
    await store.create_run("other", {}, "empty")
    await store.enqueue([NewRollout(run_id="run", task={}, group_id=str(number)) for number in range(rollouts)])
    worker = WorkerStatus(id="w", run_id="run", host="h", pid=1, running=0, seen_ns=0)
    for claim in await store.claim(worker, limit=rollouts) if rollouts else []:
        rollout = claim.rollout
        await store.append_calls(
            [
                call(rollout, 0, None),
                call(rollout, 1, 0),
                call(rollout, 2, None, "history_cut", lost=15),
                call(rollout, 3, None, "outside"),
            ]
        )


def filled(rollouts: int) -> str:
    async def work() -> None:
        async with open_store("sqlite:///agl.db") as store:
            await fill(store, rollouts)

    asyncio.run(work())
    return "sqlite:///agl.db"


def test_calls_are_counted_by_how_they_continue_and_shares_are_given() -> None:
    shown = agl("runs", "show", "run", "--drift", "--store", filled(3))
    assert shown.exit_code == 0
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert lines[0] == "9 calls of the policy, in 3 rollouts"
    assert lines[1].startswith("3 first turns")
    assert lines[2].startswith("3 continued")
    assert lines[3].startswith("3 forks")
    assert lines[4] == "3 history_cut: the agent left out a part of the history"
    assert lines[5] == "90 sampled tokens"
    assert lines[6] == "45 sampled tokens that forks repeat as context only (50.00% of all sampled)"
    assert lines[7].startswith("3 calls answered by external models")
    assert lines[8] == "exact share: 50.00% of the 6 calls that have a predecessor"


def test_a_run_without_calls_says_so_and_an_unknown_run_too() -> None:
    store = filled(0)
    assert "no calls of the policy are recorded" in agl("runs", "show", "empty", "--drift", "--store", store).stdout
    assert isinstance(agl("runs", "show", "unknown", "--drift", "--store", store).exception, NotFoundError)


def test_a_fork_is_shown_with_its_rollout_and_what_it_costs() -> None:
    store = filled(1)
    rollout = agl("rollouts", "list", "run", "--store", store).stdout.splitlines()[1].split()[0]
    shown = agl("rollouts", "show", rollout, "--store", store).stdout
    assert "fork: history_cut (15 sampled tokens are context only)" in shown
