"""Step: what the policies of a run learn from a training step's rollouts, and the updates that follow.

The training loop drives it: `load`, `plan`, then `update`. Each policy sees the whole rollouts and learns from its own
calls, by its own algorithm. With several policies, metrics of one stand under ``policies/ALIAS/``. The same rollouts, step
and weights give the same plans and updates, so a step can be executed again after a crash.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from pathlib import Path
from statistics import fmean
from typing import Any

from agentlightning.adapters.sequences import PerToken, by_call, merge
from agentlightning.adapters.trajectories import final_rewards
from agentlightning.algorithms.credit import Evidence
from agentlightning.algorithms.critic import Values
from agentlightning.algorithms.lightning_rl import LightningRL, UpdatePlan
from agentlightning.algorithms.plugins import own_code
from agentlightning.algorithms.rewards import shaped_air, without_rounding
from agentlightning.algorithms.selection import CallSignal, own_groups, selection
from agentlightning.engines.base import SKIPPED, Engine, Metrics
from agentlightning.errors import AgentError, InputError, NoCallsError, RewardError
from agentlightning.records import CallCredit, Outcome, Reward, Rollout
from agentlightning.store.base import CREDIT_STEPS, LightningStore
from agentlightning.store.codec import portions
from agentlightning.store.rules import MAX_REWARD
from agentlightning.trainer.credit_inputs import CreditInputReader
from agentlightning.trainer.load_trajectories import LoadedTrajectories, seen_by
from agentlightning.trainer.monitor.metrics import path_of
from agentlightning.trainer.policies import TrainedPolicy
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.scheduler import RolloutCollector, Staleness, TreeTally
from agentlightning.training_types import Loss, TokenNumbers, TrainingSequence, Trajectory

RowNumbers = dict[tuple[str, int], TokenNumbers]
"""By `named_rows`: the loss's ratios, and the entropies, in the first update that trained the row."""


async def update_policy(
    engine: Engine,
    policy: str,
    trained: TrainedPolicy,
    plan: UpdatePlan,
    learning_rate: float,
    progress: Progress,
    numbers: RowNumbers | None = None,
) -> Metrics:
    """Executes the plan; returns means over its updates. `numbers`, where given, gets those that the engine reports."""
    updates: list[Metrics] = []
    minibatches = await _with_logprobs(engine, policy, trained.algorithm, plan.minibatches)
    for number, minibatch in enumerate(minibatches):
        progress.phase("learn", number, len(minibatches))
        update = await engine.forward_backward(minibatch, plan.loss, policy)
        rows = named_rows(minibatch)
        if numbers is not None and not rows.keys() <= numbers.keys():  # later epochs train the same rows again
            numbers |= zip(rows, await engine.token_numbers(policy), strict=True)
        updates.append(update | await engine.optim_step(learning_rate, trained.config.trainer.grad_clip, policy))
    return _over_updates(updates)


async def values_by_call(
    forward: Callable[[Sequence[TrainingSequence], str], Awaitable[list[list[float]]]],
    policy: str,
    groups: Sequence[Sequence[Trajectory]],
) -> Values:
    """A number of every sampled token, by call: the critic's values or the reference's logprobs."""
    found: dict[str, list[float]] = {}
    for group in groups:
        rows = []
        for trajectory in group:
            calls, count = trajectory.transitions, len(trajectory.transitions)
            rows.append(merge(trajectory.rollout_id, calls, range(count), [0.0] * count))
        values = iter(await forward([row for of_rollout in rows for row in of_rollout], policy))
        for trajectory, of_rollout in zip(group, rows, strict=True):
            by_transition = by_call(of_rollout, [next(values) for _ in of_rollout])
            found |= zip((call.call_id for call in trajectory.transitions), by_transition, strict=True)
    return found


async def _with_logprobs(
    engine: Engine, policy: str, algorithm: LightningRL, minibatches: list[list[TrainingSequence]]
) -> list[list[TrainingSequence]]:
    """The minibatches with the trainer's own and the reference's logprobs from before the first update, where the loss
    asks for them."""
    passes = {}
    if algorithm.old_logprobs:
        passes["old_logprobs"] = engine.logprobs
    if algorithm.loss_terms.kl:
        passes["ref_logprobs"] = engine.reference_logprobs
    if not passes:
        return minibatches
    known: dict[tuple[str, int], dict[str, Any]] = {}
    named = [named_rows(minibatch) for minibatch in minibatches]
    for minibatch in named:  # of one epoch alone: the next ones hold the same rows
        rows = {name: row for name, row in minibatch.items() if name not in known}
        for column, forward in passes.items():
            numbers = await forward(list(rows.values()), policy) if rows else []
            for name, of_row in zip(rows, numbers, strict=True):
                known.setdefault(name, {})[column] = of_row
    return [[replace(row, **known[name]) for name, row in minibatch.items()] for minibatch in named]


