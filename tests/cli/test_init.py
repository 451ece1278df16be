"""``agl init``: the files that it writes, and that they are checked and trained as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from agentlightning.config.file import load_config
from agentlightning.errors import ConfigError
from agentlightning.testing.contract_model import write_contract_model
from build import agl

KINDS = ("openai", "langgraph", "openai-agents", "program")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_folder_has_an_agent_tasks_and_settings_that_load(kind: str) -> None:
    made = agl("init", "mine", "--agent", kind, "--model", "a/model")

    assert made.exit_code == 0, made.output
    assert made.stdout.splitlines()[-3:] == ["  cd mine", "  agl check train.toml", "  agl train train.toml"]
    config = load_config(Path("mine/train.toml"), [], {})
    assert config.model.path == "a/model"
    assert compile(Path("mine/agent.py").read_text(), "agent.py", "exec")
    rows = {name: Path(f"mine/{name}.jsonl").read_bytes().splitlines() for name in ("train", "heldout")}
    assert [len(each) for each in rows.values()] == [20, 20]
    assert not {*rows["train"]} & {*rows["heldout"]}
    assert "$" not in Path("mine/train.toml").read_text() + Path("mine/README.md").read_text()


def test_an_environment_needs_neither_agent_nor_tasks() -> None:
    made = agl("init", "--env", "gymnasium:FrozenLake-v1?is_slippery=false", "--model", "a/model")

    assert made.stdout.splitlines()[-2:] == ["  agl check train.toml", "  agl train train.toml"]
    assert sorted(path.name for path in Path().iterdir()) == ["README.md", "train.toml"]
    assert load_config(Path("train.toml"), [], {}).env.name == "gymnasium:FrozenLake-v1?is_slippery=false"


def test_files_that_are_there_stay(folder: Path) -> None:
    (folder / "agent.py").write_text("mine")

    refused = agl("init", "--model", "a/model").exception

    assert isinstance(refused, ConfigError)
    assert "has agent.py already; name a new folder" in str(refused)
    assert [path.name for path in folder.iterdir()] == ["agent.py"]
    assert "--agent: conflicts with --env" in str(agl("init", "x", "--env", "a:b", "--agent", "program").exception)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_agent_of_each_kind_answers_a_model_that_is_there(kind: str, folder: Path) -> None:
    model = write_contract_model(folder / "model", context=512)
    assert agl("init", "mine", "--agent", kind, "--model", str(model)).exit_code == 0
    words = ["check", "train.toml", "--limit", "2", "--chat-template", "chatml", "--store", "memory://"]

    done = subprocess.run(
        [sys.executable, "-m", "agentlightning", *words],
        cwd=folder / "mine",
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    last = orjson.loads(done.stdout.splitlines()[-1])
    assert (last["calls"], last["forked_calls"], last["tasks"]) == (1, 0, 2)
    assert 0 < last["sampled_tokens"] <= 24
