"""kill -9 of every process of a training run, and Ctrl-C: nothing is lost, nothing is trained twice, nothing is left behind.

Real processes, real signals, a real model; the agents are those of the lookup demo. A kill comes when the run is where the
test wants it (a step complete, rollouts held in flight, a step open), never after a time.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import psutil
import pytest
from command_line import Folder
from training import GROUP, LEARNER, SAMPLER, SERVER, TASKS, WORKER, Training

pytestmark = pytest.mark.slow

EXIT_STOPPED, EXIT_UNFINISHED, EXIT_INTERRUPTED = 0, 75, 130


@pytest.fixture
def training(folder: Folder, model: Path) -> Training:
    return Training(folder, model)


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


async def test_a_killed_trainer_goes_on_by_resume_twice(training: Training) -> None:
    first = await training.start_and_hold(after_step=3)
    first.kill()
    training.hold.unlink()
    second = training.resume()  # at once: what the first one left behind is still ending
    await training.after_step(second, 4)
    await training.learning(second)
    second.kill()
    third = training.resume()
    assert await training.ended(third) == 0, training.output
    assert "executing step" in training.output
    await training.check()


@pytest.mark.long
async def test_a_killed_worker_is_replaced_and_what_it_held_is_run_again(training: Training) -> None:
    process = await training.start_and_hold(after_step=2)
    kill(training.processes(WORKER)[0])
    training.hold.unlink()
    assert await training.ended(process) == 0, training.output
    attempts = Counter(attempt.state for attempt in await training.check())
    assert 1 <= attempts["lost"] <= TASKS * GROUP
    assert set(attempts) == {"lost", "succeeded"}


@pytest.mark.long
async def test_a_killed_server_comes_back_and_the_run_goes_on(training: Training) -> None:
    process = await training.start_and_hold(after_step=1)
    kill(training.processes(SERVER)[-1])
    training.hold.unlink()
    await training.after_step(process, 2)
    await training.calling(process)
    kill(training.processes(SERVER)[-1])
    await training.after_step(process, 3)
    await training.learning(process)
    kill(training.processes(SERVER)[-1])
    assert await training.ended(process) == 0, training.output
    attempts = Counter(attempt.state for attempt in await training.check())
    assert set(attempts) <= {"lost", "succeeded"}, "it was ours to answer for"


@pytest.mark.long
async def test_a_killed_sampler_comes_back_and_the_run_goes_on(training: Training) -> None:
    process = training.start()
    await training.after_step(process, 1)
    await training.calling(process)
    kill(training.processes(SAMPLER)[-1])
    await training.after_step(process, 3)
    await training.learning(process)
    kill(training.processes(SAMPLER)[-1])
    assert await training.ended(process) == 0, training.output
    attempts = Counter(attempt.state for attempt in await training.check())
    assert set(attempts) <= {"lost", "succeeded"}


async def test_a_killed_learner_comes_back_and_the_run_goes_back_to_its_checkpoint(training: Training) -> None:
    process = await training.start_and_hold(after_step=3)
    kill(training.processes(LEARNER)[-1])
    training.hold.unlink()
    await training.after_step(process, 4)
    await training.learning(process)
    kill(training.processes(LEARNER)[-1])
    assert await training.ended(process) == 0, training.output
    assert "executing step 3 again" in training.output
    attempts = await training.check()
    assert {attempt.state for attempt in attempts} == {"succeeded"}
    assert len(attempts) == len({attempt.rollout_id for attempt in attempts}), "nothing was sampled again"


async def test_ctrl_c_ends_after_the_step_with_a_checkpoint_and_the_line_that_resumes_works(training: Training) -> None:
    first = await training.start_and_hold(after_step=2)
    first.send_signal(signal.SIGINT)
    await said(training, first, "ending after this step")
    training.hold.unlink()
    assert await training.ended(first) == EXIT_STOPPED, training.output
    assert "stopped after step 3; go on with: agl train --resume" in training.output
    assert training.step == 3
    assert training.processes(WORKER) == []
    second = training.resume_as_printed()
    assert await training.ended(second) == 0, training.output
    assert "executing step" not in training.output, "the checkpoint is of the step that it stopped after"
    await training.check()


async def test_a_named_run_that_is_told_to_end_exits_with_75_and_the_same_words_go_on_with_it(
    training: Training,
) -> None:
    words = ("--run", "bot", "--set", "trainer.steps=3")
    first = await training.start_and_hold(1, *words)
    first.send_signal(signal.SIGTERM)
    await said(training, first, "ending after this step")
    training.hold.unlink()
    assert await training.ended(first) == EXIT_UNFINISHED, training.output
    assert training.step == 2
    second = training.start(*words)
    assert await training.ended(second) == 0, training.output
    assert training.step == 3
    assert training.run_id == "bot"


@pytest.mark.long
async def test_a_second_ctrl_c_ends_at_once_and_the_run_resumes(training: Training) -> None:
    first = await training.start_and_hold(after_step=2)
    first.send_signal(signal.SIGINT)
    await said(training, first, "ending after this step")
    first.send_signal(signal.SIGINT)
    assert await training.ended(first) == EXIT_INTERRUPTED, training.output
    assert training.step == 2
    training.hold.unlink()
    second = training.resume_as_printed()
    assert await training.ended(second) == 0, training.output
    await training.check()


async def said(training: Training, process: subprocess.Popen[str], words: str) -> None:
    async def there() -> bool:
        return words in training.output

    await training.until(process, there, f"it said {words!r}")
