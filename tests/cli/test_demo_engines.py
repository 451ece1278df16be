"""Which engine the demo runs on: what cannot be run is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentlightning.cli.app import app
from agentlightning.cli.demo import engine_table
from agentlightning.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("engine.nmae=verl", "nmae"),
        ("trainer.steps=3", r"--set trainer\.steps: expected a setting of \[engine\]"),
        ("engine.learner.processes=2", "processes"),
    ],
)
def test_a_setting_that_is_none_of_the_engines_is_refused_before_the_warm_start(
    setting: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=named):
        CliRunner().invoke(app, ["demo", "--set", setting], catch_exceptions=False)
    assert not (tmp_path / "runs").exists()


def test_settings_make_the_table_of_the_engine() -> None:
    given = ["engine.name=verl", "engine.options.trainer.nnodes=2", 'engine.options.python="python"']
    table = {"name": "verl", "options": {"trainer": {"nnodes": 2}, "python": "python"}}
    assert engine_table(given) == {"device": "auto", "dtype": "float32", **table}