def named_rows(rows: Sequence[TrainingSequence]) -> dict[tuple[str, int], TrainingSequence]:
    """Rows by rollout and place among its rows: the same in every epoch, since a rollout is never split."""
    counts: defaultdict[str, int] = defaultdict(int)
    named = {}
    for row in rows:
        named[row.rollout_id, counts[row.rollout_id]] = row
        counts[row.rollout_id] += 1
    return named


def _over_updates(updates: Sequence[Metrics]) -> Metrics:
    """Means over the optimizer updates of a step that were made; the largest ratio, and sums of the tokens that the learner
    computed and of the updates that it skipped.

    sampler_gap is the divergence from the sampler before the first update, when only their arithmetic and stale weights
    set them apart.
    """
    made = [update for update in updates if SKIPPED.keys().isdisjoint(update)]
    merged: Metrics = {"updates": float(len(made))}
    for name in {name for update in made for name in update} - {"tokens"}:
        values = [update[name] for update in made if name in update]
        merged[name] = float(max(values) if name == "ratio_max" else statistics.fmean(values))
    for name in ("learner_tokens", *SKIPPED):
        if any(name in update for update in updates):
            merged[name] = sum(update.get(name, 0.0) for update in updates)
    if made and "kl" in made[0]:
        merged["sampler_gap"] = made[0]["kl"]
    return merged


