import json
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from agentlightning.config.file import load_config, with_overrides
from agentlightning.config.run import (
    AgentConfig,
    EngineConfig,
    TrainerConfig,
    config_text,
    parse_config,
    private_fields,
    run_record,
)
from agentlightning.errors import ConfigError

LEAST = {"model": {"path": "m"}, "agent": {"run": "agent.py:solve"}, "data": {"train": "tasks.jsonl"}}


def test_the_smallest_configuration_is_a_model_an_agent_and_tasks() -> None:
    config = parse_config(LEAST)
    assert (config.trainer.steps, config.engine.name) == (100, "local")


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"trainer": {"step": 3}}, r"trainer\.step: no such setting; did you mean 'steps'\?"),
        ({"gpu": {}}, "gpu: no such setting; known here: model, env, agent, data"),
        ({"trainer": {"steps": "many"}}, r"trainer\.steps: .*integer.*, got 'many'"),
        ({"trainer": {"learning_rate": math.inf}}, r"trainer\.learning_rate: .*finite"),
        ({"trainer": {"steps": 0, "seed": "x"}}, r"trainer\.steps: (.|\n)*trainer\.seed: "),  # every problem at once
        (
            {"trainer": {"batch_order": "first_finished"}},
            "batch_order: has no effect with max_staleness = 0; expected 'fifo'",
        ),
        ({"agent": {"run": "a.py:f", "command": "node agent.js"}}, "agent: give either run"),
        ({"agent": {"command": "a.js", "trace": ["langchain"]}}, "trace: has no effect on a command"),
        ({"agent": {"command": "a.js", "trace": False}}, "trace: has no effect on a command"),
        (
            {"agent": {"run": "a.py:f", "reward": "r.py:f", "posted_rewards": ["style"]}},
            r"agent\.posted_rewards: has no effect with agent\.reward",
        ),
        ({"eval": {"every": 5}}, r"eval: has no effect without data\.val"),
        ({"limits": {"attempt": {"max_calls": 0}}}, r"limits\.attempt\.max_calls: expected a number greater than"),
        ({"limits": {"run": {"tpm": 1}}}, r"limits\.run\.tpm: no such setting"),
        ({"engine": {"optimizer": "muon", "lora_rank": 4}}, "engine: optimizer: muon is for whole matrices"),
        ({"engine": {"packing": "prefix_tree", "dropout": 0.1}}, "engine: dropout: goes neither with packing"),
        ({"engine": {"gradient_checkpointing": True, "dropout": 0.1}}, "engine: dropout: goes neither with packing"),
        (
            {"engine": {"optimizer": {"type": "adamw", "learning_rate": 0.1}}},
            r"engine\.optimizer\.learning_rate: no such setting",
        ),
        (
            {"engine": {"optimizer": "sgd"}},
            "engine.optimizer: expected one of 'adamw', 'muon', got 'sgd'",
        ),
        ({"engine": {"listen": "9000"}}, "engine.listen: expected HOST:PORT, got '9000'"),
        (
            {"engine": {"key_env": "k-secret"}},
            "engine: key_env: expected the name of an environment variable, .* not the key$",
        ),
    ],
)
def test_a_setting_that_is_wrong_or_would_be_ignored_is_an_error_with_its_name(
    tables: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config(LEAST | tables)


def test_a_configuration_that_was_written_down_can_be_read_again() -> None:
    for table in (LEAST, LEAST | {"data": {"train": "t", "val": "v"}, "eval": {"every": 5}}):
        config = parse_config(table | {"store": {"url": "memory://"}})
        assert parse_config(json.loads(config_text(config))) == config


def test_overrides_reach_into_tables_and_read_toml_values(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text('[model]\npath="m"\n[agent]\nrun="a.py:f"\n[data]\ntrain="t.jsonl"\n')
    config = load_config(file, ["trainer.steps=7", "model.path=other/name", "eval.sampled=false", "data.val=v.jsonl"])
    assert (config.trainer.steps, config.model.path, config.eval.sampled) == (7, "other/name", False)


def test_a_run_that_goes_on_elsewhere_has_other_addresses_and_else_its_own_settings() -> None:
    started = parse_config(LEAST | {"engine": {"listen": "10.0.0.4:9000", "key_env": "KEY", "max_num_seqs": 8}})
    moved = with_overrides(started, ["engine.listen=10.0.0.9:9000"])
    assert moved.engine.listen == "10.0.0.9:9000"
    assert moved.model_copy(update={"engine": started.engine}) == started


def test_paths_beside_the_file_do_not_depend_on_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("")
    (tmp_path / "t.jsonl").write_text("")
    file = tmp_path / "train.toml"
    file.write_text('[model]\npath="hub/name"\n[agent]\nrun="agent.py:solve"\n[data]\ntrain="t.jsonl"\n')
    config = load_config(file)
    assert config.agent.run == f"{tmp_path / 'agent.py'}:solve"
    assert config.data.train == str(tmp_path / "t.jsonl")
    assert config.model.path == "hub/name"


@pytest.mark.parametrize(
    ("text", "overrides", "sentence"),
    [
        ("[model", [], r"train\.toml: not valid TOML"),
        (None, [], r"train\.toml: no such file"),
        ("", ["trainer.steps"], r"expected table\.setting=value"),
    ],
)
def test_a_file_or_an_override_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, text: str | None, overrides: list[str], sentence: str
) -> None:
    file = tmp_path / "train.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        load_config(file, overrides)


def test_a_credit_rule_of_ones_own_is_found_from_anywhere_and_a_rules_name_is_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rules.py", "uniform"):
        (tmp_path / name).write_text("")
    own = parse_file(tmp_path, {"credit": {"type": "rules.py:mine", "key": "rules.py:state", "n": 1}})
    assert own == {
        "credit": {"type": f"{tmp_path}/rules.py:mine", "key": f"{tmp_path}/rules.py:state", "n": 1},
    }
    assert parse_file(tmp_path, {"credit": "uniform"}) == {"credit": "uniform"}


def parse_file(folder: Path, algorithm: dict[str, object]) -> dict[str, object]:
    return load_config(
        None, given={f"{key}": value for key, value in (LEAST | {"algorithm": algorithm}).items()}
    ).algorithm


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://agl:secret@db:5432/agl?sslmode=require", "postgresql://agl:***@db:5432/agl?sslmode=require"),
        ("postgres://agl:s:e@cret@db/agl", "postgres://agl:***@db/agl"),
        ("redis://:secret@db/0", "redis://:***@db/0"),
        ("postgresql://db/agl?user=agl&password=secret&x=1", "postgresql://db/agl?user=agl&password=***&x=1"),
        ("postgresql://agl@db/agl", "postgresql://agl@db/agl"),
        ("http://db:8088", "http://db:8088"),
        ("memory://", "memory://"),
    ],
)
def test_the_record_of_a_run_has_no_password(url: str, shown: str) -> None:
    assert run_record(parse_config(LEAST | {"store": {"url": url}}))["store"]["url"] == shown


