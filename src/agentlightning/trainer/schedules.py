"""Configured algorithms: which one each policy learns by, from which step on, and whether they go together.

The trainer, the check and ``agl optimize`` ask before anything starts. It reads a configuration and starts nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
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
from agentlightning.algorithms.settings import name_of as rule_name
from agentlightning.config.run import Config
from agentlightning.engines.base import DEFAULT_POLICY, EngineNeeds, Support, check_loss, check_preference_loss
from agentlightning.engines.folders import model_size
from agentlightning.errors import ConfigError, boundary
from agentlightning.records import JSON
from agentlightning.runner.air import load_air
from agentlightning.runtime.code_loader import load_plugin, path_of_code
from agentlightning.trainer.credit_inputs import check_credit_inputs
from agentlightning.trainer.policies import (
    ScheduledAlgorithm,
    check_groups,
    of_policy,
    policy_configs,
    schedule_configs,
)
from agentlightning.trainer.processes import engine_support

ONLINE = "lightning_rl"
"""Name of the algorithm that samples."""
OFFLINE_ALGORITHMS: Mapping[str, type[OfflineAlgorithm]] = MappingProxyType(
    {kind.name: kind for kind in (SFT, RFT, Distill, DPO, KTO)}
)
AnyClass = type[LightningRL | OfflineAlgorithm | PromptAlgorithm]
AnyAlgorithm = TypeVar("AnyAlgorithm", bound=LightningRL | OfflineAlgorithm | PromptAlgorithm)


# --- one algorithm --------------------------------------------------------------------------------------------------


def any_class(config: Config) -> AnyClass:
    """The class that `algorithm.type` names: a built-in one, or a plug-in: a dataclass derived from LightningRL,
    SupervisedAlgorithm, PreferenceAlgorithm or PromptAlgorithm, whose fields are its settings."""
    name = config.algorithm.get("type", ONLINE)
    built_in: dict[str, AnyClass] = {ONLINE: LightningRL, **OFFLINE_ALGORITHMS, **PROMPT_ALGORITHMS}
    if not isinstance(name, str):
        raise ConfigError(f"algorithm.type: expected a name, got {name!r}")
    if name in built_in:
        return built_in[name]
    found = load_plugin("algorithm", name, built_in)
    bases = (LightningRL, SupervisedAlgorithm, PreferenceAlgorithm, PromptAlgorithm)
    if not (isinstance(found, type) and issubclass(found, bases) and dataclasses.is_dataclass(found)):
        raise ConfigError(
            f"algorithm.type: {name!r}: expected a dataclass derived from LightningRL, SupervisedAlgorithm, "
            f"PreferenceAlgorithm or PromptAlgorithm, got {getattr(found, '__name__', type(found).__name__)}"
        )
    if issubclass(found, LightningRL):
        signature = inspect.signature(found.plan)
        try:
            signature.bind(None, [], seed=0, evidence=None, values=None, reference=None)
        except TypeError as cause:
            raise ConfigError(
                f"algorithm.type {name!r}: plan: expected to be callable as (self, groups, seed, evidence, values, "
                f"reference), but its signature is {signature}"
            ) from cause
    return found


def algorithm_class(config: Config) -> type[LightningRL | OfflineAlgorithm]:
    """As `any_class`. ConfigError for a search for prompts."""
    kind = any_class(config)
    if issubclass(kind, PromptAlgorithm):
        raise ConfigError(
            f"algorithm.type: {config.algorithm['type']!r} searches for prompts and trains nothing: run it with agl optimize"
        )
    return kind


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


def algorithm_of(config: Config) -> LightningRL:
    """The configured algorithm of a run that samples. ConfigError where it does not fit the engine or the run."""
    kind = algorithm_class(config)
    if not issubclass(kind, LightningRL):
        raise ConfigError(
            f"algorithm.type: {config.algorithm['type']!r} is not for data.train, expected lightning_rl or a class "
            "derived from LightningRL; it learns from recorded rollouts: name their run with data.from_run"
        )
    algorithm = make_algorithm(config, kind)
    selection(DEFAULT_POLICY, algorithm.agents)  # a predicate that cannot be loaded is found here
    check_credit_inputs(algorithm)
    check_fit(algorithm, config)
    return algorithm


def offline_algorithm(config: Config) -> OfflineAlgorithm:
    """The configured algorithm, or that of a part of a schedule. ConfigError as `algorithm_of`."""
    kind = algorithm_class(config)
    if not issubclass(kind, OfflineAlgorithm):
        raise ConfigError(
            f"algorithm.type: {config.algorithm.get('type', ONLINE)!r} does not learn from recorded rollouts "
            f"(data.from_run); expected one of {', '.join(OFFLINE_ALGORITHMS)}"
        )
    algorithm = make_algorithm(config, kind)
    if config.offline and config.agent.given != (config.data.val is not None):
        missing = "data.val" if config.agent.given else "agent"
        raise ConfigError(f"{missing}: is missing; with data.from_run an agent and held-out tasks go together")
    if not config.data.from_run:
        raise ConfigError(
            f"algorithm.type: {config.algorithm['type']!r} learns from recorded rollouts: name their run with data.from_run"
        )
    selection(DEFAULT_POLICY, algorithm.agents)  # a predicate that cannot be loaded is found here
    check_offline(algorithm, engine_support(config, EngineNeeds(reference=algorithm.needs_reference)))
    return algorithm


def check_offline(algorithm: OfflineAlgorithm, support: Support) -> None:
    """ConfigError where the engine, as configured, cannot do what the algorithm asks for."""
    if isinstance(algorithm, SupervisedAlgorithm):
        check_loss(support, algorithm.loss)
    elif isinstance(algorithm, PreferenceAlgorithm):
        check_preference_loss(support, algorithm.loss([]))


def check_fit(algorithm: LightningRL, config: Config) -> None:
    """ConfigError where the engine, as configured, cannot do what the algorithm asks for."""
    needs = EngineNeeds(reference=algorithm.needs_reference, critic_learning_rate=algorithm.critic_learning_rate)
    support = engine_support(config, needs)
    try:
        check_loss(support, algorithm.loss_terms, old_logprobs=algorithm.old_logprobs)
    except ConfigError as error:
        raise ConfigError(f"algorithm: {error}") from error
    if algorithm.kl_in_reward and not support.reference:
        raise ConfigError(f"algorithm.kl: the engine {support.engine!r} keeps no reference; expected kl = 0")
    if config.trainer.max_staleness and rule_name(algorithm.loss) == "reinforce" and algorithm.correction is None:
        raise ConfigError(
            "algorithm.correction: expected 'importance' with loss = 'reinforce' and trainer.max_staleness above 0, "
            "whose rollouts an older policy sampled, got none"
        )


# --- the algorithms of a run ----------------------------------------------------------------------------------------


def schedules_of(config: Config) -> dict[str, list[ScheduledAlgorithm]]:
    """The algorithms that each policy learns by, with their first steps.

    ConfigError for a setting that is unknown, wrong, or too much for the configured engine, in any part of a schedule.
    """
    schedules: dict[str, list[ScheduledAlgorithm]] = {}
    for alias, own in policy_configs(config).items():
        with of_policy(alias, config):
            schedule = schedules[alias] = list[ScheduledAlgorithm]()
            for number, (start, part) in enumerate(schedule_configs(own)):
                with _of_part(number):
                    offline = issubclass(algorithm_class(part), OfflineAlgorithm)
                    algorithm = offline_algorithm(part) if offline else algorithm_of(part)
                schedule.append(ScheduledAlgorithm(from_step=start, config=part, algorithm=algorithm))
            needs_of(schedule)
            _check_parts(config, schedule)
    sampling = {alias: online_algorithms(schedule) for alias, schedule in schedules.items()}
    check_groups({alias: one[0] for alias, one in sampling.items()})
    check_air(config, [one for every in sampling.values() for one in every])
    return schedules


def check_air(config: Config, algorithms: Sequence[LightningRL]) -> None:
    """ConfigError, or AgentError from a rule of the user's own, where AIR is configured wrongly or would be ignored."""
    load_air(config.air.model_dump())
    if config.air.rules and not any(one.reads_steps for one in algorithms):
        raise ConfigError(
            f"air: has no effect on learning, since credit = {rule_name(algorithms[0].credit)!r} ignores step rewards; take "
            "algorithm.credit = 'step_rewards' or 'gigpo'"
        )