_STALE: Outcome = "stale"
SUMS = ("tokens_sampled", "tokens_trained", "sequences")
"""Metrics that mean something as the sum over all policies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The updates of a training step."""

    plans: Mapping[str, UpdatePlan]
    """By policy."""
    metrics: Metrics
    """Of the rollouts and of the plans."""
    outcomes: dict[str, Outcome]
    """By rollout that has a trajectory."""
    resample: list[str]
    """Groups without a signal, where the algorithms want others sampled in their place."""
    numbers: dict[str, RowNumbers] = field(default_factory=dict)
    """By policy, once the updates are executed: numbers of the tokens, where the engine was asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlanner:
    """Plans and executes the updates of a run's policies."""

    policies: Mapping[str, TrainedPolicy]
    """By alias; at least one."""
    run_id: str
    folder: Path
    store: LightningStore
    engine: Engine
    progress: Progress
    learning_rate: float
    """Of a policy that has no rate of its own, at its full height."""
    collector: RolloutCollector | None = None
    """Waits for the rollouts that a credit rule asks for; None where none is trained by such a rule."""
    asks_numbers: bool = False
    """True where the engine is asked for the ratios and entropies of the tokens that it trains."""

    def at(self, step: int) -> StepPlanner:
        """The planner of a step, whose policies learn as their schedules have it."""
        return replace(self, policies={alias: own.at(step) for alias, own in self.policies.items()})

    def load(self) -> LoadedTrajectories:
        """The trajectories of a step, to which its rollouts are added."""
        first = next(iter(self.policies.values()))
        one = first.config
        return LoadedTrajectories(
            store=self.store,
            selections={
                alias: selection(alias, own.algorithm.agents, own.algorithm.side_calls)
                for alias, own in self.policies.items()
            },
            on_failure=one.agent.on_failure,
            progress=self.progress,
            air_rules=one.air.rules,
            trees=TreeTally() if first.algorithm.tree is not None else None,
        )

    async def plan(
        self,
        step: int,
        loaded: LoadedTrajectories,
        staleness: Staleness | None = None,
        only: Collection[str] | None = None,
    ) -> StepPlan:
        """The plan for these trajectories, those that are not too stale; with `only`, for the groups of these ids alone.

        NoCallsError where none of the first step has a call that a policy learns from.
        """
        self._check_selected(step, loaded)
        groups = [group for name, group in loaded.groups.items() if only is None or name in only]
        metrics = loaded.metrics()
        stale: list[str] = []
        if staleness is not None:
            groups, stale, ages = staleness.sort(groups)
            metrics |= ages
        plans: dict[str, UpdatePlan] = {}
        for alias in self.policies:
            plans[alias], found = await self.plan_policy(alias, step, seen_by(groups, loaded.selected[alias]))
            metrics |= self._named(alias, found | plans[alias].stats)
        outcomes = joint_outcomes([plan.outcomes for plan in plans.values()]) | dict.fromkeys(stale, _STALE)
        if len(plans) > 1:
            metrics |= _over_all(groups, plans)
        return StepPlan(plans=plans, metrics=metrics, outcomes=outcomes, resample=self._resample(plans))

    async def plan_policy(
        self, alias: str, step: int, groups: Sequence[Sequence[Trajectory]]
    ) -> tuple[UpdatePlan, Metrics]:
        """One policy's updates for these groups, and the metrics of what its credit rule asked for."""
        config, algorithm = self.policies[alias].config, self.policies[alias].algorithm
        groups = shaped_air(groups, algorithm.call_gamma)
        inputs, cost = Evidence(), Metrics()
        if algorithm.rule.needs:
            reader = CreditInputReader(
                algorithm=algorithm,
                store=self.store,
                run_id=self.run_id,
                folder=self.folder / "judge",
                on_failure=config.agent.on_failure,
                collector=self.collector,
                progress=self.progress,
            )
            inputs, cost = await reader.gather(step, groups)
        own, engine = own_groups(groups), self.engine
        values = await values_by_call(engine.values, alias, own) if algorithm.critic else None
        reference = await values_by_call(engine.reference_logprobs, alias, own) if algorithm.kl_in_reward else None
        seed = config.trainer.seed * 1_000_003 + step
        plan, left_out = plan_groups(algorithm, groups, seed=seed, evidence=inputs, values=values, reference=reference)
        if left_out is not None:
            self.progress.note(f"step {step}: {left_out}")
        return plan, cost

    async def update(self, plan: StepPlan, learning_rate: float) -> Metrics:
        """Executes the plans, those of several policies side by side; returns means over each one's updates.

        learning_rate: in this step, of a policy that has no rate of its own; the others follow the same schedule.
        """
        if self.asks_numbers:
            plan.numbers.update({alias: {} for alias in self.policies})
        done = await asyncio.gather(
            *(
                update_policy(
                    self.engine,
                    alias,
                    own,
                    plan.plans[alias],
                    self._rate(own, learning_rate),
                    self.progress,
                    plan.numbers.get(alias),
                )
                for alias, own in self.policies.items()
            ),
            return_exceptions=True,  # a learner that is lost must not leave another in the middle of an update
        )
        metrics: Metrics = {}
        for (alias, own), updates in zip(self.policies.items(), done, strict=True):
            if isinstance(updates, BaseException):
                raise updates
            metrics |= self._named(alias, updates | {"learning_rate": self._rate(own, learning_rate)})
        return metrics

    async def success(self, name: str, rollouts: Sequence[Rollout]) -> Metrics:
        """Returns the mean reward of each policy that has rewards of its own, over an evaluation; one policy alone has none.

        A policy's success is the mean of its weighted rewards, as `algorithm.reward_weights` says; a reward that is
        missing counts as 0.
        """
        weights = {alias: own.algorithm.reward_weights for alias, own in self.policies.items()}
        if len(weights) == 1 or not any(weights.values()):
            return {}
        attempts = {rollout.id: rollout.attempt for rollout in rollouts if rollout.state == "succeeded"}
        told: dict[str, list[Reward]] = {rollout_id: [] for rollout_id in attempts}
        for reward in await self.store.rewards(list(attempts)):
            if reward.attempt == attempts[reward.rollout_id]:
                told[reward.rollout_id].append(reward)
        finals = [final_rewards(rewards) for rewards in told.values()]
        return {
            path_of(f"{name}/reward_mean", policy): sum(
                one.get(key, 0.0) * weight for one in finals for key, weight in own.items()
            )
            / sum(rollout.judged for rollout in rollouts)
            for policy, own in weights.items()
            if own
        }

    def _check_selected(self, step: int, loaded: LoadedTrajectories) -> None:
        idle = [policy for policy, calls in loaded.selected.items() if not calls]
        if not idle or not loaded.groups:
            return
        names = ", ".join(sorted(loaded.names)) or "none"
        wanted = {policy: self.policies[policy].algorithm.agents for policy in idle}
        which = "; ".join(
            f"policy {policy!r}" + (f" with agents = {list(agents)}" if agents is not None else "")
            for policy, agents in wanted.items()
        )
        sentence = f"no call of this step is learned from by {which}; agents and models of its calls: {names}"
        if len(idle) == len(self.policies) and step == 1:  # later, it is its agents that call themselves otherwise
            raise NoCallsError(sentence)
        self.progress.note(sentence)

    def _resample(self, plans: Mapping[str, UpdatePlan]) -> list[str]:
        """The groups without a signal for any policy with dynamic sampling."""
        asking = [plan.resample for policy, plan in plans.items() if self.policies[policy].algorithm.dynamic_sampling]
        return [group for group in asking[0] if all(group in others for others in asking)] if asking else []

    def _named(self, policy: str, metrics: Metrics) -> Metrics:
        several = policy if len(self.policies) > 1 else ""
        return {path_of(name, several): value for name, value in metrics.items()}

    def _rate(self, own: TrainedPolicy, learning_rate: float) -> float:
        """The policy's own rate, on the schedule of the run's."""
        return learning_rate * own.config.trainer.peak_learning_rate / self.learning_rate


