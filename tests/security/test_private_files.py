"""What a run writes is for its user alone, whatever the umask; what its agents write has the umask that the user has."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_policy import build_policy

from agentlightning.store.sql.store import SqlLightningStore

DEADLINE_S = 300
CONFIG = """
[model]
path = "{model}"
max_tokens = 4
[agent]
{agent}
workers = 1
concurrency = 1
[data]
train = "train.jsonl"
[algorithm]
group_size = 2
[trainer]
steps = 1
tasks_per_step = 1
[engine]
"""
COMMAND = """
import json, os, urllib.request

body = {"model": os.environ["AGL_MODEL"], "messages": [{"role": "user", "content": "hi"}]}
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
open("written.txt", "w").close()
print(0.5)
"""
FUNCTION = """
def solve(task, llm):
    llm.openai().chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "hi"}])
    open("written.txt", "w").close()
    return 0.5
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_to_others(folder: Path) -> list[str]:
    """Files and folders from here on that anybody but their owner may use."""
    return [f"{path} {mode(path):o}" for path in (folder, *folder.rglob("*")) if path.is_file() and mode(path) & 0o077]


def agl(*arguments: str, cwd: Path) -> str:
    """What the command says, run by a user who lets everybody read and write."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AGL_")}
    command = [sys.executable, "-m", "agentlightning", *arguments]
    done = subprocess.run(
        command, cwd=cwd, env=environment, umask=0, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["command", pytest.param("function", marks=pytest.mark.long)])
def test_a_run_is_private_and_its_agents_keep_the_umask(kind: str, tmp_path: Path) -> None:
    policy = build_policy(tmp_path / "policy")
    agent = f"command = '{sys.executable} agent.py'" if kind == "command" else 'run = "agent.py:solve"'
    (tmp_path / "agent.py").write_text(COMMAND if kind == "command" else FUNCTION)
    (tmp_path / "train.jsonl").write_text('{"question": "hi"}\n')
    (tmp_path / "run.toml").write_text(CONFIG.format(model=policy, agent=agent))
    agl("train", "run.toml", cwd=tmp_path)
    runs = tmp_path / "runs"
    [run] = runs.glob("*/config.json")
    assert (mode(runs), mode(run.parent)) == (0o700, 0o700)
    assert {"agl.db", "learner.pt"} <= {path.name for path in runs.rglob("*")}
    assert open_to_others(runs) == []
    assert mode(tmp_path / "written.txt") == 0o666

    agl("models", "export", run.parent.name, "--to", "model", cwd=tmp_path)
    agl("runs", "export", run.parent.name, "--to", "records", cwd=tmp_path)
    agl("rollouts", "export", run.parent.name, "--to", "rows.jsonl", cwd=tmp_path)
    agl("store", "backup", "backup", cwd=tmp_path)
    made = [tmp_path / name for name in ("model", "records", "rows.jsonl", "backup")]
    assert [mode(path) for path in made] == [0o700, 0o700, 0o600, 0o600]
    assert [found for path in made for found in open_to_others(path)] == []


async def test_the_file_of_a_store_is_private_with_its_log(tmp_path: Path) -> None:
    former = os.umask(0)
    try:
        async with SqlLightningStore(f"sqlite:///{tmp_path}/new.db") as store:
            await store.runs()
            assert (tmp_path / "new.db-wal").exists()
            assert open_to_others(tmp_path) == []
    finally:
        os.umask(former)


@pytest.mark.parametrize(("before", "after"), [(0o644, 0o600), (0o640, 0o640)])
async def test_a_store_that_everybody_could_read_is_closed_and_one_that_a_group_may_read_stays(
    tmp_path: Path, before: int, after: int
) -> None:
    file = tmp_path / "store.db"
    async with SqlLightningStore(f"sqlite:///{file}"):
        pass
    file.chmod(before)
    async with SqlLightningStore(f"sqlite:///{file}") as store:
        await store.runs()
        assert [mode(Path(f"{file}{end}")) for end in ("", "-wal", "-shm")] == [after] * 3
