"""Power cuts: after what was not synced is gone, a store has all that it acknowledged, or is at least whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from invariants import violations
from power_loss import PowerCut, missing

from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStore
from agentlightning.store.open import open_store
from agentlightning.store.sql.store import database_at

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

WRITER = """
import asyncio, sys
from agentlightning.store.open import open_store
from agentlightning.records import Checkpoint, Metric

async def work():
    async with open_store(sys.argv[1]) as store:
        run = await store.create_run("r", {}, "run")
        for number in range(10**9):
            await store.log_metrics([Metric(run_id=run.id, step=number, name="n", value=float(number))])
            if sys.argv[2] == "checkpoints" and number % 10 == 9:
                await store.put_checkpoint(Checkpoint(run_id=run.id, step=number, path="/x", version=number))
            if sys.argv[2] == "tokens":
                await store.revoke_token((await store.create_token("t", "reader")).token.id)
            print(number, flush=True)

asyncio.run(work())
"""


def written_until_cut(tmp_path: Path, options: str, what: str, count: int) -> tuple[str, int]:
    """A process writes until the power is cut; the store's URL, and the number of the last write that was acknowledged."""
    root = tmp_path / "machine"
    root.mkdir()
    power = PowerCut(root, tmp_path / "disk")
    url = f"sqlite:///{root}/agl.db{options}"
    command = [sys.executable, "-c", WRITER, url, what]
    with subprocess.Popen(
        command, env={**os.environ, **power.environment}, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) == count:
                break
        writer.kill()
        last = max([count, *map(int, writer.stdout.read().split("\n")[:-1])])
    power.cut()
    return url, last


async def numbers(store: LightningStore) -> list[int]:
    return [metric.step for metric in await store.metrics("run")]


async def test_with_synchronous_full_a_power_cut_loses_nothing_acknowledged(tmp_path: Path) -> None:
    url, last = written_until_cut(tmp_path, "?synchronous=full", "metrics", 60)
    async with open_store(url) as store:
        found = await numbers(store)
        assert found[: last + 1] == list(range(last + 1))
        assert await violations(store) == []


async def test_by_default_a_power_cut_takes_last_commits_only_and_none_before_a_checkpoint(tmp_path: Path) -> None:
    url, last = written_until_cut(tmp_path, "", "checkpoints", 65)
    async with open_store(url) as store:
        found = await numbers(store)
        assert found == list(range(len(found)))  # the first ones, without a gap
        checkpoints = await store.checkpoints("run")
        assert checkpoints[-1].step >= last - last % 10 - 1
        assert len(found) >= checkpoints[-1].step + 1


async def test_a_token_that_was_revoked_stays_revoked_after_a_power_cut(tmp_path: Path) -> None:
    url, last = written_until_cut(tmp_path, "", "tokens", 20)
    async with open_store(url) as store:
        tokens = await store.tokens()
        assert len(tokens) > last
        assert all(token.revoked_ns is not None for token in tokens[: last + 1])


async def test_a_cut_takes_what_was_not_synced(tmp_path: Path) -> None:
    """The cut itself: without it, the tests above would say nothing."""
    written_until_cut(tmp_path, "", "metrics", 60)
    assert (tmp_path / "machine" / "agl.db-wal").stat().st_size < 1000  # the head of the log, and no page


def test_another_word_for_synchronous_is_refused() -> None:
    with pytest.raises(ConfigError, match="synchronous: expected normal or full"):
        database_at("sqlite:////x/agl.db?synchronous=off")