def test_epochs_become_steps_once_the_number_of_tasks_is_known() -> None:
    config = parse_config(LEAST | {"trainer": {"epochs": 1.5, "tasks_per_step": 4}})
    settled = config.with_steps(10)
    assert (settled.trainer.steps, settled.trainer.epochs) == (4, None)
    assert settled.with_steps(99) == settled
    assert parse_config(LEAST | {"trainer": {"epochs": 0.01}}).with_steps(1).trainer.steps == 1


def test_a_reward_may_be_one_or_a_list_and_workers_are_told_the_names_of_several() -> None:
    def specs(reward: object) -> list[str]:
        return parse_config(LEAST | {"agent": {"run": "a.py:f", "reward": reward}}).agent.reward_specs

    assert specs("r.py:exact") == specs(["r.py:exact"]) == specs({"run": "r.py:exact"}) == ["r.py:exact"]
    several = specs(["r.py:exact", {"run": "r.py:short", "name": "length"}, {"judge": "gpt"}])
    assert [json.loads(one) for one in several] == [
        {"name": "exact", "run": "r.py:exact"},
        {"name": "length", "run": "r.py:short"},
        {"name": "judge", "judge": "gpt"},
    ]


def test_reward_files_of_a_list_are_found_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "r.py").touch()
    file = tmp_path / "train.toml"
    file.write_text('[model]\npath="m"\n[data]\ntrain="t"\n[agent]\nrun="a:f"\nreward=["r.py:f", {run="r.py:g"}]\n')
    assert [one.run for one in load_config(file).agent.reward] == [f"{tmp_path}/r.py:f", f"{tmp_path}/r.py:g"]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: EngineConfig(dropout=1.5), "EngineConfig: dropout: expected a number less than 1, got 1.5"),
        (lambda: EngineConfig(optimiser="muon"), "optimiser: no such setting; did you mean 'optimizer'?"),
        (lambda: EngineConfig(learner="fsdp"), "learner.processes: is required"),
        (lambda: EngineConfig(learner={"processes": 2}), "learner.processes: no such setting; known here: type"),
        (lambda: EngineConfig(lora_rank=0), "lora_rank: expected a number greater than or equal to 1, got 0"),
        (lambda: TrainerConfig(steps=3, epochs=1), "epochs: conflicts with steps; give one of the two"),
    ],
)
def test_settings_made_as_an_object_are_refused_as_those_of_a_table_are(
    make: Callable[[], object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make()


def test_of_several_rewards_each_may_have_a_weight_and_one_alone_may_not() -> None:
    rewards = AgentConfig(run="a.py:f", reward=[{"run": "r.py:exact"}, {"run": "r.py:form", "weight": 0.5}])
    assert [json.loads(spec).get("weight") for spec in rewards.reward_specs] == [None, 0.5]
    with pytest.raises(ConfigError, match="weight: has no effect on a reward function alone"):
        AgentConfig(run="a.py:f", reward=[{"run": "r.py:form", "weight": 0.5}])


ROW = {"question": "6 x 7?", "answer": 42}


def test_private_fields_are_fields_of_the_tasks_and_in_no_template_that_agents_are_given() -> None:
    config = parse_config(LEAST | {"data": {"train": "t.jsonl", "private": "answer"}})
    config.check_tasks([ROW])
    assert config.data.private == ("answer",)
    assert private_fields(run_record(config)) == ("answer",)
    with pytest.raises(ConfigError, match=r"data\.private: no such field 'answer'; the tasks have question"):
        config.check_tasks([{"question": "6 x 7?"}])
    ruled = {"templates": {"system": "It is {answer}."}, "rules": [{"template": "system", "agents": ["*"]}]}
    parse_config(LEAST | {"prompts": ruled}).check_tasks([ROW])
    with pytest.raises(ConfigError, match="unknown placeholder 'answer'; the tasks have the fields question"):
        parse_config(LEAST | {"prompts": ruled, "data": {"train": "t", "private": ["answer"]}}).check_tasks([ROW])


def test_a_sandbox_in_which_the_file_of_the_tasks_can_be_read_keeps_nothing_private(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "t.jsonl").write_text("")
    table: dict[str, Any] = {"model": {"path": "m"}, "agent": {"command": "sh agent.sh"}}
    for folder, data, works in (
        (tmp_path, {"private": ["answer"]}, False),
        (tmp_path, {}, True),
        (tmp_path / "agent", {"private": ["answer"]}, True),
    ):
        config = parse_config(
            table
            | {"data": {"train": str(tmp_path / "t.jsonl"), **data}}
            | {"sandbox": {"type": "bubblewrap", "readable": [str(folder)]}}
        )
        with nullcontext() if works else pytest.raises(ConfigError, match=r"agents may read \(sandbox\.readable\)"):
            config.check_tasks([ROW])
