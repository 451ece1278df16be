"""Plug-ins and schedules in runs as processes: a loss of one's own in the learner, imitation before sampling."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import orjson
import pytest
from command_line import Folder
from training import CONFIG, GROUP, TASKS, Training

from agentlightning.store.open import open_store

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_algorithm" / "own_algorithm.py"
OWN = (
    "algorithm.loss=own_algorithm.py:sapo",
    "algorithm.loss.negative=1.1",
    "algorithm.advantage=own_algorithm.py:median",
    "algorithm.aggregation=own_algorithm.py:root_length",
    'algorithm.schedule=[{from_step=4, advantage="reinforce_pp", kl=0.01, loss="ppo_clip", learning_rate=5e-4}]',
)


async def test_a_run_with_plug_ins_and_a_schedule_survives_its_death_and_its_rollouts_start_another(
    folder: Folder, model: Path
) -> None:
    shutil.copy(EXAMPLE, folder.path)
    training = Training(folder, model)
    process = training.start(*(word for setting in OWN for word in ("--set", setting)))
    await training.after_step(process, 4)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with (folder.path / EXAMPLE.name).open("a") as file:
        file.write("# an edit between kill and resume\n")
    assert await training.ended(training.resume()) == 0, training.output
    assert (
        f"note: algorithm.loss.type: {folder.path / EXAMPLE.name} was changed after this run had started"
        in training.output
    )
    await training.check()
    entries = training.metric("train/schedule_entry")
    assert entries[:4] == [0.0, 0.0, 0.0, 1.0]
    assert entries[-2:] == [1.0, 1.0]
    assert len(training.metric("policy/ref_kl")) == entries.count(1.0)

    config = CONFIG.format(model=model).partition("[algorithm]")
    rest = "[trainer]\n" + config[2].partition("[trainer]\n")[2].replace("steps = 6", "steps = 4").replace(
        "[eval]", "[eval]\nevery = 1"
    )
    folder.write(
        "both.toml",
        config[0]
        + f'from_run = "{training.run_id}"\n[algorithm]\ntype = "rft"\nheld_out = 0.2\n[[algorithm.schedule]]\n'
        f'from_step = 3\ntype = "lightning_rl"\ngroup_size = {GROUP}\nminibatches = 2\n' + rest,
    )
    again = folder.start("train", "both.toml", "--store", training.store, "--runs", str(folder.path / "both"))
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0, out + err
    [run] = (folder.path / "both").iterdir()
    async with open_store(training.store) as store:
        steps = await store.steps(run.name)
    assert [(step.state, len(step.consumed)) for step in steps] == [("closed", 0)] * 2 + [("closed", TASKS * GROUP)] * 2
    rows = [orjson.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    losses = [row["eval/loss"] for row in rows if row["kind"] == "eval/loss"]
    assert losses, "of held-out rollouts, before the first step"
