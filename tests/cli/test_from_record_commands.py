"""`agl record` and `agl train --from-run`, up to where processes would start."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentlightning.config.run import parse_config, run_record
from agentlightning.errors import ConfigError, ModelError, NotFoundError
from agentlightning.store.open import open_store
from build import agl

SAMPLING_SETTINGS: dict[str, Any] = {
    "model": {"path": "./nowhere", "temperature": 0.7},
    "agent": {"run": "agent.py:solve"},
    "data": {"train": "tasks.jsonl", "val": "tasks.jsonl"},
    "trainer": {"max_staleness": 1},
}
TOML = """
[model]
path = "./nowhere"
[agent]
run = "agent.py:solve"
[data]
train = "tasks.jsonl"
val = "tasks.jsonl"
[algorithm]
group_size = 4
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AGL_STORE", "sqlite:///agl.db")
    (tmp_path / "train.toml").write_text(TOML)
    (tmp_path / "tasks.jsonl").write_text('{"question": "1+1"}\n')
    return tmp_path


def stored(config: dict[str, Any]) -> None:
    async def fill() -> None:
        async with open_store("sqlite:///agl.db") as store:
            await store.create_run("a run", config, "RUN")

    asyncio.run(fill())


def test_the_configuration_of_the_source_run_is_taken_over() -> None:
    stored(run_record(parse_config(SAMPLING_SETTINGS)))
    done = agl("train", "--algorithm", "dpo", "--from-run", "RUN")
    assert isinstance(done.exception, ModelError)  # every setting was right, and its model is looked for
    assert "nowhere" in str(done.exception)


def test_settings_beside_it_count() -> None:
    stored(run_record(parse_config(SAMPLING_SETTINGS)))
    done = agl("train", "--algorithm", "dpo", "--from-run", "RUN", "--set", "algorithm.beta=-1")
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith("algorithm.beta: ")
    other = agl("train", "--algorithm", "dpo", "--from-run", "RUN", "--model", "./elsewhere")
    assert "elsewhere" in str(other.exception)


def test_the_algorithm_of_a_file_named_again_keeps_its_settings() -> None:
    stored({})
    Path("train.toml").write_text(TOML.replace("group_size = 4", "group_size = 0"))
    again = agl("train", "train.toml", "--algorithm", "lightning_rl")
    assert isinstance(again.exception, ConfigError)
    assert str(again.exception).startswith("algorithm.group_size: ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("train --algorithm sft --from-run RUN", "model: is required"),
        ("train --from-run RUN", "expected one of sft, rft, distill, dpo, kto"),
        ("train --algorithm dpo --from-run RAN", "RAN: no such run"),
        ("record offline.toml", "data.train: is required"),
        ("check offline.toml", "data.train: is required"),
    ],
)
def test_what_is_missing_is_named(words: str, sentence: str) -> None:
    stored({} if "model" in sentence else run_record(parse_config(SAMPLING_SETTINGS)))
    Path("offline.toml").write_text('[model]\npath = "m"\n[data]\nfrom_run = "RUN"\n[algorithm]\ntype = "sft"\n')
    error = agl(*words.split()).exception
    assert isinstance(error, ConfigError | NotFoundError)
    assert sentence in str(error)