UNPLANNABLE = (ArithmeticError, ValueError, InputError, AgentError)
"""Errors that the numbers of one group may be the cause of, also in code of the user's own."""


def plan_groups(
    algorithm: LightningRL, groups: Sequence[Sequence[Trajectory]], **inputs: Any
) -> tuple[UpdatePlan, str | None]:
    """The plan for the groups that can be planned, and a sentence about the others: what a rollout recorded must not end
    the run here, and at each resume again. `inputs` are those of `LightningRL.plan`.

    Raises the error where no group can be planned and it is not their rewards' fault.
    """

    def plan(groups: Sequence[Sequence[Trajectory]]) -> UpdatePlan:
        with own_code(algorithm):
            found = algorithm.plan(groups, **inputs)
            if not isinstance(found, UpdatePlan):
                raise TypeError(f"plan: expected an UpdatePlan, got {type(found).__name__}")
        rows = [row for minibatch in found.minibatches for row in minibatch]
        if not all(math.isfinite(sum(row.advantages) + sum(row.returns or ())) for row in rows):
            raise ArithmeticError("an advantage is not a finite number")
        return found

    try:
        return plan(groups), None
    except UNPLANNABLE as error:
        broken = [group for group in groups if _fails(plan, group)] or groups
        if not groups or (len(broken) == len(groups) and not isinstance(error, ArithmeticError | RewardError)):
            raise
        sentence = f"{len(broken)} groups cannot be planned and are left out, {broken[0][0].group_id} first: {error}"
    names = {group[0].group_id for group in broken}
    found = plan([group for group in groups if group[0].group_id not in names])
    outcomes: dict[str, Outcome] = {one.rollout_id: "invalid" for group in broken for one in group}
    lost = found.stats.get("unrewarded", 0.0) + len(outcomes)
    return replace(
        found,
        outcomes=found.outcomes | outcomes,
        resample=[*found.resample, *sorted(names)] if algorithm.dynamic_sampling else found.resample,
        stats=found.stats | {"unrewarded": lost},
    ), sentence


def _fails(plan: Callable[[Sequence[Sequence[Trajectory]]], UpdatePlan], group: Sequence[Trajectory]) -> bool:
    try:
        plan([group])
    except UNPLANNABLE:
        return True
    return False


def joint_outcomes(outcomes: Sequence[Mapping[str, Outcome]]) -> dict[str, Outcome]:
    """The outcome of each rollout over all policies: the best that any of them has for it.

    >>> joint_outcomes([{"a": "zero_variance", "b": "invalid"}, {"a": "trained", "b": "zero_variance"}])
    {'a': 'trained', 'b': 'zero_variance'}
    """
    joint: dict[str, Outcome] = {}
    for of_policy in outcomes:
        for rollout_id, outcome in of_policy.items():
            known = joint.get(rollout_id)
            if known is None or _WORTH.index(outcome) > _WORTH.index(known):
                joint[rollout_id] = outcome
    return joint


_WORTH: tuple[Outcome, ...] = ("invalid", "zero_variance", "trained")


def _over_all(groups: Sequence[Sequence[Trajectory]], plans: Mapping[str, UpdatePlan]) -> Metrics:
    """reward_mean and groups_with_signal of the rollouts' own final rewards, turns of all policies, and sums over them."""
    rewards = [without_rounding([one.reward for one in group if abs(one.reward) <= MAX_REWARD]) for group in groups]
    flat = [reward for group in rewards for reward in group]
    turns = [len(one.transitions) for group in groups for one in group]
    return {
        "reward_mean": statistics.fmean(flat) if flat else 0.0,
        "groups_with_signal": statistics.fmean(len(set(group)) > 1 for group in rewards) if rewards else 0.0,
        "turns": statistics.fmean(turns) if turns else 0.0,
        **{name: sum(plan.stats[name] for plan in plans.values()) for name in SUMS},
    }


