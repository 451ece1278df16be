"""The training loop: collect, update, publish, evaluate, checkpoint; and resume at any line of it.

`training.py` hands it everything it uses. What makes it safe to kill: rollouts are enqueued under names that depend on their
groups' numbers alone, a step's ordered list is written before its updates, and a checkpoint is recorded after its files are
whole. After a crash, also of a learner, the loop goes back to the last checkpoint and executes the later steps again from
their stored lists: nothing is sampled again. `offline.py` derives its loop from the one here.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from agentlightning.config.run import Config
from agentlightning.engines.base import Engine, Metrics
from agentlightning.errors import LearnerLostError
from agentlightning.records import JSON, Consumed, Outcome, Resource, RetryPolicy, Rollout, Sampling, Step
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.checkpoint import Fingerprint, RunFolder
from agentlightning.trainer.checkpoint_files import Registrar, last_checkpoint, load_checkpoint, save_checkpoint
from agentlightning.trainer.evaluate import Kind, run_held_out, success_metrics, summarize
from agentlightning.trainer.load_trajectories import DISCARDED, LoadedTrajectories, TimeTally, fixed_inputs, slots_of
from agentlightning.trainer.monitor.metric_logger import MetricLogger
from agentlightning.trainer.monitor.metrics import path_of
from agentlightning.trainer.policies import Opponents, TrainedPolicy, publish
from agentlightning.trainer.probe import probe_tries
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.scheduler import (
    GroupScheduler,
    PublishedVersions,
    RolloutCollector,
    Staleness,
    StepBatch,
    TreeSampler,
)
from agentlightning.trainer.step import CreditRecorder, StepPlan, StepPlanner
from agentlightning.trainer.task_sampler import SampledTasks, load_sampler
from agentlightning.trainer.weight_probe import WeightProbe

MAX_LEARNERS_LOST = 3
"""Learners lost in a row, without a step that was never reached before, after which it is no accident."""


@dataclass(kw_only=True)
class TrainingLoop(ABC):
    """One run's training loop and everything it uses."""

    config: Config
    run_id: str
    folder: RunFolder
    store: LightningStore
    engine: Engine
    collector: RolloutCollector
    val: Sequence[JSON]
    """Held-out tasks; none where no agent is evaluated."""
    progress: Progress
    metric_logger: MetricLogger
    stopping: bool = False
    """Set to end after the step that is under way."""
    version: int = 0
    reached: int = 0
    """The latest step that was ever completed here."""
    hung_processes: Callable[[], int] = lambda: 0
    """Counts those that were killed because they hung."""
    made_of: Fingerprint = field(default_factory=Fingerprint)
    """Of what the run's model versions are made."""

    @property
    @abstractmethod
    def policy_values(self) -> Mapping[str, JSON]:
        """Values of the policies' resources, by alias: model name, endpoints, tokenizer, seed."""

    async def begin(self) -> int:
        """Evaluates and saves the weights that training starts from; returns 0."""
        await self.evaluate(0)
        await self._evaluate_sampled(0)
        await self.save_checkpoint(0)
        return 0

    async def _evaluate_sampled(self, step: int) -> None:
        if self.val and self.config.eval.sampled:
            await self.evaluate_agent(step, "sampled")

    @abstractmethod
    async def go_back(self, step: int, again: Sequence[Step]) -> int:
        """Goes on from the checkpoint of `step`, which is loaded; `again` are the later steps. Returns the last one done."""

    @abstractmethod
    async def train_step(self, step: int) -> Metrics: ...

    async def evaluate(self, step: int) -> None:
        """Evaluates the weights after `step`."""
        if self.val:
            await self.evaluate_agent(step, "greedy")

    async def prepare(self) -> None:  # noqa: B027 - not every loop has something to read
        """Reads what the loop needs before its first step."""

    async def run(self, resume: bool) -> int:
        """Train to the last step, or to the step at which `stopping` was set; returns that step."""
        lost, reached = 0, self.reached
        while True:
            try:
                return await self._run(resume)
            except LearnerLostError as error:
                lost = lost + 1 if self.reached == reached else 1
                if lost > MAX_LEARNERS_LOST:
                    raise
                self.progress.note(f"{error}; starting it again and going back to the last checkpoint")
                reached, resume = self.reached, True
                await self.engine.restart_learner()

    async def _run(self, resume: bool) -> int:
        await self.prepare()
        done = await (self._resume() if resume else self.begin())
        while done < self.config.trainer.steps and not self.stopping:
            done += 1
            await self.run_step(done)
        if done == self.config.trainer.steps:
            await self._evaluate_sampled(done)
        return done

    async def _resume(self) -> int:
        checkpoint = await last_checkpoint(self.store, self.folder)
        if checkpoint is None:  # it was killed before its first: everything enqueued so far is found again
            return await self.begin()
        await load_checkpoint(self.engine, checkpoint, list(self.policy_values))
        self.version = checkpoint.version
        await self._register(checkpoint.step)  # where the trainer was killed before it did
        again = await self.store.reopen_steps(self.run_id, checkpoint.step)
        self.metric_logger.resumed(checkpoint.step)
        return await self.go_back(checkpoint.step, again)

    async def run_step(self, step: int) -> None:
        """Trains one step, records its metrics, evaluates and saves where it is time to."""
        started = time.perf_counter()
        metrics = await self.train_step(step)
        metrics = {"learning_rate": self.learning_rate(step)} | metrics | {"time/step_s": time.perf_counter() - started}
        if hung := self.hung_processes():
            metrics["processes/hung"] = hung
        metrics = await self.metric_logger.record(step, "step", metrics)
        self.reached = max(self.reached, step)
        trainer, every = self.config.trainer, self.config.eval.every
        last = step == trainer.steps
        self.progress.step(step, trainer.steps, metrics)
        if last or (every and step % every == 0):
            await self.evaluate(step)
        if last or self.stopping or step % trainer.checkpoint_every == 0:
            await self.save_checkpoint(step)

    async def evaluate_agent(self, step: int, kind: Kind) -> None:
        """Runs the agent on the held-out tasks and records its success."""
        started = time.perf_counter()
        rollouts = await run_held_out(
            self.collector,
            self.val,
            step=step,
            kind=kind,
            max_tokens=self.config.model.max_tokens,
            retry=self.retry(),
            on_progress=partial(self.progress.phase, f"evaluate {kind}"),
        )
        name = f"eval/{kind}"
        metrics = {f"{name}/{key}": value for key, value in summarize(rollouts).items()}
        metrics |= {f"{name}/{key}": value for key, value in (await success_metrics(self.store, rollouts)).items()}
        metrics |= await self.success_by_policy(name, rollouts)
        await self.metric_logger.record(step, name, metrics | {f"time/eval_{kind}_s": time.perf_counter() - started})
        self.progress.evaluated(step, kind, metrics[f"{name}/reward_mean"])

    async def success_by_policy(self, name: str, rollouts: Sequence[Rollout]) -> Metrics:
        """Metrics of an evaluation that policies have of their own; none here."""
        return {}

    async def publish(self, step: int, parent: int | None) -> list[Resource]:
        """Takes a version number that was never used, then serves the current weights under it."""
        resources = await publish(self.store, self.engine, self.run_id, self.policy_values, step, parent)
        self.version = resources[0].version
        return list(resources)

    async def save_checkpoint(self, step: int) -> None:
        settings, policies = self.config.trainer, list(self.policy_values)
        await save_checkpoint(self.store, self.engine, self.folder, step, self.version, settings, policies)
        await self._register(step)

    async def _register(self, step: int) -> None:
        """Registers the checkpoint of a step, which is recorded, as model versions."""
        await Registrar(
            store=self.store,
            config=self.config,
            folder=self.folder,
            policies=list(self.policy_values),
            made_of=self.made_of,
        ).register(step)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to `final_learning_rate` of the rate at the end."""
        trainer = self.config.trainer
        warm = min(1.0, step / trainer.warmup_steps) if trainer.warmup_steps else 1.0
        decay = 1.0 - (1.0 - trainer.final_learning_rate) * (step - 1) / trainer.steps
        return trainer.peak_learning_rate * warm * decay

    def retry(self) -> RetryPolicy:
        return RetryPolicy(max_attempts=self.config.agent.max_attempts, timeout_s=self.config.agent.timeout_s)


MAX_RESAMPLING = 10
"""Times tasks_per_step groups after which a step goes on with the groups that it has, as in DAPO's recipe."""


