"""A run is backed up while it trains, its machine is lost, and it is resumed from the backup."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import Folder
from invariants import violations
from training import STEPS, Training

from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


async def test_a_run_that_was_backed_up_while_it_trained_is_resumed_from_the_backup(
    folder: Folder, model: Path
) -> None:
    training = Training(folder, model)
    process = training.start()
    await training.after_step(process, 2)
    runs, backup = folder.path / "runs", folder.path / "backup"
    backup.mkdir()
    await asyncio.to_thread(
        subprocess.run, ["cp", "-a", runs, backup], check=False
    )  # files may vanish: the run goes on
    done = folder.run("store", "backup", str(backup / "store"), "--store", training.store)
    assert done.returncode == 0, done.stderr + done.stdout
    process.kill()
    process.wait()
    await training.check_processes()
    for lost in (*folder.path.glob("agl.db*"), runs):
        shutil.rmtree(lost) if lost.is_dir() else lost.unlink()

    shutil.copytree(backup / "runs", runs)
    shutil.copy(backup / "store", folder.path / "agl.db")
    assert await training.ended(training.resume()) == 0, training.output
    async with open_store(training.store) as store:
        steps = await store.steps(training.run_id)
        assert [(step.step, step.state) for step in steps] == [(step, "closed") for step in range(1, STEPS + 1)]
        rollouts = await store.rollouts(RolloutQuery(run_id=training.run_id, mode="train"))
        assert {(rollout.state, rollout.outcome is not None) for rollout in rollouts} == {("succeeded", True)}
        assert await violations(store) == []
    await training.check_machine()
