"""The reinforcement-learning loop: collect, learn, publish, evaluate, checkpoint; and resume at any line of it.

`trainer.py` hands it everything it uses. What makes it safe to kill: rollouts are enqueued under names that depend on their
groups' numbers alone, a step's ordered list is written before it learns, and a checkpoint is recorded after its files are
whole. After a crash the loop goes back to the last checkpoint, executes the later steps again from their stored lists
(nothing is sampled again), and goes on. A learner that ends is such a crash, too: it is started again, and the loop goes
back by itself. With trainer.max_staleness above 0 agents run while it learns (`groups.py`): what they sample, and with which
weights, then depends on time; what a step learned from stands in its list all the same.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from agentlightning.algorithms.selection import selection
from agentlightning.config import Config
from agentlightning.engines.base import Engine, Metrics
from agentlightning.errors import LearnerLostError
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.checkpoint import RunFolder, last_checkpoint, load_checkpoint, save_checkpoint
from agentlightning.trainer.collect import Collector
from agentlightning.trainer.evaluate import Kind, held_out, of_rollouts
from agentlightning.trainer.groups import Groups, Lot
from agentlightning.trainer.guard import RULES
from agentlightning.trainer.learning import Learning
from agentlightning.trainer.lessons import Lesson, Lessons
from agentlightning.trainer.policies import Trained, publish
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.staleness import Staleness, Weights
from agentlightning.trainer.watch import Watch
from agentlightning.types import JSON, Consumed, Outcome, RetryPolicy, Sampling, Step

MOST_LEARNERS_LOST = 3
"""Learners lost in a row, without a step that was never reached before, after which it is no accident."""
MOST_SAMPLED = 10
"""Times tasks_per_step groups after which a step makes do with what it has, as in DAPO's recipe."""
NOT_LEARNED: frozenset[str] = frozenset({"stale", "surplus"})
"""Outcomes of rollouts that a step only puts away."""


