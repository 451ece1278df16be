"""A step that is executed again learns what it learned the first time: weights, bit for bit, whatever is recorded meanwhile.

Real processes, a real kill, a real model, as in test_kill_and_resume.py.
"""

from __future__ import annotations

import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uuid_utils
from command_line import Folder
from training import CHECKPOINT_EVERY, LEARNER, Training

from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

LAST = CHECKPOINT_EVERY + 2
"""Two steps are executed again: one that was closed, and one that was open."""


@pytest.fixture
def training(folder: Folder, model: Path) -> Training:
    return Training(folder, model)


async def killed_in_the_last_step(training: Training) -> None:
    """A run of which all is sampled, killed when its last step is open: its learner is stopped, so that it stays open."""
    run = await training.start_and_hold(LAST - 1, "--set", f"trainer.steps={LAST}")
    (learner,) = training.processes(LEARNER)
    learner.send_signal(signal.SIGSTOP)
    training.hold.unlink()
    await training.learning(run)
    run.kill()
    run.wait()
    learner.kill()
    await training.check_processes()


async def record_late(training: Training) -> int:
    """A call like each that the repeated steps learned from, and a reward that turns its rollout's around."""
    async with open_store(training.store) as store:
        steps = await store.steps(training.run_id, after=CHECKPOINT_EVERY)
        assert [(step.step, step.state) for step in steps] == [(LAST - 1, "closed"), (LAST, "open")]
        consumed = [one.rollout_id for step in steps for one in step.consumed]
        calls = [replace(call, id=str(uuid_utils.uuid7())) for call in await store.calls(consumed)]
        await store.append_calls(calls)
        now = time.time_ns()
        rewards = [
            replace(reward, id=str(uuid_utils.uuid7()), value=1.0 - reward.value, source=source, created_ns=now)
            for reward in await store.rewards(consumed)
            for source in ("emitted", "posted", "function")
        ]
        await store.record_rewards(rewards)
        found = await store.rollouts(RolloutQuery(ids=consumed))
        assert {rollout.state for rollout in found} == {"succeeded"}
        return len(calls) + len(rewards)


def weights(training: Training) -> dict[str, Any]:
    """Of the last checkpoint."""
    from agentlightning.engines.local.learner import Learner

    folder = training.folder.path / "runs" / training.run_id / "checkpoints" / f"step-{LAST:06d}"
    return dict(Learner(folder).model.state_dict())


async def test_a_step_executed_again_learns_nothing_of_what_came_after_it_was_opened(
    training: Training, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import torch

    await killed_in_the_last_step(training)
    before = tmp_path_factory.mktemp("before") / "copy"
    shutil.copytree(training.folder.path, before)
    undisturbed = training.resume()
    assert await training.ended(undisturbed) == 0, training.output
    expected = weights(training)
    shutil.rmtree(training.folder.path)
    shutil.copytree(before, training.folder.path)
    assert await record_late(training) > 0
    disturbed = training.resume()
    assert await training.ended(disturbed) == 0, training.output
    assert f"executing step {LAST} again" in training.output
    found = weights(training)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
