"""The offline loop: batches of recorded rollouts, updates, held-out loss, checkpoints, resume.

`training.py` hands it everything it uses. No agent runs but for evaluations. What makes it safe to kill: the examples are
written to the run's folder before the first update, and each step's batch follows from them, the seed and the step's number
alone. After a crash the loop goes back to the last checkpoint and computes the same updates again.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from agentlightning.adapters.preferences import completion_rows, mismatched_rows
from agentlightning.adapters.sequences import token_weights
from agentlightning.algorithms.offline import (
    Example,
    OfflineAlgorithm,
    PreferenceAlgorithm,
    SupervisedAlgorithm,
    preference_values,
)
from agentlightning.algorithms.plugins import own_code
from agentlightning.engines.base import DEFAULT_POLICY, Metrics
from agentlightning.errors import DataError
from agentlightning.records import JSON, Step
from agentlightning.trainer.evaluate import Kind
from agentlightning.trainer.loop import TrainingLoop
from agentlightning.trainer.monitor.health_checks import OFFLINE_HEALTH_CHECKS, HealthCheck
from agentlightning.trainer.offline.dataset import OfflineDataset
from agentlightning.trainer.scheduler import TaskOrder
from agentlightning.training_types import Preference, PreferenceLoss, TrainingSequence, Trajectory

MAX_HELD_OUT = 256
"""Held-out examples whose loss is computed, the first ones: enough to see a difference, few enough to wait for."""
HELD_OUT_BATCH = 32


@dataclass(kw_only=True)
class OfflineLoop(TrainingLoop):
    """The loop of a run that learns from recorded rollouts."""

    health_checks: ClassVar[Mapping[str, HealthCheck]] = OFFLINE_HEALTH_CHECKS

    algorithm: OfflineAlgorithm
    policy: JSON
    """The value of the policy resource: model name, endpoints, tokenizer, seed."""
    dataset: OfflineDataset
    train: list[Example] = field(default_factory=list)
    held_out: list[Example] = field(default_factory=list)
    preference_loss: PreferenceLoss = field(default_factory=PreferenceLoss)
    """Of the algorithms that compare completions."""
    order: TaskOrder = field(init=False)
    """Examples of each step."""

    @property
    def policy_values(self) -> Mapping[str, JSON]:
        return {DEFAULT_POLICY: self.policy}

    async def prepare(self) -> None:
        self.progress.phase("read the recorded rollouts", 0, 1)
        examples = await self.dataset.examples()
        self.train = [example for example in examples if not example.held_out]
        self.held_out = [example for example in examples if example.held_out][:MAX_HELD_OUT]
        if not self.train:
            raise DataError(
                f"all {len(examples)} examples are held out; lower algorithm.held_out, or record more tasks"
            )
        if isinstance(self.algorithm, PreferenceAlgorithm):
            with own_code(self.algorithm):
                self.preference_loss = self.algorithm.loss(self.train)
        self.config = self.config.with_steps(len(self.train))
        trainer = self.config.trainer
        self.order = TaskOrder(len(self.train), trainer.tasks_per_step, trainer.seed)
        epochs = trainer.steps * trainer.tasks_per_step / len(self.train)
        self.progress.note(
            f"{len(self.train)} examples to learn from, {len(self.held_out)} held out; {trainer.steps} steps of "
            f"{trainer.tasks_per_step} are {epochs:.3g} epochs"
        )

    async def go_back(self, step: int, again: Sequence[Step]) -> int:
        return step  # each step's batch follows from the seed and its number

    async def train_step(self, step: int) -> Metrics:
        self.progress.phase(f"learn: {self.algorithm.name}", step - 1, self.config.trainer.steps)
        batch = [self.train[position] for position in self.order.step(step)]
        metrics = await self._learn(batch, self.learning_rate(step))
        return metrics | {"epoch": step * self.config.trainer.tasks_per_step / len(self.train)}

    async def _learn(self, batch: Sequence[Example], learning_rate: float) -> Metrics:
        """One update on these examples."""
        found = await self._trajectories(batch)
        if isinstance(self.algorithm, SupervisedAlgorithm):
            rows = self._weighed([found[one.wanted] for one in batch if one.wanted is not None])
            update = await self.engine.forward_backward(rows, self.algorithm.loss)
        else:
            mismatched, examples = await self._preferences(batch, found)
            update = await self.engine.forward_backward_preferences(examples, self.preference_loss, mismatched)
        update["tokens_trained"] = update.pop("tokens")
        return update | await self.engine.optim_step(learning_rate, self.config.trainer.grad_clip)

    def _weighed(self, trajectories: Sequence[Trajectory]) -> list[TrainingSequence]:
        """Rows whose token weights sum to 1."""
        weights = token_weights(trajectories, "token_mean")
        return [
            row
            for trajectory, of_calls in zip(trajectories, weights, strict=True)
            for row in completion_rows(trajectory, weights=of_calls)
        ]

    async def _preferences(
        self, batch: Sequence[Example], found: dict[str, Trajectory]
    ) -> tuple[list[TrainingSequence], list[Preference]]:
        """Mismatched completions and the examples, with reference logprobs on every row."""
        named = [name for example in batch for name in (example.wanted, example.unwanted) if name is not None]
        answers = {name: completion_rows(found[name]) for name in dict.fromkeys(named)}
        mismatched: list[TrainingSequence] = []
        if self.preference_loss.name == "kto":
            mismatched = mismatched_rows(list(answers.values()), self.dataset.longest)
        rows = [row for of_answer in answers.values() for row in of_answer] + mismatched
        values = iter(await self.engine.reference_logprobs(rows))
        compared = {
            name: [replace(row, ref_logprobs=next(values)) for row in of_answer] for name, of_answer in answers.items()
        }
        beside = [replace(row, ref_logprobs=next(values)) for row in mismatched]
        examples = [
            Preference(
                chosen=[] if example.wanted is None else compared[example.wanted],
                rejected=[] if example.unwanted is None else compared[example.unwanted],
                weight=1.0 / len(batch),
            )
            for example in batch
        ]
        return beside, examples

    async def _trajectories(self, examples: Sequence[Example]) -> dict[str, Trajectory]:
        named = [name for example in examples for name in (example.wanted, example.unwanted) if name is not None]
        return await self.dataset.read(list(dict.fromkeys(named)))

    # --- how good it is ---------------------------------------------------------------------------------------------

    async def evaluate(self, step: int) -> None:
        """The loss of what is held out, and the agent's greedy success."""
        if self.held_out:
            started = time.perf_counter()
            values = await self._held_out_values()
            metrics = {f"eval/{name}": value for name, value in values.items()}
            metrics["time/eval_loss_s"] = time.perf_counter() - started
            await self.metric_logger.record(step, "eval/loss", metrics)
            self.progress.note(f"step {step}: held-out loss {values['loss']:.4f} of {len(self.held_out)} examples")
        await super().evaluate(step)

    async def _held_out_values(self) -> Metrics:
        if isinstance(self.algorithm, SupervisedAlgorithm):
            return await self._held_out_nll()
        values: defaultdict[str, list[float]] = defaultdict(list)
        for start in range(0, len(self.held_out), HELD_OUT_BATCH):
            self.progress.phase("held-out loss", start, len(self.held_out))
            part = self.held_out[start : start + HELD_OUT_BATCH]
            mismatched, examples = await self._preferences(part, await self._trajectories(part))
            chosen = [rows for rows in (one.chosen for one in examples) if rows]
            rejected = [rows for rows in (one.rejected for one in examples) if rows]
            for name, answers in (
                ("chosen", chosen),
                ("rejected", rejected),
                ("mismatched", [[row] for row in mismatched]),
            ):
                values[name] += await self._log_ratios(answers)
        return preference_values(self.preference_loss, values["chosen"], values["rejected"], values["mismatched"])

    async def _held_out_nll(self) -> Metrics:
        """Mean negative log-likelihood per token, in nats."""
        total, tokens = 0.0, 0
        for start in range(0, len(self.held_out), HELD_OUT_BATCH):
            self.progress.phase("held-out loss", start, len(self.held_out))
            found = await self._trajectories(self.held_out[start : start + HELD_OUT_BATCH])
            rows = [row for one in found.values() for row in completion_rows(one)]
            for row, values in zip(rows, await self.engine.logprobs(rows), strict=True):
                total -= sum(value for value, trained in zip(values, row.mask, strict=True) if trained)
                tokens += sum(row.mask)
        return {"loss": total / max(1, tokens)}

    async def _log_ratios(self, answers: Sequence[Sequence[TrainingSequence]]) -> list[float]:
        """log(policy / reference) of each completion."""
        values = iter(await self.engine.logprobs([row for rows in answers for row in rows]))
        found = []
        for rows in answers:
            total = 0.0
            for row in rows:
                known = zip(next(values), row.ref_logprobs or [], row.mask, strict=True)
                total += sum(now - reference for now, reference, trained in known if trained)
            found.append(total)
        return found

    async def evaluate_agent(self, step: int, kind: Kind) -> None:
        await self.publish(step, self.version or None)
        await super().evaluate_agent(step, kind)
