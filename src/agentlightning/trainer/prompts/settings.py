"""Settings of a prompt search: its algorithm by name, and an error for each setting without effect.

``agl optimize`` asks before anything starts, and ``agl train`` what is not for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from agentlightning.algorithms.prompts import PROMPT_ALGORITHMS, PromptAlgorithm
from agentlightning.config.air import AirConfig
from agentlightning.config.alerts import AlertsConfig
from agentlightning.config.optimizer import POLICY, OptimizeConfig
from agentlightning.config.run import Config, EvalConfig, MonitorConfig, TrainerConfig
from agentlightning.errors import ConfigError, boundary
from agentlightning.records import JSON
from agentlightning.runtime.code_loader import is_code, load_plugin
from agentlightning.trainer.prompts.optimizer_model import scripted_model

TRAINER_SETTINGS = frozenset({"seed", "start_timeout_s", "hang_timeout_s", "trackers"})
"""Settings of [trainer] that have an effect here."""


def prompt_algorithm(config: Config) -> PromptAlgorithm:
    """The configured search. ConfigError for another algorithm, an unknown setting, or one that would be ignored."""
    algorithm = _made(config)
    _check_ignored(config)
    return algorithm


def searches(config: Config) -> bool:
    """True where `algorithm.type` names a search for prompts."""
    name = config.algorithm.get("type")
    if not isinstance(name, str) or not is_code(name):
        return name in PROMPT_ALGORITHMS
    found = load_plugin("algorithm", name, PROMPT_ALGORITHMS)
    return isinstance(found, type) and issubclass(found, PromptAlgorithm)


def check_budget(optimize: OptimizeConfig, val: Sequence[JSON]) -> None:
    """ConfigError where no candidate could be scored on all validation tasks."""
    if len(val) > optimize.max_rollouts:
        raise ConfigError(
            f"optimize.max_rollouts: expected at least {len(val)}, one for each validation task, got "
            f"{optimize.max_rollouts}: nothing could be scored"
        )


def _made(config: Config) -> PromptAlgorithm:
    name = config.algorithm.get("type")
    kind = _algorithm_class(name)
    table = {setting: value for setting, value in config.algorithm.items() if setting != "type"}
    known = [one.name for one in dataclasses.fields(kind) if one.init]
    for setting in table:
        if setting not in known:
            raise ConfigError(
                f"algorithm.{setting}: no such setting of {name!r}; known here: {', '.join(known) or 'none'}"
            )
    if config.optimize is not None and config.optimize.grammar is not None:
        scripted_model(Path(config.optimize.grammar))  # read before anything starts
    with boundary(f"algorithm.type: {name!r}", ConfigError):
        return kind(**table)


def _algorithm_class(name: object) -> type[PromptAlgorithm]:
    known = ", ".join(PROMPT_ALGORITHMS)
    if not isinstance(name, str) or not (name in PROMPT_ALGORITHMS or is_code(name)):
        raise ConfigError(
            f"algorithm.type: expected a search for prompts, one of {known}, or file.py:name of your own, got "
            f"{name or 'lightning_rl'!r}; agl train runs the others"
        )
    if name in PROMPT_ALGORITHMS:
        return PROMPT_ALGORITHMS[name]
    found = load_plugin("algorithm", name, PROMPT_ALGORITHMS)
    if not (isinstance(found, type) and issubclass(found, PromptAlgorithm) and dataclasses.is_dataclass(found)):
        raise ConfigError(
            f"algorithm.type: {name!r}: expected a dataclass derived from PromptAlgorithm, got "
            f"{getattr(found, '__name__', type(found).__name__)}"
        )
    return found


def _check_ignored(config: Config) -> None:
    optimize = config.optimize
    if optimize is None:
        raise ConfigError("optimize.model: is required; name the model that writes new texts")
    if config.data.train is None or config.data.val is None:
        missing = "train" if config.data.train is None else "val"
        raise ConfigError(
            f"data.{missing}: is required to optimize prompts; name training tasks, and held-out ones that choose"
        )
    if config.agent_model is not None and optimize.model == POLICY:
        raise ConfigError(f"optimize.model: expected the NAME of an external model, as in {config.model.path!r}")
    if config.policies:
        raise ConfigError("policies: a search for prompts runs one model; expected model.path alone")
    plain = TrainerConfig()
    ignored = {
        f"trainer.{name}": getattr(config.trainer, name) != getattr(plain, name)
        for name in TrainerConfig.model_fields
        if name not in TRAINER_SETTINGS
    }
    ignored |= {
        "data.from_run": bool(config.data.from_run),
        "agent.on_failure": config.agent.on_failure != "drop",
        "eval": config.eval != EvalConfig(tasks=config.eval.tasks),
        "air": config.air != AirConfig(),
        "alerts": config.alerts != AlertsConfig(),
        "monitor": config.monitor != MonitorConfig(tags=config.monitor.tags),
    }
    for name, given in ignored.items():
        if given:
            raise ConfigError(f"{name}: has no effect on a search for prompts, which trains nothing")
