"""Step record: what one training step of a stored run learned from, as each of its policies saw it, and by which algorithm.

The reward debugger reads steps here. They are read as the trainer reads them: a step that was opened from its list, one that
was not (yet) from what is recorded now. Holds one step in memory, as training did, and writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentlightning.algorithms.credit import Evidence
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.rewards import shaped_air
from agentlightning.algorithms.selection import selection
from agentlightning.config.run import Config
from agentlightning.errors import ConfigError, NotFoundError
from agentlightning.records import FINAL_STATES, ConsumedInputs, Rollout
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.forks import is_apart
from agentlightning.store.scan import find_run, read_rollouts
from agentlightning.trainer.checkpoint import recorded_config
from agentlightning.trainer.credit_inputs import CreditInputReader
from agentlightning.trainer.load_trajectories import DISCARDED, LoadedTrajectories, fixed_inputs, seen_by
from agentlightning.trainer.policies import policy_configs, schedule_configs
from agentlightning.trainer.progress import Silent
from agentlightning.trainer.schedules import algorithm_class, make_algorithm, searches
from agentlightning.training_types import Trajectory

READ_BATCH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One policy's view of a training step."""

    run_id: str
    step: int
    policy: str
    algorithm: LightningRL
    """As the run has it for this step."""
    consumed: bool
    """False where the step was not opened: its rollouts are those enqueued for it that have finished."""
    rollouts: dict[str, Rollout]
    groups: list[list[Trajectory]]
    on_failure: str

    async def evidence(self, store: LightningStore, algorithm: LightningRL) -> Evidence:
        """The inputs of the algorithm's credit rule besides the groups. ConfigError where they are in no store."""
        rule = algorithm.rule
        needs = rule.needs
        if "scores" in needs:
            raise ConfigError(
                f"credit: {rule.name!r} asks a model about every group, and its answers are in no store; expected a "
                "rule of recorded rewards"
            )
        if "fork_returns" in needs and rule != self.algorithm.rule:
            raise ConfigError(
                f"credit: {rule.name!r} needs forks that were sampled for the step; expected a rule of recorded rewards"
            )
        reader = CreditInputReader(
            algorithm=algorithm,
            store=store,
            run_id=self.run_id,
            folder=Path(),  # of a judge's replies, which none of these rules reads
            on_failure="zero" if self.on_failure == "zero" else "drop",
        )
        found, _ = await reader.gather(self.step, self.groups)
        return found


async def read_step(
    store: LightningStore, run_id: str, step: int, policy: str | None = None, consumed: bool = True
) -> StepRecord:
    """The step as this policy saw it; with `consumed` false, the rollouts enqueued for it, whatever was consumed.

    NotFoundError where it has no rollouts; ConfigError for a policy that the run does not train, or where the step learned
    from recorded rollouts.
    """
    config = recorded_config(await find_run(store, run_id))
    alias, own, algorithm = _algorithm(config, policy, step)
    opened = [one for one in await store.steps(run_id, after=step - 1, limit=1) if one.step == step] if consumed else []
    fixed: Mapping[str, ConsumedInputs] = {}
    if opened:
        fixed = fixed_inputs(opened[0])
        rollouts = await _by_id(store, [one.rollout_id for one in opened[0].consumed if one.outcome not in DISCARDED])
    else:
        query = RolloutQuery(run_id=run_id, step=step, mode="train")
        rollouts = [
            one
            async for page in read_rollouts(store, query)
            for one in page
            if one.state in FINAL_STATES - {"cancelled"} and not is_apart(one)
        ]
    if not rollouts:
        raise NotFoundError(f"{run_id}: no rollout of step {step} has finished; see: agl rollouts list {run_id}")
    loaded = LoadedTrajectories(
        store=store,
        selections={alias: selection(alias, algorithm.agents, algorithm.side_calls)},
        on_failure=own.agent.on_failure,
        progress=Silent(),
    )
    await loaded.add(rollouts, fixed)
    groups = seen_by(list(loaded.groups.values()), loaded.selected[alias])
    return StepRecord(
        run_id=run_id,
        step=step,
        policy=alias,
        algorithm=algorithm,
        consumed=bool(opened),
        rollouts={rollout.id: rollout for rollout in rollouts},
        groups=shaped_air(groups, algorithm.call_gamma),
        on_failure=own.agent.on_failure,
    )


def _algorithm(config: Config, policy: str | None, step: int) -> tuple[str, Config, LightningRL]:
    configs = policy_configs(config)
    alias = next(iter(configs)) if policy is None else policy
    if alias not in configs:
        raise ConfigError(f"policy: expected one of {', '.join(configs)}, got {alias!r}")
    parts = schedule_configs(configs[alias])
    part = [one for start, one in parts if start <= max(1, step)][-1]
    if searches(part):  # the weights learn from its rollouts as the first part that samples has it
        part = next(one for _, one in parts if not searches(one) and issubclass(algorithm_class(one), LightningRL))
    kind = algorithm_class(part)
    if not issubclass(kind, LightningRL):
        raise ConfigError(f"step {step}: was trained by {part.algorithm['type']!r}, which gives calls no credit")
    return alias, part, make_algorithm(part, kind)


async def _by_id(store: LightningStore, ids: Sequence[str]) -> list[Rollout]:
    """The rollouts in the order of their ids; those that are gone are left out."""
    found: dict[str, Rollout] = {}
    for start in range(0, len(ids), READ_BATCH):
        part = await store.rollouts(RolloutQuery(ids=ids[start : start + READ_BATCH]))
        found |= {rollout.id: rollout for rollout in part}
    return [found[key] for key in ids if key in found]
