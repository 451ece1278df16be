"""Defaults that depend on model, machine and algorithm: what a configuration leaves open, chosen when a run starts.

The one place where such values stand. `Training` and the check say what was chosen and why; the run's recorded
configuration holds it, so that a resumed run goes on with the same.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.losses import Importance, PpoClip
from agentlightning.algorithms.offline import OfflineAlgorithm, PreferenceAlgorithm, SupervisedAlgorithm
from agentlightning.algorithms.settings import name_of
from agentlightning.config.external import secret_variables
from agentlightning.config.run import Config
from agentlightning.engines.folders import ModelSize, find_model, model_size
from agentlightning.engines.machine import Machine, measure_machine
from agentlightning.trainer.estimate import machine_notes
from agentlightning.trainer.policies import policy_configs, schedule_configs
from agentlightning.trainer.schedules import algorithm_class, make_algorithm
from agentlightning.trainer.schedules import name_of as algorithm_name

TINY_RATE, TINY_MINIBATCHES, TINY_BETAS = 1e-5, 4, (0.9, 0.95)
"""Those that the demo's models learn with, but for the rate, which goes by the task."""
BETAS = (0.9, 0.999)
"""Of AdamW, as in TRL, verl, prime-rl and SkyRL."""
RATES: Mapping[type, Sequence[tuple[float, float]]] = MappingProxyType(
    {
        LightningRL: ((250e6, 3e-5), (1e9, 1e-5), (math.inf, 1e-6)),
        PreferenceAlgorithm: ((math.inf, 5e-7),),
        SupervisedAlgorithm: ((math.inf, 1e-5),),
    }
)
"""Peak learning rates of all weights by algorithm, each for models of fewer parameters. For RL as measured with 135 million
(3e-5 learned quickest, 1e-4 lost its variety, 1e-5 took twice the steps); for large ones as in TRL, verl, prime-rl and
SkyRL."""
ADAPTER_FACTOR = 10
"""Times the rate of all weights, for those of an adapter."""
CPU_TASKS_PER_STEP = 8
"""On a CPU, where a step of 32 takes minutes. With groups of 8 they are 64 rollouts for one update, with which 135 million
parameters learned."""
CPU_COMPLETION_TOKENS = 1024
DUAL_CLIP = 3.0
"""As in verl."""
MAX_COMPLETION_TOKENS = 8192
"""Of one completion, and at most half of the context: one that never ends holds up a whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """The model of one policy, and the machine that would compute it."""

    folder: Path
    size: ModelSize
    machine: Machine | None
    """None for tiny models, which are quick anywhere, and for engines that compute elsewhere."""


async def find_models(config: Config) -> dict[str, FoundModel]:
    """Those of the policies that are trained. ModelError where one is not there, ConfigError where the device is not."""
    withhold, found = frozenset(secret_variables(config.model_dump())), {}
    for alias, own in policy_configs(config).items():
        folder = await asyncio.to_thread(find_model, own.model.path)  # which may download it
        size = model_size(folder)
        turns = own.trainer.max_staleness == 0
        machine = None if size.tiny else await measure_machine(own.engine, withhold, turns=turns)
        found[alias] = FoundModel(folder=folder, size=size, machine=machine)
    return found


async def with_defaults(
    config: Config, note: Callable[[str], None], models: Mapping[str, FoundModel] | None = None
) -> Config:
    """The configuration with nothing left open; `note` is told of each policy's model, machine and memory, and what was
    chosen. models: by policy, where they are found already. Raises as `find_models`."""
    if config.agent_model is not None:
        return config
    models = await find_models(config) if models is None else models
    chosen: dict[str, Config] = {}
    for alias, own in policy_configs(config).items():
        model = models[alias]
        chosen[alias], sentences = choose(own, model.size, model.machine)
        if model.machine is not None:
            parts = (part for _, part in schedule_configs(chosen[alias]))
            reference = any(make_algorithm(part, algorithm_class(part)).needs_reference for part in parts)
            about = machine_notes(model.folder, model.size, own.engine, model.machine, reference=reference)
            sentences = [*about, *sentences]
        for sentence in sentences:
            note(f"{alias}: {sentence}" if config.policies else sentence)
    trainer = config.trainer
    first = next(iter(chosen.values()))
    if trainer.learning_rate is None:
        trainer = trainer.model_copy(update={"learning_rate": first.trainer.learning_rate})
    slow = any(model.machine is not None and model.machine.cpu for model in models.values())
    if slow and not config.offline and "tasks_per_step" not in trainer.model_fields_set:
        by_machine = {"trainer.tasks_per_step": CPU_TASKS_PER_STEP}
        note(_sentence(by_machine, "on a CPU; more make steadier steps, and longer ones"))
        trainer = trainer.model_copy(update={"tasks_per_step": CPU_TASKS_PER_STEP})
    caps = [one.model.max_tokens for one in chosen.values() if one.model.max_tokens is not None]
    model_table = config.model.model_copy(update={"max_tokens": min(caps, default=None)})
    changes: dict[str, Any] = {"model": model_table, "trainer": trainer}
    if not config.policies:
        return config.model_copy(update=changes | {"algorithm": first.algorithm, "engine": first.engine})
    policies = dict(config.policies)
    for alias, own in chosen.items():
        engine = policies[alias].engine | {"optimizer": own.engine.optimizer.model_dump(mode="json")}
        policies[alias] = policies[alias].model_copy(
            update={"learning_rate": own.trainer.learning_rate, "algorithm": own.algorithm, "engine": engine}
        )
    return config.model_copy(update=changes | {"policies": policies})


def choose(config: Config, size: ModelSize, machine: Machine | None = None) -> tuple[Config, list[str]]:
    """The configuration of one policy with nothing left open, and a sentence for each reason of what was chosen."""
    parts = [part for _, part in schedule_configs(config)]
    base, *entries = [_of_algorithm(part, size) for part in parts]
    by_algorithm = {"trainer.learning_rate": base.pop("learning_rate", None)}
    by_size = {f"algorithm.{name}": value for name, value in base.items() if name != "loss"}
    if "loss" in base:
        by_size["algorithm.loss.dual_clip"] = base["loss"]["dual_clip"]
    algorithm = config.algorithm | base
    if entries:
        schedule = config.algorithm["schedule"]
        algorithm["schedule"] = [dict(entry) | own for entry, own in zip(schedule, entries, strict=True)]
    engine = config.engine
    if engine.optimizer.betas is None and engine.name in ("local", "verl") and "url" not in engine.options:
        betas = by_size["engine.optimizer.betas"] = TINY_BETAS if size.tiny else BETAS
        engine = engine.model_copy(update={"optimizer": engine.optimizer.model_copy(update={"betas": betas})})
    model, cap, slow = config.model, {}, machine is not None and machine.cpu
    if model.max_tokens is None and config.agent.given and not size.tiny:
        most = CPU_COMPLETION_TOKENS if slow else MAX_COMPLETION_TOKENS
        cap = {"model.max_tokens": min(most, max(1, size.context // 2))}
        model = model.model_copy(update={"max_tokens": cap["model.max_tokens"]})
    trainer = config.trainer
    if by_algorithm["trainer.learning_rate"] is not None:
        trainer = trainer.model_copy(update={"learning_rate": by_algorithm["trainer.learning_rate"]})
    name = algorithm_name(make_algorithm(parts[0], algorithm_class(parts[0])))
    on = "on a CPU; " if slow else ""
    weights = "all weights" if engine.lora_rank is None else "an adapter"
    sentences = [
        _sentence(by_algorithm, f"{name} of {weights}, {size}"),
        _sentence(by_size, f"{'a tiny model, ' if size.tiny else ''}{size}"),
        _sentence(cap, f"of a completion, at most; {on}the model's context holds {size.context}"),
    ]
    changes = {"algorithm": algorithm, "engine": engine, "model": model, "trainer": trainer}
    return config.model_copy(update=changes), [*filter(None, sentences)]


def _of_algorithm(config: Config, size: ModelSize) -> dict[str, Any]:
    """Settings that the algorithm of a configuration without a schedule leaves open, and its learning rate."""
    algorithm = make_algorithm(config, algorithm_class(config))
    found: dict[str, Any] = {}
    if config.trainer.learning_rate is None:
        found["learning_rate"] = _rate(algorithm, size, adapter=config.engine.lora_rank is not None)
    if isinstance(algorithm, OfflineAlgorithm):
        return found
    if algorithm.minibatches is None:
        once = name_of(algorithm.loss) == "reinforce" and not isinstance(algorithm.correction, Importance)
        found["minibatches"] = TINY_MINIBATCHES if size.tiny and not once else 1
    loss = algorithm.loss
    if isinstance(loss, PpoClip) and loss.dual_clip is None and not size.tiny and 1 + loss.clip_high < DUAL_CLIP:
        found["loss"] = loss.model_dump(mode="json") | {"dual_clip": DUAL_CLIP}
    return found


def _rate(algorithm: LightningRL | OfflineAlgorithm, size: ModelSize, *, adapter: bool) -> float:
    if size.tiny:
        return TINY_RATE
    rates = next(rates for kind, rates in RATES.items() if isinstance(algorithm, kind))
    parameters = rates[-1][0] if size.parameters is None else size.parameters
    rate = next((rate for below, rate in rates if parameters < below), rates[-1][1])
    return float(f"{rate * ADAPTER_FACTOR:.2g}") if adapter else rate


def _sentence(chosen: Mapping[str, Any], why: str) -> str:
    """Empty where nothing was chosen."""
    known = ", ".join(
        f"{name} = {list(value) if isinstance(value, tuple) else value}"
        for name, value in chosen.items()
        if value is not None
    )
    return f"chosen: {known} ({why})" if known else ""