@dataclass(kw_only=True)
class RLLoop(TrainingLoop):
    """The loop of a run that learns from rollouts of its own."""

    policies: Mapping[str, TrainedPolicy]
    """By alias; at least one, and all with groups of one size."""
    train: Sequence[JSON]
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time of the current step, by phase."""
    times: TimeTally = field(default_factory=TimeTally)
    """Of the rollouts that the current step waited for."""
    versions: PublishedVersions = field(default_factory=PublishedVersions)
    reports_numbers: bool = False
    """True where the engine reports the ratios and entropies of the tokens that it trains."""
    scheduler: GroupScheduler = field(init=False)
    planner: StepPlanner = field(init=False)
    probe: WeightProbe = field(init=False)
    opponents: Opponents | None = None
    """Policies that agents meet and that are never trained; None where there is none."""
    offline: Mapping[int, TrainingLoop] = field(default_factory=dict)
    """Parts of the schedule, by number, that learn from recorded rollouts; without agents to evaluate."""
    _prompts: dict[str, int] = field(default_factory=dict)
    """Versions of the prompts that the weights go with."""
    _stored: dict[int, Step] = field(default_factory=dict)
    """Steps to execute again from their lists, by number."""

    def __post_init__(self) -> None:
        model = self.config.model
        self.planner = StepPlanner(
            policies=self.policies,
            run_id=self.run_id,
            folder=self.folder.path,
            store=self.store,
            engine=self.engine,
            progress=self.progress,
            learning_rate=self.config.trainer.peak_learning_rate,
            collector=self.collector,
            asks_numbers=self.reports_numbers,
        )
        engine = self.config.engine
        self.probe = WeightProbe(
            engine=self.engine,
            values={alias: trained.value for alias, trained in self.policies.items()},
            exact=engine.name == "local" and engine.sampler.type == "local" and engine.dtype == "float32",
            progress=self.progress,
        )
        algorithm = next(iter(self.policies.values())).algorithm  # which rollouts are sampled, all agree on
        size, tree, seed = algorithm.group_size, algorithm.tree, self.config.trainer.seed
        self.scheduler = GroupScheduler(
            store=self.store,
            collector=self.collector,
            run_id=self.run_id,
            tasks=self.train,
            group_size=size,
            trees=None if tree is None else TreeSampler(store=self.store, tree=tree, group_size=size, seed=seed),
            trainer=self.config.trainer,
            sampling=Sampling(temperature=model.temperature, max_tokens=model.max_tokens),
            retry=self.retry(),
            sampled=self._sampled_tasks(),
        )

    def _sampled_tasks(self) -> SampledTasks | None:
        sampler = load_sampler(self.config.data.sampler)
        if sampler is None:
            return None
        return SampledTasks(
            store=self.store,
            run_id=self.run_id,
            tasks=self.train,
            sampler=sampler,
            seed=self.config.trainer.seed,
            before=partial(probe_tries, self.store, self.run_id),
        )

    @property
    def policy_values(self) -> Mapping[str, JSON]:
        stamp = {"prompts": self._prompts} if self._prompts else {}
        return {alias: trained.value | stamp for alias, trained in self.policies.items()}

    async def prepare(self) -> None:
        self.scheduler.forget()
        for steps in self.offline.values():
            await steps.prepare()
        if self.config.trainer.max_staleness:
            alias = next(iter(self.policies))
            self.versions.record(await self.store.resources(self.run_id, alias, latest=False))

    async def begin(self) -> int:
        await self.publish(step=0, parent=None)
        await self._serve_opponents(1)
        return await super().begin()

    async def go_back(self, step: int, again: Sequence[Step]) -> int:
        await self.publish(step, parent=self.version)
        await self._serve_opponents(step + 1)
        self._stored = {one.step: one for one in again}
        return step

    async def success_by_policy(self, name: str, rollouts: Sequence[Rollout]) -> Metrics:
        return await self.planner.success(name, rollouts)

    async def publish(self, step: int, parent: int | None) -> list[Resource]:
        if self.config.prompts.templates:
            newest = await self.store.resources(self.run_id)
            self._prompts = {one.name: one.version for one in newest if one.kind == "prompt_template"}
        resources = await super().publish(step, parent)
        self.versions.record(resources[:1])
        return resources

    async def train_step(self, step: int) -> Metrics:
        started = time.perf_counter()
        self.seconds.clear()
        self.times = TimeTally()
        stored = self._stored.pop(step, None)
        await self._serve_opponents(step)
        for alias, policy in self.policies.items():
            if (entry := policy.entry(step)) != policy.entry(step - 1):
                where = f"policies.{alias}." if len(self.policies) > 1 else ""
                self.progress.note(f"step {step}: from here on by {where}algorithm.schedule[{entry}]")
        if steps := self._offline_at(step):
            metrics = await self._learn_offline(steps, step, stored)
        else:
            metrics = await self._learn(step, stored)
        for alias, policy in self.policies.items():
            if policy.schedule[1:]:
                name = path_of("schedule_entry", alias if len(self.policies) > 1 else "")
                metrics[name] = float(policy.entry(step))
        metrics |= {f"time/{phase}_s": value for phase, value in self.seconds.items()}
        slots = slots_of(self.config, len(self.policies))
        metrics |= {} if self.opponents is None else self.opponents.metrics()
        return metrics | self.times.metrics(time.perf_counter() - started, slots, bool(self.config.external))

    async def _serve_opponents(self, step: int) -> None:
        if self.opponents is not None:
            await self.opponents.serve(step)

    async def evaluate(self, step: int) -> None:
        if steps := self._offline_at(max(1, step)):
            await steps.evaluate(step)
        await super().evaluate(step)

    def _offline_at(self, step: int) -> TrainingLoop | None:
        entry = next(iter(self.policies.values())).offline_at(step)
        return None if entry is None else self.offline[entry]

    async def _learn_offline(self, steps: TrainingLoop, step: int, stored: Step | None) -> Metrics:
        """A step that consumes no rollout: its batch follows from its number."""
        if stored is None:
            await self.store.open_step(self.run_id, step, [])
        with self._timed("update"):
            metrics = await steps.train_step(step)
        with self._timed("publish"):
            await self.publish(step, self.version)
            await self.store.close_step(self.run_id, step, self.version)
        return metrics | {"learning_rate": steps.learning_rate(step)}

    async def _learn(self, step: int, stored: Step | None) -> Metrics:
        self.planner = self.planner.at(step)
        plan = await (self._collect(step) if stored is None else self._again(stored))
        with self._timed("probe"):
            scores = await self.probe.before({alias: own.minibatches for alias, own in plan.plans.items()})
        with self._timed("update"):
            updates = await self.planner.update(plan, self.learning_rate(step))
        with self._timed("publish"):
            await self.publish(step, self.version)
        with self._timed("probe"):
            updates |= await self.probe.after(scores, self.version)
        with self._timed("record"):
            await CreditRecorder(store=self.store, run_id=self.run_id).record(step, plan.plans, plan.numbers)
        # Closed last: a step that is found open is executed again, with what it had not written yet.
        await self.store.close_step(self.run_id, step, self.version)
        return plan.metrics | updates

    async def _collect(self, step: int) -> StepPlan:
        """Collects until the step has what it needs, and writes its list before the first update."""
        staleness = self._staleness(step, self.config.trainer.max_staleness)
        on_progress = partial(self.progress.phase, "collect")
        groups = self.config.trainer.tasks_per_step
        loaded = self.planner.load()
        self.times = loaded.times
        with self._timed("collect"):
            batch = await self.scheduler.take(step, staleness, on_progress)
        plan, wanted = await self._add(step, loaded, batch, groups, staleness)
        resampled = 0
        while wanted and resampled < (MAX_RESAMPLING - 1) * groups:
            resampled += wanted
            with self._timed("collect"):
                more = await self.scheduler.more(wanted, staleness, on_progress)
            _, wanted = await self._add(step, loaded, more, wanted, staleness)
            batch.extend(more)
        if resampled:
            with self._timed("prepare"):
                plan = await self.planner.plan(step, loaded, staleness)
            plan.metrics["resampled_groups"] = float(resampled)
        if wanted:
            self.progress.note(
                f"step {step}: {wanted} groups are left out or have no signal, and so are {resampled} sampled in their place"
            )
        await self.scheduler.leave(batch, step)
        outcomes = {
            one.id: plan.outcomes.get(one.id) or loaded.outcome(one) for one in batch.rollouts
        } | batch.discarded
        with self._timed("prepare"):
            consumed = [
                Consumed(rollout_id=key, outcome=one, inputs=None if one in DISCARDED else loaded.inputs.get(key))
                for key, one in outcomes.items()
            ]
            await self.store.open_step(self.run_id, step, consumed)
        return _with_counts(plan, outcomes.values())

    async def _add(
        self, step: int, loaded: LoadedTrajectories, batch: StepBatch, wanted: int, staleness: Staleness | None
    ) -> tuple[StepPlan, int]:
        """Plans what was collected last, and counts the groups that are still wanted: those that are too stale throughout or
        left out, and with dynamic sampling those without a signal."""
        ids = {rollout.group_id for rollout in batch.rollouts}
        with self._timed("prepare"):
            await loaded.add(batch.rollouts)
            plan = await self.planner.plan(step, loaded, staleness, ids)
        fresh = {rollout.group_id for rollout in batch.rollouts if plan.outcomes.get(rollout.id) != "stale"}
        return plan, max(0, wanted - len((batch.groups & fresh) - set(plan.resample) - loaded.dropped))

    async def _again(self, step: Step) -> StepPlan:
        """The plan of a step's stored list."""
        self.progress.note(f"executing step {step.step} again from its {len(step.consumed)} stored rollouts")
        ids = [one.rollout_id for one in step.consumed if one.outcome not in DISCARDED]
        found = {rollout.id: rollout for rollout in await self.store.rollouts(RolloutQuery(ids=ids))}
        staleness = self._staleness(step.step, math.inf)  # what was too stale is not among them
        loaded = self.planner.load()
        rollouts = [found[rollout_id] for rollout_id in ids]
        with self._timed("prepare"):
            await loaded.add(rollouts, fixed_inputs(step))
            plan = await self.planner.plan(step.step, loaded, staleness)
        return _with_counts(plan, [one.outcome for one in step.consumed])

    def _staleness(self, step: int, bound: float) -> Staleness | None:
        if self.config.trainer.max_staleness == 0:
            return None
        return Staleness(versions=self.versions, step=step, bound=bound, policies=tuple(self.policies))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started, waited = time.perf_counter(), self.collector.waited_s
        yield
        waited = self.collector.waited_s - waited
        self.seconds[phase] += time.perf_counter() - started - waited
        if waited:  # planning waits for forks
            self.seconds["collect"] += waited


def _with_counts(plan: StepPlan, outcomes: Iterable[Outcome]) -> StepPlan:
    """The plan, with the counts of discarded rollouts; nothing where there are none."""
    counts = Counter(outcome for outcome in outcomes if outcome in DISCARDED)
    plan.metrics.update({outcome: float(count) for outcome, count in counts.items()})
    return plan
