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


def test_the_options_replace_the_tasks_and_the_algorithm_of_a_file() -> None:
    stored({})
    done = agl("train", "train.toml", "--algorithm", "kto", "--from-run", "RUN")
    assert isinstance(done.exception, ModelError)


def test_the_algorithm_of_a_file_named_again_keeps_its_settings() -> None:
    stored({})
    Path("train.toml").write_text(TOML.replace("group_size = 4", "group_size = 0"))
    again = agl("train", "train.toml", "--algorithm", "lightning_rl")
    assert isinstance(again.exception, ConfigError)
    assert str(again.exception).startswith("algorithm.group_size: ")


def test_a_source_run_that_does_not_exist_is_named() -> None:
    stored({})
    done = agl("train", "--algorithm", "dpo", "--from-run", "RAN")
    assert isinstance(done.exception, NotFoundError)
    assert str(done.exception).startswith("RAN: no such run")


def test_a_source_run_without_a_configuration_needs_a_model() -> None:
    stored({})
    done = agl("train", "--algorithm", "sft", "--from-run", "RUN")
    assert isinstance(done.exception, ConfigError)
    assert "model: is required" in str(done.exception)


def test_without_an_algorithm_the_ones_that_learn_from_the_record_are_listed() -> None:
    stored(run_record(parse_config(SAMPLING_SETTINGS)))
    done = agl("train", "--from-run", "RUN")
    assert isinstance(done.exception, ConfigError)
    assert "expected one of sft, rft, distill, dpo, kto" in str(done.exception)


def test_record_and_check_need_tasks() -> None:
    (Path("offline.toml")).write_text('[model]\npath = "m"\n[data]\nfrom_run = "RUN"\n[algorithm]\ntype = "sft"\n')
    for command in ("record", "check"):
        done = agl(command, "offline.toml")
        assert isinstance(done.exception, ConfigError), command
        assert str(done.exception).startswith("data.train: is required"), command
