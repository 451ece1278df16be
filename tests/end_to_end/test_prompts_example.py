"""An agent whose code knows nothing of prompts gets another one, which is compared on the real system and promoted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import Folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "prompts"
CAPITAL = "answer in capital letters"


def said(done: subprocess.CompletedProcess[str]) -> Any:
    """The last line that it prints, which is JSON."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.long
def test_the_example_proves_its_better_prompt_and_promotes_it(folder: Folder) -> None:
    for file in EXAMPLE.iterdir():
        if file.is_file():
            shutil.copy(file, folder.path)
    settings = (folder.path / "agent.toml").read_text().replace("python agent.py", f"{sys.executable} agent.py")
    folder.write("agent.toml", settings)
    subprocess.run([sys.executable, "data.py"], cwd=folder.path, check=True)
    said(folder.run("models", "import", "demos.jsonl", "--to", "model"))
    recorded = said(folder.run("record", "agent.toml", "--rollouts", "1", "--tasks", "2"))
    run = recorded["run_id"]
    assert (recorded["succeeded"], recorded["reward"]) == (2, 0.0)
    folder.write("capital.txt", CAPITAL)
    said(folder.run("prompts", "add", run, "system", "capital.txt", "--json"))
    tested = said(folder.run("prompts", "test", run, "system@1", "system@2", "--tasks", "8", "--json"))
    first, second = (one["reward_mean"] for one in tested["figures"])
    assert (first, second > 0.8) == (0.0, True)
    assert tested["differences"][0]["p_value"] < 0.05
    before, after = (one["messages"][0]["content"] for one in tested["tasks"][0]["transcripts"])
    assert (before, after) == ("answer in small letters", CAPITAL)
    promoted = said(folder.run("prompts", "add", run, "system@1", "--json"))
    assert (promoted["version"], promoted["value"]["template"]) == (3, "answer in small letters")
