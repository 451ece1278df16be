"""Settings of an offline run: its algorithm by name, and an error for each setting without effect.

The trainer asks before anything starts; the loop itself is in `loop.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from agentlightning.algorithms.offline import OfflineAlgorithm
from agentlightning.algorithms.preference import DPO, KTO, PreferenceAlgorithm
from agentlightning.algorithms.selection import selection
from agentlightning.algorithms.supervised import RFT, SFT, Distill, SupervisedAlgorithm
from agentlightning.config import Config, EvalConfig, ModelConfig
from agentlightning.engines.base import DEFAULT_POLICY
from agentlightning.engines.support import Support, check_loss, check_preference_loss
from agentlightning.errors import ConfigError
from agentlightning.types import JSON

OFFLINE_ALGORITHMS: Mapping[str, type[OfflineAlgorithm]] = MappingProxyType(
    {kind.name: kind for kind in (SFT, RFT, Distill, DPO, KTO)}
)
"""The algorithms by name."""
SAMPLING_SETTINGS = (
    ("model", "temperature"),
    *(("trainer", name) for name in ("max_staleness", "batch_order", "overprovision", "group_deadline_s")),
)
"""Settings of training rollouts, with their tables: an offline run has none."""


def offline_algorithm(config: Config) -> OfflineAlgorithm:
    """The configured algorithm. ConfigError for an unknown name, an unknown setting, or one that would be ignored."""
    name = config.algorithm.get("name", "lightning_rl")
    if name not in OFFLINE_ALGORITHMS:
        raise ConfigError(
            f"algorithm.name: {name!r} does not learn from recorded rollouts (data.from_run); expected one of "
            f"{', '.join(OFFLINE_ALGORITHMS)}"
        )
    settings = algorithm_settings(config, OFFLINE_ALGORITHMS[name])
    _check_ignored(config)
    algorithm = OFFLINE_ALGORITHMS[name](**settings)
    selection(DEFAULT_POLICY, algorithm.agents)  # a predicate that cannot be loaded is found here
    return algorithm


def algorithm_settings(config: Config, kind: type) -> dict[str, Any]:
    """The configured settings of the algorithm, which is a `kind`. ConfigError for one that it does not have."""
    table = {name: value for name, value in config.algorithm.items() if name != "name"}
    known = [setting.name for setting in dataclasses.fields(kind)]
    for setting in table:
        if setting not in known:
            of = f" of {config.algorithm['name']!r}" if "name" in config.algorithm else ""
            raise ConfigError(f"algorithm.{setting}: no such setting{of}; known here: {', '.join(known) or 'none'}")
    return table


def check_offline(algorithm: OfflineAlgorithm, support: Support) -> None:
    """ConfigError where the engine, as configured, cannot do what the algorithm asks for."""
    if isinstance(algorithm, SupervisedAlgorithm):
        check_loss(support, algorithm.loss)
    elif isinstance(algorithm, PreferenceAlgorithm):
        check_preference_loss(support, algorithm.loss([]))


def inherited(recorded: JSON) -> dict[str, Any]:
    """Tables of an offline run, from the configuration of the run whose rollouts it learns from: its model, engine and
    learning rate, and the settings that evaluate its agent. Empty where that has no configuration (it was recorded by other
    means) or several models.
    """
    if "model" not in recorded or recorded.get("policies"):
        return {}
    data, trainer, engine = recorded.get("data", {}), recorded.get("trainer", {}), recorded.get("engine", {})
    agent = recorded.get("agent", {})
    tables: dict[str, Any] = {
        "model": {"path": recorded["model"]["path"]},
        "engine": {name: value for name, value in engine.items() if name != "dropout"},
        "trainer": {name: trainer[name] for name in ("learning_rate", "grad_clip", "seed") if name in trainer},
        "data": {},
    }
    if data.get("val") is not None and (agent.get("run") or agent.get("command")):
        tables["model"] |= {"max_tokens": recorded["model"].get("max_tokens")}
        tables["data"] |= {"val": data["val"], "fields": data.get("fields")}
        tables["agent"] = {name: value for name, value in agent.items() if name != "on_failure"}
        tables["eval"] = recorded.get("eval", {})
        tables["external"] = recorded.get("external", {})
    return tables


def _check_ignored(config: Config) -> None:
    plain = Config(model=ModelConfig(path=config.model.path), data=config.data)
    for table, name in SAMPLING_SETTINGS:
        if getattr(getattr(config, table), name) != getattr(getattr(plain, table), name):
            raise ConfigError(f"{table}.{name}: has no effect with data.from_run: nothing is sampled to learn from")
    if config.air.rules:
        raise ConfigError("air: has no effect with data.from_run: offline algorithms compare whole rollouts")
    if config.agent.on_failure != "drop":
        raise ConfigError("agent.on_failure: has no effect with data.from_run: only what succeeded is learned from")
    if config.agent.given != (config.data.val is not None):
        missing = "data.val" if config.agent.given else "agent"
        raise ConfigError(f"{missing}: is missing; with data.from_run an agent and held-out tasks go together")
    if not config.agent.given:
        _check_no_agent(config, plain)


def _check_no_agent(config: Config, plain: Config) -> None:
    ignored = {
        "agent": config.agent != plain.agent,
        "external": config.external != plain.external,
        "model.max_tokens": config.model.max_tokens is not None,
        "data.fields": config.data.fields is not None,
    }
    for name, given in ignored.items():
        if given:
            raise ConfigError(f"{name}: has no effect with data.from_run where no agent is evaluated")
    if config.eval != EvalConfig(every=config.eval.every):
        raise ConfigError("eval: without an agent only every has an effect: how often the held-out loss is computed")
