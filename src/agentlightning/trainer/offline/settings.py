"""Settings of an offline run: its algorithm by name, and an error for each setting without effect.

The trainer asks before anything starts; the loop itself is in `loop.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.offline import (
    DPO,
    KTO,
    RFT,
    SFT,
    Distill,
    OfflineAlgorithm,
    PreferenceAlgorithm,
    SupervisedAlgorithm,
)
from agentlightning.algorithms.prompts import PROMPT_ALGORITHMS, PromptAlgorithm
from agentlightning.algorithms.selection import selection
from agentlightning.config.run import Config, EvalConfig, ModelConfig
from agentlightning.engines.base import DEFAULT_POLICY
from agentlightning.engines.support import Support, check_loss, check_preference_loss
from agentlightning.errors import ConfigError, boundary
from agentlightning.records import JSON
from agentlightning.runtime.code_loader import load_plugin, path_of_code

OFFLINE_ALGORITHMS: Mapping[str, type[OfflineAlgorithm]] = MappingProxyType(
    {kind.name: kind for kind in (SFT, RFT, Distill, DPO, KTO)}
)
"""The algorithms by name."""
AnyAlgorithm = TypeVar("AnyAlgorithm", bound=LightningRL | OfflineAlgorithm)
ONLINE = "lightning_rl"
"""Name of the algorithm that samples."""
SAMPLING_SETTINGS = (
    ("model", "temperature"),
    *(("trainer", name) for name in ("max_staleness", "batch_order")),
)
"""Settings of training rollouts, with their tables: an offline run has none."""


def offline_algorithm(config: Config) -> OfflineAlgorithm:
    """The configured algorithm, or that of a part of a schedule. ConfigError for an unknown name, an unknown setting, or one
    that would be ignored."""
    kind = algorithm_class(config)
    if not issubclass(kind, OfflineAlgorithm):
        raise ConfigError(
            f"algorithm.type: {config.algorithm.get('name', ONLINE)!r} does not learn from recorded rollouts "
            f"(data.from_run); expected one of {', '.join(OFFLINE_ALGORITHMS)}"
        )
    algorithm = make_algorithm(config, kind)
    if config.offline:
        _check_ignored(config)
    if not config.data.from_run:
        raise ConfigError(
            f"algorithm.type: {config.algorithm['type']!r} learns from recorded rollouts: name their run with data.from_run"
        )
    selection(DEFAULT_POLICY, algorithm.agents)  # a predicate that cannot be loaded is found here
    return algorithm


def algorithm_class(config: Config) -> type[LightningRL | OfflineAlgorithm]:
    """The class that `algorithm.type` names: a built-in one, or a plug-in: a dataclass derived from LightningRL, from
    SupervisedAlgorithm or from PreferenceAlgorithm, whose fields are its settings."""
    name = config.algorithm.get("type", ONLINE)
    if name == ONLINE:
        return LightningRL
    if name in OFFLINE_ALGORITHMS:
        return OFFLINE_ALGORITHMS[name]
    if not isinstance(name, str):
        raise ConfigError(f"algorithm.type: expected a name, got {name!r}")
    found = None if name in PROMPT_ALGORITHMS else load_plugin("algorithm", name, (ONLINE, *OFFLINE_ALGORITHMS))
    if found is None or (isinstance(found, type) and issubclass(found, PromptAlgorithm)):
        raise ConfigError(f"algorithm.type: {name!r} searches for prompts and trains nothing: run it with agl optimize")
    bases = (LightningRL, SupervisedAlgorithm, PreferenceAlgorithm)
    if not (isinstance(found, type) and issubclass(found, bases) and dataclasses.is_dataclass(found)):
        raise ConfigError(
            f"algorithm.type: {name!r}: expected a dataclass derived from LightningRL, SupervisedAlgorithm or "
            f"PreferenceAlgorithm, got {getattr(found, '__name__', type(found).__name__)}"
        )
    if issubclass(found, LightningRL):
        _check_plan(found, name)
    return found


def _check_plan(kind: type[LightningRL], name: str) -> None:
    signature = inspect.signature(kind.plan)
    try:
        signature.bind(None, [], seed=0, evidence=None, values=None, reference=None)
    except TypeError as cause:
        raise ConfigError(
            f"algorithm.type {name!r}: plan: expected to be callable as (self, groups, seed, evidence, values, reference), "
            f"but its signature is {signature}"
        ) from cause


def make_algorithm(config: Config, kind: type[AnyAlgorithm]) -> AnyAlgorithm:
    """The algorithm, a `kind`, with the configured settings. ConfigError for one that it has not or lacks."""
    given = config.algorithm.get("type", ONLINE)
    table = {name: value for name, value in config.algorithm.items() if name not in ("type", "schedule")}
    known = {setting.name: setting for setting in dataclasses.fields(kind) if setting.init}
    for setting in table:
        if setting not in known:
            of = f" of {given!r}" if "type" in config.algorithm else ""
            raise ConfigError(f"algorithm.{setting}: no such setting{of}; known here: {', '.join(known) or 'none'}")
    for name, one in known.items():
        if name not in table and one.default is one.default_factory is dataclasses.MISSING:
            raise ConfigError(f"algorithm.{name}: is required by {given!r}")
    with boundary(f"algorithm.type: {given!r}", ConfigError):
        return kind(**table)


def name_of(algorithm: LightningRL | OfflineAlgorithm) -> str:
    """The text that names the class of `algorithm` in a configuration."""
    kind = type(algorithm)
    if kind is LightningRL:
        return ONLINE
    if isinstance(algorithm, OfflineAlgorithm) and OFFLINE_ALGORITHMS.get(algorithm.name) is kind:
        return algorithm.name
    return path_of_code(kind, "algorithm.type")


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
        tables["data"]["val"] = data["val"]
        tables["agent"] = {name: value for name, value in agent.items() if name != "on_failure"}
        tables["eval"] = recorded.get("eval", {})
        tables["external"] = recorded.get("external", {})
        tables["limits"] = recorded.get("limits", {})
    return tables


def _check_ignored(config: Config) -> None:
    plain = Config(model=ModelConfig(path=config.model.path), data=config.data)
    for table, name in SAMPLING_SETTINGS:
        if getattr(getattr(config, table), name) != getattr(getattr(plain, table), name):
            raise ConfigError(f"{table}.{name}: has no effect with data.from_run: nothing is sampled to learn from")
    if config.air.rules:
        raise ConfigError("air: has no effect with data.from_run: offline algorithms compare whole rollouts")
    if config.monitor.model_copy(update={"tags": ()}) != plain.monitor:
        raise ConfigError("monitor: has no effect with data.from_run: offline algorithms give no call a credit")
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
        "limits": config.limits != plain.limits,
        "model.max_tokens": config.model.max_tokens is not None,
    }
    for name, given in ignored.items():
        if given:
            raise ConfigError(f"{name}: has no effect with data.from_run where no agent is evaluated")
    if config.eval != EvalConfig(every=config.eval.every):
        raise ConfigError("eval: without an agent only every has an effect: how often the held-out loss is computed")
