"""The reinforcement-learning loop: collect, learn, publish, evaluate, checkpoint; and resume at any line of it.

`trainer.py` hands it everything it uses. What makes it safe to kill: rollouts are enqueued under names that depend on the
step alone, a step's ordered list is written before it learns, and a checkpoint is recorded after its files are whole. After
a crash the loop goes back to the last checkpoint, executes the later steps again from their stored lists (nothing is
sampled again), and goes on. A learner that ends is such a crash, too: it is started again, and the loop goes back by itself.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.config import Config
from agentlightning.engines.base import DEFAULT_POLICY, Engine, Metrics
from agentlightning.errors import LearnerLostError
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.trainer.checkpoint import RESUMED, RunFolder, last_checkpoint, save_checkpoint
from agentlightning.trainer.collect import Collector
from agentlightning.trainer.evaluate import Kind, evaluate
from agentlightning.trainer.learning import Learning
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.tasks import TaskOrder
from agentlightning.types import (
    JSON,
    Consumed,
    Metric,
    NewRollout,
    Resource,
    RetryPolicy,
    Rollout,
    Sampling,
    Step,
)

SUMMARY: tuple[str, ...] = ("reward_mean", "heldout_greedy", "heldout_sampled")
"""Metrics that a list of runs shows."""
MOST_LEARNERS_LOST = 3
"""Learners lost in a row, without a step that was never reached before, after which it is no accident."""


@dataclass(kw_only=True)
class Loop:
    """One run's training loop and everything it uses."""

    config: Config
    algorithm: LightningRL
    run_id: str
    folder: RunFolder
    store: LightningStore
    engine: Engine
    collector: Collector
    policy: JSON
    """The value of the policy resource: model name, endpoints, tokenizer, seed."""
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

    @property
    def learning(self) -> Learning:
        """What makes updates of rollouts."""
        return Learning(
            config=self.config,
            algorithm=self.algorithm,
            run_id=self.run_id,
            folder=self.folder.path,
            store=self.store,
            engine=self.engine,
            progress=self.progress,
        )

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
        checkpoint = await last_checkpoint(self.store, self.run_id)
        if checkpoint is None:  # it was killed before its first: everything enqueued so far is found again
            return await self._begin()
        await self.engine.load(Path(checkpoint.path))
        self.version = checkpoint.version
        again = await self.store.reopen_steps(self.run_id, checkpoint.step)
        self.folder.append_metrics({"step": checkpoint.step, "kind": RESUMED, "time": time.time()})
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
        if stored is None:
            rollouts = await self._collect(step)
        else:
            rollouts = await self._stored(stored)
        metrics = await self._learn(step, rollouts, stored)
        metrics |= {f"seconds_{phase}": value for phase, value in self.seconds.items()}
        metrics["seconds"] = time.perf_counter() - started
        metrics["tokens_per_second"] = metrics["tokens_sampled"] / max(1e-9, metrics["seconds"])
        await self._record(step, "step", metrics)
        self.reached = max(self.reached, step)
        self.progress.step(step, self.config.trainer.steps, metrics)
        every, last = self.config.eval.every, step == self.config.trainer.steps
        if self.val and (last or (every and step % every == 0)):
            await self._evaluate(step, "greedy")
        if last or self.stopping or step % self.config.trainer.checkpoint_every == 0:
            await self._checkpoint(step)

    async def _collect(self, step: int) -> list[Rollout]:
        with self._timed("collect"):
            order = TaskOrder(len(self.train), self.config.trainer.tasks_per_step, self.config.trainer.seed)
            spent, rollouts = await self.collector.collect_again(
                [
                    NewRollout(
                        run_id=self.run_id,
                        task=self.train[position],
                        group_id=f"train:{step}:{place}",
                        replica=replica,
                        step=step,
                        sampling=Sampling(
                            temperature=self.config.model.temperature, max_tokens=self.config.model.max_tokens
                        ),
                        retry=self._retry(),
                    )
                    for place, position in enumerate(order.step(step))
                    for replica in range(self.algorithm.group_size)
                ],
                partial(self.progress.phase, "collect"),
            )
            return spent + rollouts  # every rollout that is finished is consumed by a step

    async def _stored(self, step: Step) -> list[Rollout]:
        ids = [consumed.rollout_id for consumed in step.consumed]
        found = {rollout.id: rollout for rollout in await self.store.rollouts(RolloutQuery(ids=ids))}
        return [found[rollout_id] for rollout_id in ids]

    async def _learn(self, step: int, rollouts: list[Rollout], stored: Step | None) -> Metrics:
        with self._timed("record"):
            lesson = await self.learning.prepare(step, rollouts)
            if stored is None:
                outcomes = {rollout.id: lesson.plan.outcomes.get(rollout.id, "invalid") for rollout in rollouts}
                await self.store.open_step(
                    self.run_id, step, [Consumed(rollout_id=key, outcome=value) for key, value in outcomes.items()]
                )
        with self._timed("learn"):
            updates = await self.learning.update(lesson, self._learning_rate(step))
        with self._timed("publish"):
            await self._publish(step, self.version)
            await self.store.close_step(self.run_id, step, self.version)
        return lesson.metrics | updates | {"learning_rate": self._learning_rate(step)}

    async def _publish(self, step: int, parent: int | None) -> None:
        """Take a version number that was never used, then serve the current weights under it."""
        (resource,) = await self.store.put_resources(
            [
                Resource(
                    run_id=self.run_id, name=DEFAULT_POLICY, kind="policy", value=self.policy, parent=parent, step=step
                )
            ]
        )
        await self.engine.publish(resource.version)
        self.version = resource.version

    async def _evaluate(self, step: int, kind: Kind) -> None:
        started = time.perf_counter()
        success = await evaluate(
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
        await self._record(step, name, {name: success, f"seconds_{name}": time.perf_counter() - started})
        self.progress.evaluated(step, kind, success)

    async def _checkpoint(self, step: int) -> None:
        keep = self.config.trainer.keep_checkpoints
        await save_checkpoint(self.store, self.engine, self.folder, step, self.version, keep)

    async def _record(self, step: int, kind: str, metrics: Metrics) -> None:
        await self.store.log_metrics(
            [Metric(run_id=self.run_id, step=step, name=name, value=value) for name, value in metrics.items()]
        )
        shown = {name: metrics[name] for name in SUMMARY if name in metrics}
        await self.store.update_run(self.run_id, summary={"step": step, **shown})
        self.folder.append_metrics({"step": step, "kind": kind, "time": time.time(), **metrics})

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
