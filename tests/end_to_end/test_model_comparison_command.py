"""``agl models compare`` on the real system: two models are served at once, and differ in nothing but their weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import Folder
from training import AGENT, CONFIG

from agentlightning.demo import lookup
from agentlightning.demo.tasks import rows


@pytest.mark.slow
@pytest.mark.long
def test_a_model_and_its_copy_earn_the_same_on_every_task(folder: Folder, model: Path) -> None:
    shutil.copytree(model, folder.path / "copy")
    folder.write("agent.py", AGENT)
    folder.write("config.toml", CONFIG.replace("{model}", str(model)))
    tasks = "".join(json.dumps(row) + "\n" for row in rows(lookup, "test", 12, 0))  # type: ignore[arg-type]  # a module is a DemoTask
    for name in ("train.jsonl", "val.jsonl", "heldout.jsonl"):
        folder.write(name, tasks)
    given = ("--config", "config.toml", "--tasks", "heldout.jsonl", "--limit", "8", "--stop-early", "--json")
    done = folder.run("models", "compare", str(model), "./copy", *given)
    assert done.returncode == 0, done.stderr
    compared = json.loads(done.stdout.splitlines()[-1])
    one, other = compared["figures"]
    assert {**one, "version": ""} == {**other, "version": ""}
    assert one["calls"] >= 8
    assert (compared["differences"][0]["better"], compared["differences"][0]["worse"]) == (0, 0)
    assert (compared["sequential"]["better"], compared["sequential"]["tasks_left"]) == (None, 0)
    listed = folder.run("rollouts", "list", compared["runs"]["./copy"], "--json")
    assert listed.returncode == 0, listed.stderr