def _check_parts(config: Config, schedule: Sequence[ScheduledAlgorithm]) -> None:
    """ConfigError where parts of a schedule do not go together."""
    sampling = online_algorithms(schedule)
    if not sampling:
        raise ConfigError("algorithm: learns from recorded rollouts alone; leave out data.train")
    if config.data.from_run and len(sampling) == len(schedule):
        raise ConfigError(
            "data.from_run: has no effect beside data.train without a part of algorithm.schedule that "
            f"learns from recorded rollouts: {', '.join(OFFLINE_ALGORITHMS)}"
        )
    samples, ahead = [isinstance(part.algorithm, LightningRL) for part in schedule], config.trainer.max_staleness
    if ahead and (True, False) in pairwise(samples):
        raise ConfigError(
            "trainer.max_staleness: expected 0, since a part of algorithm.schedule that learns from recorded rollouts "
            f"follows one that samples, and no step would take what ran ahead; got {ahead}"
        )
    for one in sampling:
        for what, known, own in (
            ("group_size: groups have one size", sampling[0].group_size, one.group_size),
            ("rollouts: are sampled in one way", _sampled(sampling[0]), _sampled(one)),
        ):
            if own != known:
                raise ConfigError(f"algorithm.schedule: {what} throughout a run, expected {known}, got {own}")
    if sampling[0].tree is not None and ahead:
        raise ConfigError(
            "trainer.max_staleness: expected 0 with algorithm.rollouts = 'tree', whose forks go on with the weights that "
            f"their calls before were sampled by, got {ahead}"
        )


