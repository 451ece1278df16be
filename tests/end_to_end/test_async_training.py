"""Rollouts ahead of the trainer as processes: they overlap with learning, and kill -9 loses and repeats nothing.

Real processes, real signals, a real model. With a bound of 2 and a checkpoint every two steps nothing can become stale, so
every rollout of the run is learned from, once, whatever is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from command_line import Folder
from training import LEARNER, SAMPLER, SERVER, STEPS, WORKER, Training

pytestmark = pytest.mark.slow

AHEAD = ("--set", "trainer.max_staleness=2")


@pytest.fixture
def training(folder: Folder, model: Path) -> Training:
    return Training(folder, model)


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


async def hold_rollouts(training: Training, process: subprocess.Popen[str], after_step: int) -> None:
    """Rollouts ahead of the step after this one are claimed, and wait in their agents."""
    await training.after_step(process, after_step)
    training.hold.touch()
    await training.claimed(process)


def check_overlap(training: Training) -> None:
    """Some rollouts were sampled by earlier weights than those they updated, none by weights past the bound."""
    assert len(training.metric("rollout/staleness_max")) >= STEPS
    assert 0 < max(training.metric("rollout/staleness_max")) <= 2
    assert set(training.metric("rollout/stale")) == {0.0}


async def test_rollouts_run_ahead_of_the_trainer_and_every_one_is_learned_from(training: Training) -> None:
    process = training.start(*AHEAD)
    assert await training.ended(process) == 0, training.output
    await training.check()
    check_overlap(training)


@pytest.mark.long
async def test_a_killed_trainer_with_rollouts_ahead_goes_on_by_resume_twice(training: Training) -> None:
    first = training.start(*AHEAD)
    await hold_rollouts(training, first, after_step=1)
    first.kill()
    training.hold.unlink()
    second = training.resume()  # at once: what the first one left behind is still ending
    await training.after_step(second, 3)
    await training.learning(second)
    second.kill()
    third = training.resume()
    assert await training.ended(third) == 0, training.output
    assert "executing step" in training.output
    await training.check()
    check_overlap(training)


@pytest.mark.long
async def test_every_other_process_may_be_killed_while_rollouts_run_ahead(training: Training) -> None:
    process = training.start(*AHEAD)
    await hold_rollouts(training, process, after_step=1)
    kill(training.processes(WORKER)[0])
    training.hold.unlink()
    for step, module in ((2, SAMPLER), (3, SERVER)):
        await training.after_step(process, step)
        kill(training.processes(module)[-1])
    await training.after_step(process, 3)
    await training.learning(process)
    kill(training.processes(LEARNER)[-1])
    assert await training.ended(process) == 0, training.output
    assert "executing step" in training.output
    attempts = await training.check()
    assert {attempt.state for attempt in attempts} == {"lost", "succeeded"}
