"""A run on an engine of somebody else, as processes: the example of docs/extend.md."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from command_line import Folder
from training import CONFIG, STEPS, Training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_engine" / "plain_torch.py"
SETTINGS = ("--set", "engine.name=plain_torch.py:PlainTorch")


async def test_a_run_on_a_file_s_engine_refuses_what_it_does_not_read_and_survives_its_death(
    folder: Folder, model: Path
) -> None:
    shutil.copy(EXAMPLE, folder.path)
    training = Training(folder, model)
    folder.write("run.toml", CONFIG.partition("[engine]")[0].format(model=model))
    assert await training.ended(training.start(*SETTINGS, "--set", "engine.packing=prefix_tree")) == 2
    assert "engine.packing has no effect with the engine" in training.output
    process = training.start(*SETTINGS)
    await training.after_step(process, 3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert await training.ended(training.resume()) == 0, training.output
    assert training.step == STEPS
    await training.check()
