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
from training import LEARNER, SAMPLER, SERVER, STEPS, WORKER, Training

from agentlightning.store.open import open_store

pytestmark = pytest.mark.slow

TRACKER = "agentlightning.trainer.monitor.trackers"
EXIT_STOPPED, EXIT_UNFINISHED, EXIT_INTERRUPTED = 0, 75, 130


@pytest.fixture
def training(folder: Folder, model: Path) -> Training:
    return Training(folder, model)


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)


def words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


AHEAD = "trainer.max_staleness=2"
"""With a checkpoint every two steps nothing becomes stale: every rollout is learned from, once."""


@pytest.mark.parametrize(
    "settings", [pytest.param((), id="in step"), pytest.param((AHEAD,), id="ahead", marks=pytest.mark.long)]
)
async def test_a_killed_trainer_goes_on_by_resume_twice_and_its_tracker_has_each_step_once(
    training: Training, settings: tuple[str, ...]
) -> None:
    first = await training.start_and_hold(3, *words('trainer.trackers=["tensorboard"]', *settings))
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
    assert training.processes(TRACKER) == []
    async with open_store(training.store) as store:
        metrics = await store.metrics(training.run_id, "train/reward_mean")
    kept = [(one.step, pytest.approx(one.value)) for one in metrics if not one.abandoned]
    assert tracked(training, "train/reward_mean") == kept


def tracked(training: Training, name: str) -> list[tuple[int, float]]:
    """The points of a curve in TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(training.folder.path / "runs" / training.run_id / "tensorboard"))
    events.Reload()
    return [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors(name)]


async def test_rollouts_run_ahead_of_the_trainer_and_every_one_is_learned_from(training: Training) -> None:
    process = training.start(*words(AHEAD))
    assert await training.ended(process) == 0, training.output
    await training.check()
    assert len(training.metric("rollout/staleness_max")) >= STEPS
    assert 0 < max(training.metric("rollout/staleness_max")) <= 2
    assert set(training.metric("rollout/stale")) == {0.0}


@pytest.mark.long
@pytest.mark.parametrize("settings", [(), (AHEAD,)], ids=["in step", "ahead"])
async def test_every_process_but_the_trainer_may_be_killed(training: Training, settings: tuple[str, ...]) -> None:
    process = training.start(*words(*settings))
    await training.after_step(process, 1)
    training.hold.touch()
    await training.claimed(process)
    kill(training.processes(WORKER)[0])
    training.hold.unlink()
    for step, module in ((2, SAMPLER), (3, SERVER)):
        await training.after_step(process, step)
        await training.calling(process)
        kill(training.processes(module)[-1])
    await training.after_step(process, 3)
    await training.learning(process)
    kill(training.processes(LEARNER)[-1])
    assert await training.ended(process) == 0, training.output
    assert "executing step" in training.output
    attempts = Counter(attempt.state for attempt in await training.check())
    assert attempts["lost"] >= 1
    assert set(attempts) == {"lost", "succeeded"}, "it was ours to answer for"


ADAPTER = (
    "engine.lora_rank=4",
    "engine.packing=prefix_tree",
    "engine.gradient_checkpointing=true",
    "algorithm.kl=0.01",
)


@pytest.mark.long
async def test_a_killed_learner_of_an_adapter_goes_back_to_its_checkpoint(training: Training) -> None:
    process = await training.start_and_hold(3, *words(*ADAPTER))
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
    divergences = training.metric("policy/ref_kl")
    assert divergences[0] == pytest.approx(0.0, abs=1e-4)
    assert divergences[-1] > 1e-4
    assert list(training.folder.path.glob("**/checkpoints/*/adapter/adapter_model.safetensors"))


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


@pytest.mark.long
async def test_a_named_run_that_is_told_to_end_exits_with_75_and_the_same_words_go_on_with_it(
    training: Training,
) -> None:
    named = ("--run", "bot", "--set", "trainer.steps=3")
    first = await training.start_and_hold(1, *named)
    first.send_signal(signal.SIGTERM)
    await said(training, first, "ending after this step")
    training.hold.unlink()
    assert await training.ended(first) == EXIT_UNFINISHED, training.output
    assert training.step == 2
    second = training.start(*named)
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


async def said(training: Training, process: subprocess.Popen[str], sentence: str) -> None:
    async def there() -> bool:
        return sentence in training.output

    await training.until(process, there, f"it said {sentence!r}")
