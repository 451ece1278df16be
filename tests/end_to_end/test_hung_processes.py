"""SIGSTOP for every process of a training run: each is killed and replaced, and nothing is lost."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest
from command_line import Folder
from training import LEARNER, SAMPLER, SERVER, WORKER, Training

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

HANG_S = 15.0
SETTINGS = ("--set", f"trainer.hang_timeout_s={HANG_S}")


@pytest.fixture
def training(folder: Folder, model: Path) -> Training:
    return Training(folder, model)


async def stop_and_wait_for_successor(training: Training, run: subprocess.Popen[str], module: str) -> None:
    """SIGSTOP for one process of this kind, until it is gone and another runs in its place."""
    before = training.processes(module)
    before[0].send_signal(signal.SIGSTOP)

    async def replaced() -> bool:
        running = training.processes(module)
        return before[0] not in running and len(running) == len(before)

    await training.until(run, replaced, f"{module} was replaced")


async def test_every_process_that_hangs_is_killed_and_replaced_and_nothing_is_lost(training: Training) -> None:
    run = await training.start_and_hold(1, *SETTINGS)
    for module in (WORKER, SAMPLER, SERVER):
        await stop_and_wait_for_successor(training, run, module)
    training.hold.unlink()
    await training.after_step(run, 3)
    await training.learning(run)
    await stop_and_wait_for_successor(training, run, LEARNER)
    assert await training.ended(run) == 0, training.output
    for name in ("worker-", "sampler", "server", "learner"):
        assert f"{name}" in training.output
    assert training.output.count("gave no sign of life") == 4
    assert training.metric("processes/hung")[-1] == 4.0
    await training.check()


async def test_a_machine_that_slept_for_longer_than_a_hang_kills_nobody(training: Training) -> None:
    run = await training.start_and_hold(1, *SETTINGS)
    tree = [process for process, _ in training.folder.commands()]
    for process in tree:
        process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(1.5 * HANG_S)  # how long it sleeps is what is tested
    for process in tree:
        process.send_signal(signal.SIGCONT)
    training.hold.unlink()
    assert await training.ended(run) == 0, training.output
    assert "gave no sign of life" not in training.output
    assert training.metric("processes/hung") == []
    await training.check()
