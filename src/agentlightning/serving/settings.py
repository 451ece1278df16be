"""Settings of ``agl serve --policy``: the file's tables, and the record of the run that serves, made of them and of the
version's own run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from agentlightning.config.base import Table
from agentlightning.config.file import read_toml
from agentlightning.config.run import Config, LimitsConfig, check_limits, parse_config, parse_settings, run_record
from agentlightning.errors import ConfigError
from agentlightning.records import JSON
from agentlightning.runtime.code_loader import is_code
from agentlightning.trainer.policies import sampling_table


class ServeConfig(Table):
    """The table ``[serve]``: how users are served, and when a canary is rolled back."""

    idle_s: float = Field(1800.0, ge=1, le=7 * 86_400)
    """Seconds without a call after which a session has ended."""
    keep_days: float | None = Field(None, gt=0)
    """Days after which the calls and feedback texts of ended sessions are deleted; None: never."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward for the test of a canary; rewards beyond count as the nearer of the two."""
    alpha: float = Field(0.02, gt=0, lt=0.5)
    """Bound of the false-rollback rate: the probability that a canary which is no worse is ever rolled back."""

    @field_validator("reward_range")
    @classmethod
    def _is_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if value[0] >= value[1]:
            raise ValueError("expected the lowest reward, then a higher one")
        return value


class ServedSampling(Table):
    """Sampling parameters of all sessions."""

    temperature: float | None = Field(None, ge=0)
    """None: the one that the model was trained with."""
    max_tokens: int | None = Field(None, ge=1)


class ServeFile(Table):
    """The tables of the file."""

    serve: ServeConfig = ServeConfig()
    limits: LimitsConfig = LimitsConfig()
    model: ServedSampling = ServedSampling()
    engine: dict[str, Any] = Field({})
    """Settings that replace those of the version's run."""

    @model_validator(mode="after")
    def _check_limits(self) -> ServeFile:
        check_limits(self.limits, served=True)
        return self


def read_serve_file(path: Path | None) -> ServeFile:
    """The settings of a file. ConfigError where one is unknown or wrong."""
    return ServeFile() if path is None else parse_settings(ServeFile, read_toml(path), str(path))


def served_config(trained: Config, file: ServeFile, weights: Path, name: str) -> Config:
    """The configuration by which a version is sampled: that of its run, without what is of learning alone. ConfigError where
    its record alone names the code of an engine."""
    table = sampling_table(trained, file.engine)
    engine = table["engine"]["name"]
    if is_code(engine) and file.engine.get("name") != engine:
        raise ConfigError(
            f"engine.name: the record of the version's run names the code {engine[:80]!r}, which is not imported to serve "
            "it; if you trust whoever recorded it, name it in [engine] of the serve file"
        )
    table["model"] |= {"path": str(weights), "chat_template": None}  # a version's folder has its own
    # Keys are of the run that serves, which has a resource with all limits: training from its record has no users.
    table["limits"], table["external"], table["policies"] = file.limits.of_agents.model_dump(mode="json"), {}, {}
    for key in ("temperature", "max_tokens"):
        if (value := getattr(file.model, key)) is not None:
            table["model"][key] = value
    return parse_config(table, name)


def serve_record(config: Config, file: ServeFile, name: str) -> JSON:
    """The configuration that the store keeps with the run: training from its record inherits from it."""
    return {**run_record(config), "serve": {"model": name, **file.serve.model_dump(mode="json")}}
