"""Policies: which policies a run trains, each with the configuration that it would have alone, and how they are published.

The trainer, the loop and the check use it. Without ``[policies.NAME]`` tables there is one, `default`, whose configuration
is the run's own. All policies of a run are published together, so that they always have the same version number.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.offline import OfflineAlgorithm
from agentlightning.config.engine import PolicyConfig, trained_policies
from agentlightning.config.run import Config, TrainerConfig, parse_settings
from agentlightning.engines.base import DEFAULT_POLICY, Engine, Metrics
from agentlightning.engines.folders import LEARNER_STATE
from agentlightning.errors import ConfigError
from agentlightning.records import JSON, Resource
from agentlightning.store.base import LightningStore
from agentlightning.trainer.checkpoint import RunFolder, checkpoint_folders
from agentlightning.trainer.checkpoint_files import local_folder

ADDRESS = frozenset({"listen", "advertise"})
OF_LEARNING = (
    *("learner", "optimizer", "lora_rank", "dropout", "packing", "gradient_checkpointing", "max_tokens_per_microbatch"),
    *ADDRESS,
)
"""Settings of [engine] that say how a model learns, or where one sampler listens: whatever is sampled alone has them of
nobody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledAlgorithm:
    """A part of `algorithm.schedule`."""

    from_step: int
    config: Config
    """The policy's, with this part's settings."""
    algorithm: LightningRL | OfflineAlgorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPolicy:
    """One policy that a run trains."""

    config: Config
    """As if it were the run's only one."""
    algorithm: LightningRL
    value: JSON
    """Of its resource: model name, endpoints, tokenizer, seed."""
    schedule: Sequence[ScheduledAlgorithm] = ()
    """The algorithms that it learns by, each with its first step; none: `algorithm` throughout."""

    def entry(self, step: int) -> int:
        """Number of the entry of `algorithm.schedule` that a step is trained by; 0: [algorithm] itself."""
        return max((number for number, one in enumerate(self.schedule) if one.from_step <= step), default=0)

    def at(self, step: int) -> TrainedPolicy:
        """The policy as a step trains it. A step executed again, at any time, gets the same."""
        if not self.schedule:
            return self
        one = self.schedule[self.entry(step)]
        if not isinstance(one.algorithm, LightningRL):
            return self
        return replace(self, config=one.config, algorithm=one.algorithm)

    def offline_at(self, step: int) -> int | None:
        """The entry of a step that learns from recorded rollouts; None: it learns from its own."""
        entry = self.entry(step)
        return entry if self.schedule and isinstance(self.schedule[entry].algorithm, OfflineAlgorithm) else None


def schedule_configs(config: Config) -> list[tuple[int, Config]]:
    """The first step and the configuration of each part of the schedule: [algorithm], then the entries of
    ``[[algorithm.schedule]]``, each of which replaces settings of [algorithm] one by one until the next one.

    An entry of another `type` has none of [algorithm]'s settings.
    ConfigError where an entry is none.
    """
    base = {name: value for name, value in config.algorithm.items() if name != "schedule"}
    found = [(1, config.model_copy(update={"algorithm": base}))]
    entries = config.algorithm.get("schedule", [])
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise ConfigError(f"algorithm.schedule: expected a list of tables, got {entries!r:.80}")
    for number, entry in enumerate(entries, 1):
        where = f"algorithm.schedule[{number}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}: expected a table, got {entry!r:.80}")
        own = dict(entry)
        start = own.pop("from_step", None)
        last = config.trainer.steps
        if not isinstance(start, int) or isinstance(start, bool) or start <= found[-1][0]:
            raise ConfigError(f"{where}.from_step: expected a whole number above {found[-1][0]}, got {start!r}")
        if config.trainer.epochs is None and start > last:
            raise ConfigError(f"{where}.from_step: {start} is never reached: the run has {last} steps")
        if "schedule" in own:
            raise ConfigError(f"{where}.schedule: no such setting; a schedule has one level")
        trainer = config.trainer.model_dump()
        trainer["learning_rate"] = own.pop("learning_rate", trainer["learning_rate"])
        renamed = own.get("type", base.get("type", "lightning_rl")) != base.get("type", "lightning_rl")
        changes = {
            "algorithm": own if renamed else base | own,
            "trainer": parse_settings(TrainerConfig, trainer, where, "."),
        }
        found.append((start, config.model_copy(update=changes)))
    return found


def policy_configs(config: Config) -> dict[str, Config]:
    """By alias, the configuration of each trained policy as if it were alone; none where agents ask an external model.

    A policy's own algorithm and engine settings replace those of the run one by one. ConfigError, with the policy's name,
    where the result is none.
    """
    if "schedule" in config.algorithm and not config.algorithm["schedule"]:
        raise ConfigError("algorithm.schedule: expected at least one entry; leave it out")
    if config.agent_model is not None:
        return {}
    if not config.policies:
        return {DEFAULT_POLICY: config}
    found = {}
    for alias, own in trained_policies(config.policies).items():
        table = config.model_dump(mode="json")
        table["policies"], table["external"], table["limits"] = {}, {}, {}  # the run's affair
        table["model"]["path"] = own.model or config.model.path
        table["algorithm"] |= own.algorithm
        table["engine"] |= own.engine
        if own.learning_rate is not None:
            table["trainer"]["learning_rate"] = own.learning_rate
        found[alias] = parse_settings(Config, table, f"policies.{alias}")
    return found


