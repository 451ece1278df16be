"""Training loop: what learning from live rollouts and from recorded ones share. Resume, evaluation, publishing, checkpoints.

`rl/loop.py` and `offline/loop.py` derive from it. A checkpoint is recorded after its files are whole; after a crash the loop
goes back to the last one. A learner that ends is such a crash, too: it is started again, and the loop goes back by itself.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from agentlightning.config.run import Config
from agentlightning.engines.base import Engine, Metrics
from agentlightning.errors import LearnerLostError
from agentlightning.records import JSON, Resource, RetryPolicy, Rollout, Step
from agentlightning.store.base import LightningStore
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.checkpoint_files import last_checkpoint, load_checkpoint, save_checkpoint
from agentlightning.trainer.collect import RolloutCollector
from agentlightning.trainer.evaluate import Kind, run_held_out, summarize
from agentlightning.trainer.fingerprint import Fingerprint
from agentlightning.trainer.monitor.health_checks import HEALTH_CHECKS, HealthCheck
from agentlightning.trainer.monitor.metric_logger import MetricLogger
from agentlightning.trainer.policies import publish
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.registration import Registrar

MAX_LEARNERS_LOST = 3
"""Learners lost in a row, without a step that was never reached before, after which it is no accident."""


@dataclass(kw_only=True)
class TrainingLoop(ABC):
    """One run's training loop and everything it uses."""

    health_checks: ClassVar[Mapping[str, HealthCheck]] = HEALTH_CHECKS

    config: Config
    run_id: str
    folder: RunFolder
    store: LightningStore
    engine: Engine
    collector: RolloutCollector
    val: Sequence[JSON]
    """Held-out tasks; none where no agent is evaluated."""
    progress: Progress
    stopping: bool = False
    """Set to end after the step that is under way."""
    version: int = 0
    reached: int = 0
    """The latest step that was ever completed here."""
    hung_processes: Callable[[], int] = lambda: 0
    """Counts those that were killed because they hung."""
    made_of: Fingerprint = field(default_factory=Fingerprint)
    """Of what the run's model versions are made."""
    metric_logger: MetricLogger = field(init=False)

    def __post_init__(self) -> None:
        self.metric_logger = MetricLogger(
            run_id=self.run_id,
            folder=self.folder,
            store=self.store,
            progress=self.progress,
            rules=self.health_checks if self.config.trainer.health_checks else {},
        )

    @property
    @abstractmethod
    def policy_values(self) -> Mapping[str, JSON]:
        """Values of the policies' resources, by alias: model name, endpoints, tokenizer, seed."""

    async def begin(self) -> int:
        """Evaluates and saves the weights that training starts from; returns 0."""
        await self.evaluate(0)
        if self.val and self.config.eval.sampled:
            await self.evaluate_agent(0, "sampled")
        await self.save_checkpoint(0)
        return 0

    @abstractmethod
    async def go_back(self, step: int, again: Sequence[Step]) -> int:
        """Goes on from the checkpoint of `step`, which is loaded; `again` are the later steps. Returns the last one done."""

    @abstractmethod
    async def train_step(self, step: int) -> Metrics:
        """Trains one step."""

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
        if self.val and self.config.eval.sampled and done == self.config.trainer.steps:
            await self.evaluate_agent(done, "sampled")
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
        metrics = summarize(rollouts).metrics(name) | await self.success_by_policy(name, rollouts)
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
        policies = list(self.policy_values)
        registrar = Registrar(
            store=self.store, config=self.config, folder=self.folder, policies=policies, made_of=self.made_of
        )
        await registrar.register(step)

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to `final_learning_rate` of the rate at the end."""
        trainer = self.config.trainer
        warm = min(1.0, step / trainer.warmup_steps) if trainer.warmup_steps else 1.0
        decay = 1.0 - (1.0 - trainer.final_learning_rate) * (step - 1) / trainer.steps
        return trainer.learning_rate * warm * decay

    def retry(self) -> RetryPolicy:
        return RetryPolicy(max_attempts=self.config.agent.max_attempts, timeout_s=self.config.agent.timeout_s)
