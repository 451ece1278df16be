"""Settings of a served model: what it keeps of its run's configuration, and how routes follow an alias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentlightning.config.run import parse_config
from agentlightning.errors import ConfigError
from agentlightning.serving.run import ServedModel, with_stable
from agentlightning.serving.settings import (
    ServeFile,
    read_serve_file,
    serve_record,
    served_config,
)
from agentlightning.serving.split import Split

TRAINED: dict[str, Any] = {
    "model": {"path": "base", "max_tokens": 100},
    "agent": {"run": "agent.py:solve"},
    "data": {"train": "train.jsonl"},
    "engine": {"lora_rank": 8, "device": "cpu", "optimizer": {"weight_decay": 0.1}},
}


def test_a_version_is_sampled_as_it_was_trained_without_what_is_of_learning(tmp_path: Path) -> None:
    file = ServeFile(model={"max_tokens": 50}, engine={"max_num_seqs": 8})  # type: ignore[arg-type]
    config = served_config(parse_config(TRAINED, "test"), file, tmp_path, "support@40")
    assert (config.engine.lora_rank, config.engine.optimizer.weight_decay, config.engine.device) == (None, 0.0, "cpu")
    assert (config.engine.max_num_seqs, config.model.path, config.model.max_tokens) == (8, str(tmp_path), 50)


def test_an_engine_that_the_record_alone_names_is_not_imported(tmp_path: Path) -> None:
    trained = parse_config({**TRAINED, "engine": {"name": "planted.py:Engine"}}, "test")
    with pytest.raises(ConfigError, match=r"names the code 'planted\.py:Engine', which is not imported to serve it"):
        served_config(trained, ServeFile(), tmp_path, "support@40")
    for own in ("planted.py:Engine", "local"):
        assert served_config(trained, ServeFile(engine={"name": own}), tmp_path, "support@40").engine.name == own


def test_the_record_says_how_users_are_served(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("[serve]\nidle_s = 60\n[limits.attempt]\nmax_calls = 3\n")
    file = read_serve_file(path)
    config = served_config(parse_config(TRAINED, "test"), file, tmp_path, "support@40")
    record = serve_record(config, file, "support")
    assert (record["serve"]["model"], record["serve"]["idle_s"]) == ("support", 60.0)
    assert record["model"]["path"] == str(tmp_path)
    assert record["limits"]["attempt"]["max_calls"] == 3


def test_limits_of_keys_are_no_settings_of_the_versions_that_are_served(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text("[limits.run]\nmax_tokens = 9\n[limits.keys.shop]\nmax_calls = 5\n")
    config = served_config(parse_config(TRAINED, "test"), read_serve_file(path), tmp_path, "support@40")
    assert (config.limits.keys, config.limits.run.max_tokens) == ({}, 9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[trainer]\nsteps = 3\n", "trainer: no such setting"),
        ("[serve]\nreward_range = [1, 1]\n", "reward_range: expected the lowest reward, then a higher one"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_serve_file(path)


def test_the_run_that_serves_has_the_same_id_every_time() -> None:
    served = ServedModel.of("support@production", ServeFile(), Path("runs"), None)
    assert (served.run_id, served.reference.name, served.reference.alias) == (
        "serve-support-production",
        "support",
        "production",
    )


def test_a_canary_that_is_promoted_is_none_any_more() -> None:
    split = Split(stable=40, canary=50, weight=0.1)
    assert with_stable(None, 40) == Split(stable=40)
    assert with_stable(split, 50) == Split(stable=50)
    assert with_stable(split, 60) == Split(stable=60, canary=50, weight=0.1)
