"""Which engine the demo runs on: what its options leave without effect is refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.cli.demo import demo_engine
from agentlightning.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--engine verl --sampler vllm", "--sampler and --learner have no effect with --engine verl"),
        ("--engine verl --learner fsdp -n 2", "--sampler and --learner have no effect with --engine verl"),
        ("--engine-options options.toml", "--engine-options has no effect with --engine local"),
        ("--engine-python python", "--engine-python has no effect here"),
        ("--engine verl --engine-python nowhere", r"engine\.options\.python: expected the path of an interpreter"),
        ("--engine verl --engine-options nowhere.toml", r"nowhere\.toml: no such file"),
        ("-n 2", "learner.processes: no such setting"),
    ],
)
def test_an_option_without_effect_is_refused_before_the_warm_start(
    options: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=named):
        CliRunner().invoke(app, ["demo", *options.split()], catch_exceptions=False)
    assert not (tmp_path / "runs").exists()


def test_options_of_the_command_take_precedence_over_those_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text('model_engine = "dp"\n[trainer]\nn_gpus_per_node = 8\nnnodes = 2\n')
    engine = demo_engine("verl", "local", "local", 2, Path(sys.executable), file)
    assert engine["options"] == {
        "python": sys.executable,
        "model_engine": "dp",
        "trainer": {"n_gpus_per_node": 2, "nnodes": 2},
    }