def opponent_configs(config: Config) -> dict[str, Config]:
    """By alias, the configuration by which each policy that is never trained is sampled.

    Its engine has the settings of [engine] that are not of learning, those of the policy that it is a snapshot of where it
    is one, and its own. ConfigError where the result is none.
    """
    found = {}
    for alias, own in config.policies.items():
        if own.trains:
            continue
        if ignored := sorted(own.engine.keys() & {*OF_LEARNING} - ADDRESS):
            raise ConfigError(f"policies.{alias}.engine.{ignored[0]}: has no effect on a policy that is never trained")
        base = config if own.snapshot_of is None else policy_configs(config)[own.snapshot_of]
        table = sampling_table(base, own.engine)
        table["model"]["path"] = own.model or base.model.path
        table["policies"], table["external"], table["limits"] = {}, {}, {}  # the run's affair
        found[alias] = parse_settings(Config, table, f"policies.{alias}")
    return found


def sampling_table(trained: Config, engine: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a trained policy as one of an engine that samples alone; `engine` replaces its settings."""
    table = trained.model_dump(mode="json")
    kept = {key: value for key, value in table["engine"].items() if key not in OF_LEARNING}
    if "weights" in kept["sampler"]:
        kept["sampler"] = {**kept["sampler"], "weights": "reload"}
    return table | {"engine": kept | dict(engine)}


def with_models(config: Config, folders: Mapping[str, Path]) -> Config:
    """The configuration with the models of a checkpoint, as `checkpoint.policies_in` finds them."""
    if not config.policies:
        return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folders[""])})})
    trained = trained_policies(config.policies)
    if len(trained) == 1:
        folders = dict.fromkeys(trained, folders[""])
    policies = {
        alias: one.model_copy(update={"model": str(folders[alias])}) if one.trains else one
        for alias, one in config.policies.items()
    }
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
    """ConfigError where the policies want different groups: every rollout is every policy's."""
    (first, one), *others = algorithms.items()
    for alias, other in others:
        if other.group_size != one.group_size:
            raise ConfigError(
                f"policies.{alias}.algorithm.group_size: expected {one.group_size} as for {first!r}, since they learn from "
                f"the same rollouts, got {other.group_size}"
            )
        if other.tree != one.tree:
            raise ConfigError(
                f"policies.{alias}.algorithm.rollouts: expected what {first!r} has, and the same tree, since they learn "
                "from the same rollouts"
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


@dataclass(kw_only=True)
class Opponents:
    """The policies of a run that are never trained."""

    settings: Mapping[str, PolicyConfig]
    """By alias: the opponents' alone."""
    values: Mapping[str, JSON]
    """Values of their resources, by alias."""
    trained: Sequence[str]
    """Aliases of the policies that are trained."""
    seed: int
    folder: RunFolder
    store: LightningStore
    engine: Engine
    _serving: dict[str, int | None] = field(default_factory=dict)
    """By alias: the step of the checkpoint whose weights it samples; None: the weights that it started with."""

    async def serve(self, step: int) -> None:
        """Has each opponent sample the weights that agents meet from `step` on."""
        for alias, own in self.settings.items():
            snapshots = {} if own.snapshot_of is None else await self._snapshots(step, own.snapshot_of, own.window)
            drawn = random.Random(f"{self.seed} {alias} {step}").choice(sorted(snapshots)) if snapshots else None
            if alias in self._serving and drawn in (None, self._serving[alias]):  # None: it goes on with what it has
                continue
            if drawn is not None:
                await self.engine.load(snapshots[drawn], alias)
            value = self.values[alias] | ({} if own.snapshot_of is None else {"snapshot_step": drawn or 0})
            named = Resource(run_id=self.folder.run_id, name=alias, kind="policy", value=value, step=step)
            [published] = await self.store.put_resources([named])
            if drawn is not None:
                await self.engine.publish(published.version, alias)
            self._serving[alias] = drawn

    def metrics(self) -> Metrics:
        """By path, the step of the checkpoint that each snapshot samples."""
        return {
            f"policies/{alias}/policy/snapshot_step": float(self._serving.get(alias) or 0)
            for alias, own in self.settings.items()
            if own.snapshot_of is not None
        }

    async def _snapshots(self, step: int, policy: str, window: int) -> dict[int, Path]:
        """The policy's folders in the latest checkpoints of earlier steps, by their steps, as far as they are here."""
        found = {}
        for checkpoint in await self.store.checkpoints(self.folder.run_id):
            folder = checkpoint_folders(local_folder(checkpoint, self.folder), self.trained)[policy]
            if 0 < checkpoint.step < step and await asyncio.to_thread((folder / LEARNER_STATE).exists):
                found[checkpoint.step] = folder
        return dict(sorted(found.items())[-window:])