@dataclass(kw_only=True)
class Loop:
    """One run's training loop and everything it uses."""

    config: Config
    policies: Mapping[str, Trained]
    """By alias; at least one, and all with groups of one size."""
    run_id: str
    folder: RunFolder
    store: LightningStore
    engine: Engine
    collector: Collector
    train: Seq[JSON]
    val: Seq[JSON]
    progress: Progress
    stopping: bool = False
    """Set to end after the step that is under way."""
    version: int = 0
    reached: int = 0
    """The latest step that was ever completed here."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Where the time of the current step goes, by phase."""
    weights: Weights = field(default_factory=Weights)
    groups: Groups = field(init=False)
    learning: Lessons = field(init=False)
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        model = self.config.model
        self.learning = self._lessons()
        self.watch = Watch(
            run_id=self.run_id,
            folder=self.folder,
            store=self.store,
            progress=self.progress,
            rules=RULES if self.config.trainer.guard else {},
        )
        self.groups = Groups(
            store=self.store,
            collector=self.collector,
            run_id=self.run_id,
            tasks=self.train,
            group_size=next(iter(self.policies.values())).algorithm.group_size,
            trainer=self.config.trainer,
            sampling=Sampling(temperature=model.temperature, max_tokens=model.max_tokens),
            retry=self._retry(),
        )

    def _lessons(self) -> Lessons:
        learnings = {
            alias: Learning(
                config=trained.config,
                algorithm=trained.algorithm,
                run_id=self.run_id,
                folder=self.folder.path,
                store=self.store,
                engine=self.engine,
                progress=self.progress,
                policy=alias,
            )
            for alias, trained in self.policies.items()
        }
        selections = {alias: selection(alias, trained.algorithm.agents) for alias, trained in self.policies.items()}
        return Lessons(learnings=learnings, selections=selections, learning_rate=self.config.trainer.learning_rate)

    async def run(self, resume: bool) -> int:
        """Train to the last step, or to the step at which `stopping` was set; returns that step."""
        lost, reached = 0, self.reached
        while True:
            try:
                return await self._run(resume)
            except LearnerLostError as error:
                lost = lost + 1 if self.reached == reached else 1
                if lost > MOST_LEARNERS_LOST:
                    raise
                self.progress.note(f"{error}; starting it again and going back to the last checkpoint")
                reached, resume = self.reached, True
                await self.engine.restart_learner()

    async def _run(self, resume: bool) -> int:
        done = await (self._resume() if resume else self._begin())
        steps = self.config.trainer.steps
        while done < steps and not self.stopping:
            done += 1
            await self._step(done)
        if self.val and self.config.eval.sampled and done == steps:
            await self._evaluate(done, "sampled")
        return done

    async def _begin(self) -> int:
        await self._publish(step=0, parent=None)
        if self.val:
            await self._evaluate(0, "greedy")
            if self.config.eval.sampled:
                await self._evaluate(0, "sampled")
        await self._checkpoint(0)
        return 0

    async def _resume(self) -> int:
        self.groups.forget()
        if self.config.trainer.max_staleness:
            self.weights.learn(await self.store.resources(self.run_id, next(iter(self.policies)), latest=False))
        checkpoint = await last_checkpoint(self.store, self.run_id)
        if checkpoint is None:  # it was killed before its first: everything enqueued so far is found again
            return await self._begin()
        await load_checkpoint(self.engine, checkpoint, list(self.policies))
        self.version = checkpoint.version
        again = await self.store.reopen_steps(self.run_id, checkpoint.step)
        self.watch.resumed(checkpoint.step)
        await self._publish(step=checkpoint.step, parent=checkpoint.version)
        done = checkpoint.step
        for step in again:
            self.progress.note(f"executing step {step.step} again from its {len(step.consumed)} stored rollouts")
            await self._step(step.step, stored=step)
            done = step.step
            if self.stopping:
                break
        return done

    async def _step(self, step: int, stored: Step | None = None) -> None:
        self.seconds.clear()
        started = time.perf_counter()
        lesson = await (self._collect(step) if stored is None else self._again(stored))
        metrics = await self._learn(step, lesson)
        metrics |= {f"seconds_{phase}": value for phase, value in self.seconds.items()}
        metrics["seconds"] = time.perf_counter() - started
        metrics = await self.watch.record(step, "step", metrics)
        self.reached = max(self.reached, step)
        self.progress.step(step, self.config.trainer.steps, metrics)
        every, last = self.config.eval.every, step == self.config.trainer.steps
        if self.val and (last or (every and step % every == 0)):
            await self._evaluate(step, "greedy")
        if last or self.stopping or step % self.config.trainer.checkpoint_every == 0:
            await self._checkpoint(step)

    async def _collect(self, step: int) -> Lesson:
        """Collect until the step has what it needs, and write its list before it learns."""
        staleness = self._staleness(step, self.config.trainer.max_staleness)
        on_progress = partial(self.progress.phase, "collect")
        with self._timed("collect"):
            lot = await self.groups.take(step, staleness, on_progress)
        lesson, wanted = await self._prepare(step, lot, staleness)
        sampled = made_up = 0
        while wanted and sampled < (MOST_SAMPLED - 1) * self.config.trainer.tasks_per_step:
            sampled, made_up = sampled + wanted, made_up + wanted
            with self._timed("collect"):
                await self.groups.more(lot, wanted, staleness, on_progress)
            lesson, wanted = await self._prepare(step, lot, staleness)
        if wanted:
            self.progress.note(f"step {step}: {wanted} groups teach nothing, and so did {made_up} made up for others")
        await self.groups.leave(lot, step)
        outcomes = {rollout.id: lesson.outcomes.get(rollout.id, "invalid") for rollout in lot.rollouts} | lot.discarded
        with self._timed("record"):
            await self.store.open_step(
                self.run_id, step, [Consumed(rollout_id=key, outcome=value) for key, value in outcomes.items()]
            )
        if made_up:
            lesson.metrics["made_up_groups"] = float(made_up)
        return _with_counts(lesson, outcomes.values())

    async def _prepare(self, step: int, lot: Lot, staleness: Staleness | None) -> tuple[Lesson, int]:
        """What the rollouts teach, and how many groups are to be made up for: such as are too stale throughout, and with
        dynamic sampling such as have no signal."""
        with self._timed("record"):
            lesson = await self.learning.prepare(step, lot.rollouts, staleness)
        fresh = {rollout.group_id for rollout in lot.rollouts if lesson.outcomes.get(rollout.id) != "stale"}
        stale = {rollout.group_id for rollout in lot.rollouts} - fresh
        taught = lot.groups - len(stale) - len(lesson.resample)
        return lesson, max(0, self.config.trainer.tasks_per_step - taught)

    async def _again(self, step: Step) -> Lesson:
        """The lesson of a step's stored list."""
        ids = [one.rollout_id for one in step.consumed if one.outcome not in NOT_LEARNED]
        found = {rollout.id: rollout for rollout in await self.store.rollouts(RolloutQuery(ids=ids))}
        staleness = self._staleness(step.step, math.inf)  # what was too stale is not among them
        with self._timed("record"):
            lesson = await self.learning.prepare(step.step, [found[rollout_id] for rollout_id in ids], staleness)
        return _with_counts(lesson, [one.outcome for one in step.consumed])

    def _staleness(self, step: int, bound: float) -> Staleness | None:
        if self.config.trainer.max_staleness == 0:
            return None
        return Staleness(weights=self.weights, step=step, bound=bound)

    async def _learn(self, step: int, lesson: Lesson) -> Metrics:
        with self._timed("learn"):
            updates = await self.learning.update(lesson, self._learning_rate(step))
        with self._timed("publish"):
            await self._publish(step, self.version)
            await self.store.close_step(self.run_id, step, self.version)
        return lesson.metrics | updates | {"learning_rate": self._learning_rate(step)}

    async def _publish(self, step: int, parent: int | None) -> None:
        """Take a version number that was never used, then serve the current weights under it."""
        values = {alias: trained.value for alias, trained in self.policies.items()}
        resources = await publish(self.store, self.engine, self.run_id, values, step, parent)
        self.weights.learn(resources[:1])
        self.version = resources[0].version

    async def _evaluate(self, step: int, kind: Kind) -> None:
        started = time.perf_counter()
        rollouts = await held_out(
            self.collector,
            self.run_id,
            self.val,
            step=step,
            kind=kind,
            max_tokens=self.config.model.max_tokens,
            retry=self._retry(),
            on_progress=partial(self.progress.phase, f"evaluate {kind}"),
        )
        name = f"heldout_{kind}"
        metrics = of_rollouts(rollouts).metrics(name) | await self.learning.success(name, rollouts)
        await self.watch.record(step, name, metrics | {f"seconds_{name}": time.perf_counter() - started})
        self.progress.evaluated(step, kind, metrics[name])

    async def _checkpoint(self, step: int) -> None:
        keep = self.config.trainer.keep_checkpoints
        await save_checkpoint(
            self.store, self.engine, self.folder, step, self.version, keep, policies=list(self.policies)
        )

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to `final_learning_rate` of the rate at the end."""
        trainer = self.config.trainer
        warm = min(1.0, step / trainer.warmup_steps) if trainer.warmup_steps else 1.0
        decay = 1.0 - (1.0 - trainer.final_learning_rate) * (step - 1) / trainer.steps
        return trainer.learning_rate * warm * decay

    def _retry(self) -> RetryPolicy:
        return RetryPolicy(max_attempts=self.config.agent.max_attempts, timeout_s=self.config.agent.timeout_s)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started


def _with_counts(lesson: Lesson, outcomes: Iterable[Outcome]) -> Lesson:
    """The lesson, with how many rollouts were put away; nothing where there are none."""
    counts = Counter(outcome for outcome in outcomes if outcome in NOT_LEARNED)
    lesson.metrics.update({outcome: float(count) for outcome, count in counts.items()})
    return lesson
