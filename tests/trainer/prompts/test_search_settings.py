"""Settings of a prompt search: what is missing, unknown or without effect is a sentence before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentlightning.algorithms.prompts import PROMPT_ALGORITHMS
from agentlightning.config.run import parse_config
from agentlightning.errors import ConfigError
from agentlightning.trainer.prompts.optimization import load_splits
from agentlightning.trainer.schedules import algorithm_class, prompt_algorithm

TABLE: dict[str, Any] = {
    "model": {"path": "m"},
    "agent": {"run": "a.py:f"},
    "data": {"train": "t", "val": "v"},
    "algorithm": {"type": "apo", "minibatch": 2},
    "prompts": {"templates": {"system": "Answer {question}."}},
    "external": {"writer": {"url": "https://h/v1", "models": ["w-1"]}},
    "optimize": {"model": "writer"},
}


def changed(**tables: Any) -> dict[str, Any]:
    """The table with others in place of its own; None takes one away."""
    merged = {**TABLE, **tables}
    return {name: value for name, value in merged.items() if value is not None}


@pytest.mark.parametrize("name", PROMPT_ALGORITHMS)
def test_each_search_is_made_by_its_name_and_training_says_which_command_runs_it(name: str) -> None:
    config = parse_config(changed(algorithm={"type": name}))
    assert type(prompt_algorithm(config)) is PROMPT_ALGORITHMS[name]
    with pytest.raises(ConfigError, match=rf"'{name}' searches for prompts .*: run it with agl optimize"):
        algorithm_class(config)


def test_an_own_search_is_found_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass\n"
        "from agentlightning.algorithms.prompts.search import PromptAlgorithm, SearchResult\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Own(PromptAlgorithm):\n"
        "    rounds: int = 1\n"
        "    async def search(self, run, seed):\n"
        "        return SearchResult(best=run.seed, mean=None, reason='done')\n"
    )
    own = parse_config(changed(algorithm={"type": f"{tmp_path}/own.py:Own", "rounds": 3}))
    assert getattr(prompt_algorithm(own), "rounds", None) == 3
    with pytest.raises(ConfigError, match="run it with agl optimize"):
        algorithm_class(own)


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"algorithm": {}}, "algorithm.type: expected a search for prompts, one of"),
        ({"optimize": None}, "optimize.model: is required"),
        ({"data": {"train": "t"}}, "data.val: is required"),
        ({"algorithm": {"type": "apo", "group_size": 8}}, "algorithm.group_size: no such setting of 'apo'"),
        (
            {"model": {"path": "external:writer"}, "optimize": {"model": "policy"}},
            "optimize.model: expected the NAME of an external model",
        ),
    ],
)
def test_a_setting_that_is_missing_or_without_effect_is_a_sentence(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        prompt_algorithm(parse_config(changed(**tables)))
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("tables", "sentence"),
    [
        ({"optimize": {"model": "gpt"}}, "optimize.model: expected one of writer, policy, or file.py:name, got 'gpt'"),
        (
            {"optimize": {"model": "writer", "templates": ["user"]}},
            "optimize.templates: there is no template 'user' in [prompts.templates]; known are system",
        ),
        ({"prompts": {}}, "optimize: expected a template to search"),
        (
            {"external": {"writer": {"url": "https://h/v1", "models": ["w-*"]}}},
            "external.writer.models: expected one name without * and ?",
        ),
        (
            {"external": {"policy": {"url": "https://h/v1", "models": ["w"]}}, "optimize": {"model": "policy"}},
            "external.policy: the name means something else",
        ),
    ],
)
def test_a_table_that_contradicts_others_is_a_sentence(tables: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config(changed(**tables))
    assert str(refused.value).startswith(f"configuration: {sentence}")


def test_a_placeholder_that_no_task_has_is_found_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n')
    data = {"train": f"{tmp_path}/t.jsonl", "val": f"{tmp_path}/t.jsonl"}
    rule = {"template": "system", "agents": ["*"]}
    prompts = {**TABLE["prompts"], "rules": [rule]}
    with pytest.raises(ConfigError, match=r"prompts\.templates\.system: unknown placeholder 'question'"):
        load_splits(parse_config(changed(data=data, prompts=prompts)))
