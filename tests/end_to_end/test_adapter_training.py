"""A training run of an adapter, whose learner is killed on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from command_line import Folder
from training import LEARNER, Training

pytestmark = pytest.mark.slow

SETTINGS = (
    "engine.lora_rank=4",
    "engine.packing=prefix_tree",
    "engine.gradient_checkpointing=true",
    "engine.optimizer=adamw_8bit",
    "algorithm.kl=0.01",
)


async def test_an_adapter_is_trained_against_its_own_base_through_the_death_of_its_learner(
    folder: Folder, model: Path
) -> None:
    training = Training(folder, model)
    process = training.start(*(word for setting in SETTINGS for word in ("--set", setting)))
    await training.after_step(process, 3)
    os.kill(training.processes(LEARNER)[-1].pid, signal.SIGKILL)
    assert await training.ended(process) == 0, training.output
    await training.check()
    divergences = training.metric("policy/ref_kl")
    assert divergences[0] == pytest.approx(0.0, abs=1e-4)
    assert divergences[-1] > 1e-4
    assert list(folder.path.glob("**/checkpoints/*/adapter/adapter_model.safetensors"))
