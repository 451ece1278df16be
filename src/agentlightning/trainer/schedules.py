"""Schedules of algorithms: which algorithm each policy learns by, from which step on, and whether they go together.

`training.py` and `check.py` drive it. It reads a configuration and starts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.offline import OfflineAlgorithm
from agentlightning.algorithms.selection import selection
from agentlightning.algorithms.settings import name_of
from agentlightning.config.run import Config
from agentlightning.engines.base import DEFAULT_POLICY
from agentlightning.engines.setup import EngineNeeds
from agentlightning.errors import ConfigError
from agentlightning.runner.air import load_air
from agentlightning.trainer.credit_inputs import check_credit_inputs
from agentlightning.trainer.offline.settings import (
    OFFLINE_ALGORITHMS,
    algorithm_class,
    check_offline,
    make_algorithm,
    offline_algorithm,
)
from agentlightning.trainer.policies import (
    ScheduledAlgorithm,
    check_groups,
    of_policy,
    policy_configs,
    schedule_configs,
)
from agentlightning.trainer.processes import engine_support
from agentlightning.trainer.step import check_fit


def schedules_of(config: Config) -> dict[str, list[ScheduledAlgorithm]]:
    """The algorithms that each policy learns by, with their first steps.

    ConfigError for a setting that is unknown, wrong, without effect, or too much for the configured engine, in any part of
    a schedule.
    """
    schedules: dict[str, list[ScheduledAlgorithm]] = {}
    for alias, own in policy_configs(config).items():
        with of_policy(alias, config):
            schedules[alias] = []
            for number, (start, part) in enumerate(schedule_configs(own)):
                with of_part(number):
                    algorithm = _checked(part)
                scheduled = ScheduledAlgorithm(from_step=start, config=part, algorithm=algorithm)
                if number and scheduled.trains_as(schedules[alias][-1]):
                    raise ConfigError(
                        f"algorithm.schedule[{number}]: expected settings that differ from those of the steps before it"
                    )
                schedules[alias].append(scheduled)
            needs_of(schedules[alias])
            _check_parts(config, schedules[alias])
    sampling = {alias: online_algorithms(schedule) for alias, schedule in schedules.items()}
    check_groups({alias: one[0] for alias, one in sampling.items()})
    check_air(config, {f"{alias} {number}": one for alias, all_ in sampling.items() for number, one in enumerate(all_)})
    return schedules


def check_air(config: Config, algorithms: Mapping[str, LightningRL]) -> None:
    """ConfigError, or AgentError from a rule of the user's own, where AIR is configured wrongly or would be ignored."""
    load_air(config.air.model_dump())
    if config.air.rules and not any(one.reads_steps for one in algorithms.values()):
        credit = name_of(next(iter(algorithms.values())).credit)
        raise ConfigError(
            f"air: has no effect on learning, since credit = {credit!r} ignores step rewards; take algorithm.credit = "
            "'step_rewards' or 'gigpo'"
        )


def _checked(part: Config) -> LightningRL | OfflineAlgorithm:
    if issubclass(algorithm_class(part), OfflineAlgorithm):
        offline = offline_algorithm(part)
        check_offline(offline, engine_support(part, EngineNeeds(reference=offline.needs_reference)))
        return offline
    algorithm = algorithm_of(part)
    check_fit(algorithm, part)
    return algorithm


def _check_parts(config: Config, schedule: Sequence[ScheduledAlgorithm]) -> None:
    """ConfigError where parts of a schedule do not go together."""
    sampling = online_algorithms(schedule)
    if not sampling:
        raise ConfigError("algorithm: learns from recorded rollouts alone; leave out data.train")
    if config.optimize is not None:
        raise ConfigError("optimize: has no effect on training; agl optimize searches for prompts")
    if config.data.from_run and len(sampling) == len(schedule):
        raise ConfigError(
            "data.from_run: has no effect beside data.train without a part of algorithm.schedule that "
            f"learns from recorded rollouts: {', '.join(OFFLINE_ALGORITHMS)}"
        )
    samples = [not isinstance(part.algorithm, OfflineAlgorithm) for part in schedule]
    if config.trainer.max_staleness and (True, False) in pairwise(samples):
        raise ConfigError(
            "trainer.max_staleness: expected 0, since a part of algorithm.schedule that learns from recorded rollouts "
            f"follows one that samples, and no step would take what ran ahead; got {config.trainer.max_staleness}"
        )
    for one in sampling:
        if one.group_size != sampling[0].group_size:
            raise ConfigError(
                "algorithm.schedule: group_size: groups have one size throughout a run, expected "
                f"{sampling[0].group_size}, got {one.group_size}"
            )
        if one.tree != sampling[0].tree:
            raise ConfigError(
                "algorithm.schedule: rollouts: are sampled in one way throughout a run, expected "
                f"{_sampled(sampling[0])}, got {_sampled(one)}"
            )
    if sampling[0].tree is not None:
        _check_trees(config)


def _check_trees(config: Config) -> None:
    """ConfigError for what cannot be beside rollouts that are sampled as trees, in rounds that wait for each other."""
    if config.trainer.max_staleness:
        raise ConfigError(
            "trainer.max_staleness: expected 0 with algorithm.rollouts = 'tree', whose forks go on with the weights that "
            f"their calls before were sampled by, got {config.trainer.max_staleness}"
        )


def _sampled(algorithm: LightningRL) -> str:
    tree = algorithm.tree
    return "'independent'" if tree is None else f"'tree' of {tree.roots} roots and {tree.rounds} rounds"


def online_algorithms(schedule: Sequence[ScheduledAlgorithm]) -> list[LightningRL]:
    """The parts that learn from the run's own rollouts."""
    return [part.algorithm for part in schedule if isinstance(part.algorithm, LightningRL)]


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


@contextmanager
def of_part(number: int) -> Iterator[None]:
    """Names the entry of algorithm.schedule in a ConfigError of it."""
    try:
        yield
    except ConfigError as cause:
        if not number:
            raise
        raise ConfigError(f"algorithm.schedule[{number}]: {cause}") from cause


def algorithms_of(config: Config) -> dict[str, LightningRL]:
    """The first algorithm of each policy that learns from the run's own rollouts. Raises the errors of `schedules_of`."""
    return {alias: online_algorithms(schedule)[0] for alias, schedule in schedules_of(config).items()}


def algorithm_of(config: Config) -> LightningRL:
    """The configured algorithm. ConfigError for an unknown name or setting."""
    kind = algorithm_class(config)
    if not issubclass(kind, LightningRL):
        raise ConfigError(
            f"algorithm.type: {config.algorithm['type']!r} is not for data.train, expected lightning_rl or a class "
            "derived from LightningRL; it learns from recorded rollouts: name their run with data.from_run"
        )
    algorithm = make_algorithm(config, kind)
    selection(DEFAULT_POLICY, algorithm.agents)  # a predicate that cannot be loaded is found here
    check_credit_inputs(algorithm)
    return algorithm
