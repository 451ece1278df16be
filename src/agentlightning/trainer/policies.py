"""Policies: which policies a run trains, each with the configuration that it would have alone, and how they are published.

The trainer, the loop and the check use it. Without ``[policies.NAME]`` tables there is one, `default`, whose configuration
is the run's own. All policies of a run are published together, so that they always have the same version number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.config import Config, parse_settings
from agentlightning.engines.base import DEFAULT_POLICY, Engine
from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStore
from agentlightning.types import JSON, Resource


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPolicy:
    """One policy that a run trains."""

    config: Config
    """As if it were the run's only one."""
    algorithm: LightningRL
    value: JSON
    """Of its resource: model name, endpoints, tokenizer, seed."""


def policy_configs(config: Config) -> dict[str, Config]:
    """By alias, the configuration of each policy as if it were alone.

    A policy's own algorithm and engine settings replace those of the run one by one. ConfigError, with the policy's name,
    where the result is none.
    """
    if not config.policies:
        return {DEFAULT_POLICY: config}
    found = {}
    for alias, own in config.policies.items():
        table = config.model_dump(mode="json")
        table["policies"], table["external"] = {}, {}  # whose names are the run's affair
        table["model"]["path"] = own.model or config.model.path
        table["algorithm"] |= own.algorithm
        table["engine"] |= own.engine
        if own.learning_rate is not None:
            table["trainer"]["learning_rate"] = own.learning_rate
        found[alias] = parse_settings(Config, table, f"policies.{alias}")
    return found


def with_models(config: Config, folders: Mapping[str, Path]) -> Config:
    """The configuration with the models of a checkpoint, as `checkpoint.policies_in` finds them."""
    if not config.policies:
        return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folders[""])})})
    if len(config.policies) == 1:
        folders = dict.fromkeys(config.policies, folders[""])
    policies = {alias: one.model_copy(update={"model": str(folders[alias])}) for alias, one in config.policies.items()}
    return config.model_copy(update={"policies": policies})


@contextmanager
def of_policy(alias: str, config: Config) -> Iterator[None]:
    """Names the policy in a ConfigError where a run has several."""
    try:
        yield
    except ConfigError as cause:
        if not config.policies:
            raise
        raise ConfigError(f"policies.{alias}: {cause}") from cause


def check_groups(algorithms: Mapping[str, LightningRL]) -> None:
    """ConfigError where the policies want groups of different sizes: every rollout is every policy's."""
    (first, one), *others = algorithms.items()
    for alias, other in others:
        if other.group_size != one.group_size:
            raise ConfigError(
                f"policies.{alias}.algorithm.group_size: expected {one.group_size} as for {first!r}, since they learn from "
                f"the same rollouts, got {other.group_size}"
            )


async def publish(
    store: LightningStore, engine: Engine, run_id: str, values: Mapping[str, JSON], step: int, parent: int | None
) -> Sequence[Resource]:
    """Serve the current weights of all policies under a version number that was never used; their new resources."""
    resources = await store.put_resources(
        [
            Resource(run_id=run_id, name=alias, kind="policy", value=value, parent=parent, step=step)
            for alias, value in values.items()
        ]
    )
    for resource in resources:
        await engine.publish(resource.version, resource.name)
    return resources
