"""A run with a tracker, killed and resumed: the tracker has each step once, as the surviving history has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Folder
from training import STEPS, Training

from agentlightning.store.open import open_store

pytestmark = pytest.mark.slow
TRACKER = "agentlightning.trainer.monitor.trackers"


async def test_a_tracked_run_that_is_killed_goes_on_in_the_same_tracker_run(folder: Folder, model: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    training = Training(folder, model)
    training.hold.write_text("3")
    first = training.start("--set", 'trainer.trackers=["tensorboard"]')
    await training.after_step(first, 3)  # the checkpoint is that of step 2: step 3 is executed again
    first.kill()
    training.hold.unlink()
    second = training.resume()
    assert await training.ended(second) == 0, training.output
    assert "executing step 3 again" in training.output
    assert training.processes(TRACKER) == []

    events = EventAccumulator(str(folder.path / "runs" / training.run_id / "tensorboard"))
    events.Reload()
    shown = [(event.step, float(make_ndarray(event.tensor_proto))) for event in events.Tensors("train/reward_mean")]
    assert [step for step, _ in shown] == list(range(1, STEPS + 1))
    async with open_store(training.store) as store:
        kept = {
            one.step: one.value
            for one in await store.metrics(training.run_id, "train/reward_mean")
            if not one.abandoned
        }
    assert [value for _, value in shown] == pytest.approx([kept[step] for step, _ in shown])