MAX_PORTION_BYTES = 1 << 20
"""About the size of one request: others are served between two."""
CALL_BYTES, TOKEN_BYTES = 300, 27
"""On the way to the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRecorder:
    """Records one run's credit, of its latest steps."""

    store: LightningStore
    run_id: str
    keep_steps: int = CREDIT_STEPS

    async def record(self, step: int, plans: Mapping[str, UpdatePlan], numbers: Mapping[str, RowNumbers]) -> None:
        """By policy: the step's plans, and the ratios and entropies that the engine reported."""
        found = (
            credit
            for policy, plan in plans.items()
            for credit in call_credits(plan, numbers.get(policy, {}), self.run_id, step, policy)
        )
        for portion in portions(found, _size, MAX_PORTION_BYTES):
            await self.store.record_credit(portion)
        await self.store.drop_credit(self.run_id, step + 1 - self.keep_steps)


def call_credits(plan: UpdatePlan, numbers: RowNumbers, run_id: str, step: int, policy: str) -> Iterator[CallCredit]:
    """The credit of every call of the plan; calls with a number that is not finite are left out."""
    trained = _trained(plan.minibatches, numbers)
    for signal in plan.calls:
        part, per_token = trained.get(signal.call.call_id), signal.advantages
        if isinstance(per_token, int | float):
            per_token = [float(per_token)] * len(signal.call.sampled_ids)
        credit = CallCredit(
            run_id=run_id,
            step=step,
            rollout_id=signal.rollout_id,
            call_id=signal.call.call_id,
            policy=policy,
            credit=signal.credit,
            advantage=mean_over_call(signal.advantages, signal),
            return_=None if signal.returns is None else mean_over_call(signal.returns, signal),
            weight=0.0 if part is None else math.fsum(part.weights),
            trained_tokens=0 if part is None else sum(part.mask),
            token_advantages=list(per_token),
            token_ratios=[] if part is None else part.ratios or [],
            token_entropies=[] if part is None else part.entropies or [],
            clip_share=None if part is None else clip_share(plan.loss, part),
        )
        scalars = credit.credit, credit.advantage, credit.return_ or 0.0, credit.weight
        if all(map(math.isfinite, scalars)):
            yield credit


def mean_over_call(value: PerToken, signal: CallSignal) -> float:
    """Returns the mean over the trained tokens; of a call that was forced as a whole, over all."""
    if isinstance(value, int | float):
        return float(value)
    return fmean([*compress(value, signal.call.mask)] or [*value] or [0.0])


@dataclass(frozen=True, slots=True)
class TrainedCall:
    """One call's part of the row that an update trained; every list has one entry per sampled token."""

    mask: list[bool]
    advantages: list[float]
    weights: list[float]
    ratios: list[float] | None
    entropies: list[float] | None = None


def clip_share(loss: Loss, call: TrainedCall) -> float | None:
    """Share of the trained tokens whose gradient the loss cut; None where it cuts none, or the ratios are not known.

    The rules are those of engines/losses.py. Bounds 0.2 and 0.28, A > 0, ratios 1.3 and 0.5: the first is cut, ½.
    """
    if call.ratios is None or loss.name not in ("ppo_clip", "gspo", "cispo") or not any(call.mask):
        return None
    ratios = list(compress(call.ratios, call.mask))
    if loss.name == "gspo":  # the call's geometric mean stands for all its tokens
        logs = [math.log(ratio) if ratio > 0 else -math.inf for ratio in ratios]
        ratios = [math.exp(min(700.0, fmean(logs)))] * len(ratios)
    cut = 0
    for ratio, advantage in zip(ratios, compress(call.advantages, call.mask), strict=True):
        above, below = ratio > 1.0 + loss.clip_high, ratio < 1.0 - loss.clip_low
        dual = loss.name == "ppo_clip" and loss.dual_clip is not None and ratio > loss.dual_clip
        cut += (above or below) if loss.name == "cispo" else above if advantage >= 0 else below or dual
    return cut / len(ratios)


def _trained(minibatches: Iterable[Sequence[TrainingSequence]], numbers: RowNumbers) -> dict[str, TrainedCall]:
    """By call, from the first epoch: the others train the same rows again."""
    found: dict[str, TrainedCall] = {}
    for minibatch in minibatches:
        for name, row in named_rows(minibatch).items():
            of_row = numbers.get(name)
            for call_id, (start, end) in zip(row.calls, row.segments, strict=True):
                found.setdefault(
                    call_id,
                    TrainedCall(
                        mask=row.mask[start:end],
                        advantages=row.advantages[start:end],
                        weights=row.weights[start:end],
                        ratios=None if of_row is None else of_row.ratios[start:end],
                        entropies=None if of_row is None else of_row.entropies[start:end],
                    ),
                )
    return found


def _size(credit: CallCredit) -> int:
    return CALL_BYTES + TOKEN_BYTES * len(credit.token_advantages)
