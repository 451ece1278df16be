"""A run that learns from the record: which settings it takes, which it refuses, and which it takes over."""

from typing import Any

import pytest
from record_doubles import config

from agentlightning.algorithms.offline import DPO, KTO, RFT, SFT, Distill
from agentlightning.config.agent import Bubblewrap
from agentlightning.config.run import Config, parse_config, run_record
from agentlightning.engines.base import Support
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.trainer.schedules import (
    OFFLINE_ALGORITHMS,
    algorithm_of,
    check_offline,
    inherited,
    offline_algorithm,
)


@pytest.mark.parametrize("kind", [SFT, RFT, Distill, DPO, KTO])
def test_an_algorithm_is_made_by_its_name_with_its_settings(kind: type) -> None:
    assert offline_algorithm(config(kind.name, algorithm={"held_out": 0.25})) == kind(held_out=0.25)


@pytest.mark.parametrize(
    ("name", "tables", "sentence"),
    [
        ("lightning_rl", {}, r"algorithm\.type: 'lightning_rl' does not learn from recorded rollouts"),
        ("sft", {"algorithm": {"beta": 0.1}}, r"algorithm\.beta: no such setting of 'sft'; known here: held_out"),
        ("sft", {"algorithm": {"agents": ["nowhere.py:writes"]}}, r"nowhere\.py"),
        ("sft", {"data": {"from_run": []}}, "data: give either train"),
        ("sft", {"data": {"train": "t"}}, "data: give either train"),
        ("sft", {"agent": {"run": "a.py:f"}}, r"^data\.val: "),
        ("sft", {"data": {"val": "v"}}, "^agent: "),
    ],
)
def test_a_setting_that_does_not_go_with_the_record_is_an_error(
    name: str, tables: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(AgentLightningError, match=sentence):
        offline_algorithm(config(name, **tables))


@pytest.mark.parametrize("name", OFFLINE_ALGORITHMS)
def test_an_algorithm_of_the_record_is_refused_where_rollouts_are_sampled(name: str) -> None:
    table = {"model": {"path": "m"}, "agent": {"run": "a.py:f"}, "data": {"train": "t"}, "algorithm": {"type": name}}
    with pytest.raises(ConfigError, match=r"name their run with data\.from_run"):
        algorithm_of(parse_config(table))


def test_an_engine_that_cannot_compare_is_refused() -> None:
    check_offline(DPO(), Support(engine="e", preferences=frozenset({"dpo"}), reference=True))
    with pytest.raises(ConfigError, match="does not support the loss 'kto'"):
        check_offline(KTO(), Support(engine="e", preferences=frozenset({"dpo"}), reference=True))
    with pytest.raises(ConfigError, match="a reference"):
        check_offline(DPO(), Support(engine="e", preferences=frozenset({"dpo"})))
    with pytest.raises(ConfigError, match="does not support the loss 'sft'"):
        check_offline(SFT(), Support(engine="e", losses=frozenset({"ppo_clip"})))


SAMPLING_SETTINGS = {
    "model": {"path": "/models/m", "temperature": 0.7, "max_tokens": 50},
    "agent": {"run": "a.py:f", "workers": 3, "on_failure": "zero"},
    "data": {"train": "t.jsonl", "val": "v.jsonl"},
    "algorithm": {"group_size": 4},
    "trainer": {"learning_rate": 0.25, "steps": 7, "seed": 3},
    "eval": {"every": 2},
    "engine": {"dropout": 0.1, "device": "cpu"},
}


def test_what_a_run_takes_over_from_the_one_it_learns_from_makes_a_configuration() -> None:
    found = taken(SAMPLING_SETTINGS, "dpo")
    assert offline_algorithm(found) == DPO()
    assert (found.model.path, found.model.max_tokens, found.agent.workers) == ("/models/m", 50, 3)
    assert (found.data.val, found.eval.every) == ("v.jsonl", 2)
    assert (found.trainer.learning_rate, found.trainer.seed, found.trainer.steps) == (None, 3, 100)
    assert (found.engine.device, found.engine.dropout) == ("cpu", 0.0)


def taken(settings: dict[str, Any], kind: str) -> Config:
    tables = inherited(run_record(parse_config(settings)))
    tables["data"]["from_run"] = "RUN"
    return parse_config({**tables, "algorithm": {"type": kind}})


def test_an_agent_that_is_taken_over_stays_in_its_sandbox_and_without_what_is_kept_from_it() -> None:
    isolated = {"agent": {"command": "sh agent.sh"}, "sandbox": {"type": "bubblewrap", "memory_mb": 99}}
    data = {"data": {"train": "t.jsonl", "val": "v.jsonl", "private": ["answer"]}}
    found = taken(SAMPLING_SETTINGS | isolated | data, "dpo")
    assert (found.data.private, found.sandbox) == (("answer",), Bubblewrap(memory_mb=99))


def test_without_held_out_tasks_no_agent_is_taken_over() -> None:
    found = taken(SAMPLING_SETTINGS | {"data": {"train": "t"}, "eval": {}}, "sft")
    assert not found.agent.given
    assert offline_algorithm(found) == SFT()


def test_a_run_without_a_configuration_or_with_several_models_has_nothing_to_take_over() -> None:
    assert inherited({}) == {}
    assert inherited(run_record(parse_config(SAMPLING_SETTINGS)) | {"policies": {"white": {}, "black": {}}}) == {}