def _sampled(algorithm: LightningRL) -> str:
    tree = algorithm.tree
    return "'independent'" if tree is None else f"'tree' of {tree.roots} roots and {tree.rounds} rounds"


@contextmanager
def _of_part(number: int) -> Iterator[None]:
    """Names the entry of algorithm.schedule in a ConfigError of it."""
    try:
        yield
    except ConfigError as cause:
        if not number:
            raise
        raise ConfigError(f"algorithm.schedule[{number}]: {cause}") from cause


def online_algorithms(schedule: Sequence[ScheduledAlgorithm]) -> list[LightningRL]:
    """The parts that learn from the run's own rollouts."""
    return [part.algorithm for part in schedule if isinstance(part.algorithm, LightningRL)]


def algorithms_of(config: Config) -> dict[str, LightningRL]:
    """The first algorithm of each policy that learns from the run's own rollouts. Raises the errors of `schedules_of`."""
    return {alias: online_algorithms(schedule)[0] for alias, schedule in schedules_of(config).items()}


def needs_of(schedule: Sequence[ScheduledAlgorithm]) -> EngineNeeds:
    """Returns parts that the engine keeps for all of them. ConfigError where they want critics of different rates."""
    rates = {one.critic_learning_rate for one in online_algorithms(schedule)} - {None}
    if len(rates) > 1:
        raise ConfigError(
            "algorithm.schedule: advantage.learning_rate: the parts with a critic share it; expected one rate"
        )
    return EngineNeeds(
        reference=any(part.algorithm.needs_reference for part in schedule),
        critic_learning_rate=next(iter(rates), None),
    )


def inherited(recorded: JSON) -> dict[str, Any]:
    """Tables of an offline run, from the configuration of the run whose rollouts it learns from: its model and engine, of a
    tiny model the learning rate, and the settings that evaluate its agent. Empty where that has no configuration or several
    models."""
    if "model" not in recorded or recorded.get("policies"):
        return {}
    data, trainer, agent = recorded.get("data", {}), recorded.get("trainer", {}), recorded.get("agent", {})
    taken = ["grad_clip", "seed"]
    if (folder := Path(recorded["model"]["path"]).expanduser()).is_dir() and model_size(folder).tiny:
        taken.append("learning_rate")  # of others it goes by the algorithm
    tables: dict[str, Any] = {
        "model": {"path": recorded["model"]["path"]},
        "engine": {name: value for name, value in recorded.get("engine", {}).items() if name != "dropout"},
        "trainer": {name: trainer[name] for name in taken if name in trainer},
        "data": {},
    }
    if data.get("val") is not None and (agent.get("run") or agent.get("command")):
        tables["model"] |= {"max_tokens": recorded["model"].get("max_tokens")}
        tables["data"] = {name: data[name] for name in ("val", "private") if name in data}
        tables["agent"] = {name: value for name, value in agent.items() if name != "on_failure"}
        tables |= {name: recorded[name] for name in ("eval", "external", "limits", "sandbox") if name in recorded}
    return tables


# --- searches for prompts -------------------------------------------------------------------------------------------


def searches(config: Config) -> bool:
    """True where `algorithm.type` names a search for prompts."""
    return issubclass(any_class(config), PromptAlgorithm)


def prompt_algorithm(config: Config) -> PromptAlgorithm:
    """The configured search. ConfigError for another algorithm, an unknown setting, or what a search lacks."""
    kind = any_class(config)
    if not issubclass(kind, PromptAlgorithm):
        raise ConfigError(
            f"algorithm.type: expected a search for prompts, one of {', '.join(PROMPT_ALGORITHMS)}, or file.py:name of "
            f"your own, got {config.algorithm.get('type', ONLINE)!r}; agl train runs the others"
        )
    algorithm, optimize = make_algorithm(config, kind), config.optimize
    if optimize is None:
        raise ConfigError("optimize.model: is required; name the model that writes new texts")
    for name in ("train", "val"):
        if getattr(config.data, name) is None:
            raise ConfigError(
                f"data.{name}: is required to optimize prompts; name training tasks, and held-out ones that choose"
            )
    if config.agent_model is not None and optimize.model == "policy":
        raise ConfigError(f"optimize.model: expected the NAME of an external model, as in {config.model.path!r}")
    if config.policies:
        raise ConfigError("policies: a search for prompts runs one model; expected model.path alone")
    return algorithm
