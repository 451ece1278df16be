"""The loop of a run that learns from the record: batches of stored rollouts, updates, held-out loss, checkpoints, resume.

`trainer.py` hands it everything it uses. No agent runs but to be evaluated, before and after and every so often. What
makes it safe to kill: the examples are written to the run's folder before anything is learned, each step's batch follows
from them, the seed and the step's number alone, and a checkpoint is recorded after its files are whole. After a crash the
loop goes back to the last checkpoint and computes the same updates again; so it does by itself when the learner is lost.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial

from agentlightning.adapters.preferences import answer_rows, mismatched_rows
from agentlightning.adapters.sequences import token_weights
from agentlightning.algorithms.preference import Preferring, preference_values
from agentlightning.algorithms.recorded import Example, Recorded
from agentlightning.algorithms.supervised import Supervised
from agentlightning.config import Config
from agentlightning.engines.base import DEFAULT_POLICY, Engine, Metrics
from agentlightning.errors import DataError, LearnerLostError
from agentlightning.store.base import LightningStore
from agentlightning.trainer.checkpoint import RunFolder, last_checkpoint, load_checkpoint, save_checkpoint
from agentlightning.trainer.collect import Collector
from agentlightning.trainer.dataset import Dataset
from agentlightning.trainer.evaluate import Kind, measure
from agentlightning.trainer.guard import RECORD_RULES
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.tasks import TaskOrder
from agentlightning.trainer.watch import Watch
from agentlightning.types import (
    JSON,
    Preference,
    PreferenceLoss,
    Resource,
    RetryPolicy,
    Sequence,
    Trajectory,
)

MOST_LEARNERS_LOST = 3
"""Learners lost in a row, without a step that was never reached before, after which it is no accident."""
MOST_HELD_OUT = 256
"""Held-out examples whose loss is computed, the first ones: enough to see a difference, few enough to wait for."""
HELD_OUT_BATCH = 32


@dataclass(kw_only=True)
class OfflineLoop:
    """One run's loop and everything it uses."""

    config: Config
    algorithm: Recorded
    run_id: str
    folder: RunFolder
    store: LightningStore
    engine: Engine
    collector: Collector
    policy: JSON
    """The value of the policy resource: model name, endpoints, tokenizer, seed."""
    dataset: Dataset
    val: Seq[JSON]
    """Held-out tasks for the agent; none where no agent is evaluated."""
    progress: Progress
    stopping: bool = False
    """Set to end after the step that is under way."""
    version: int = 0
    reached: int = 0
    """The latest step that was ever completed here."""
    train: list[Example] = field(default_factory=list)
    held_out: list[Example] = field(default_factory=list)
    preference_loss: PreferenceLoss = field(default_factory=PreferenceLoss)
    """Of the algorithms that compare answers."""
    order: TaskOrder = field(init=False)
    """Which examples each step takes."""
    watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = Watch(
            run_id=self.run_id,
            folder=self.folder,
            store=self.store,
            progress=self.progress,
            rules=RECORD_RULES if self.config.trainer.guard else {},
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
        await self._read_examples()
        done = await (self._resume() if resume else self._begin())
        steps = self.config.trainer.steps
        while done < steps and not self.stopping:
            done += 1
            await self._step(done)
        if self.val and self.config.eval.sampled and done == steps:
            await self._evaluate_agent(done, "sampled")
        return done

    async def _read_examples(self) -> None:
        self.progress.phase("read the record", 0, 1)
        examples = await self.dataset.examples()
        self.train = [example for example in examples if not example.held_out]
        self.held_out = [example for example in examples if example.held_out][:MOST_HELD_OUT]
        if not self.train:
            raise DataError(
                f"all {len(examples)} examples are held out; lower algorithm.held_out, or record more tasks"
            )
        if isinstance(self.algorithm, Preferring):
            self.preference_loss = self.algorithm.loss(self.train)
        trainer = self.config.trainer
        self.order = TaskOrder(len(self.train), trainer.tasks_per_step, trainer.seed)
        epochs = trainer.steps * trainer.tasks_per_step / len(self.train)
        self.progress.note(
            f"{len(self.train)} examples to learn from, {len(self.held_out)} held out; {trainer.steps} steps of "
            f"{trainer.tasks_per_step} are {epochs:.3g} epochs"
        )

    async def _begin(self) -> int:
        await self._evaluate(0)
        if self.val and self.config.eval.sampled:
            await self._evaluate_agent(0, "sampled")
        await self._checkpoint(0)
        return 0

    async def _resume(self) -> int:
        checkpoint = await last_checkpoint(self.store, self.run_id)
        if checkpoint is None:
            return await self._begin()
        await load_checkpoint(self.engine, checkpoint)
        self.version = checkpoint.version
        await self.store.reopen_steps(self.run_id, checkpoint.step)  # marks what later steps measured as abandoned
        self.watch.resumed(checkpoint.step)
        return checkpoint.step

    async def _step(self, step: int) -> None:
        started = time.perf_counter()
        trainer = self.config.trainer
        batch = [self.train[position] for position in self.order.step(step)]
        metrics = await self._learn(batch, self._learning_rate(step))
        metrics |= {
            "epoch": step * trainer.tasks_per_step / len(self.train),
            "learning_rate": self._learning_rate(step),
            "seconds": time.perf_counter() - started,
        }
        metrics = await self.watch.record(step, "step", metrics)
        self.reached = max(self.reached, step)
        self.progress.step(step, trainer.steps, metrics)
        every, last = self.config.eval.every, step == trainer.steps
        if last or (every and step % every == 0):
            await self._evaluate(step)
        if last or self.stopping or step % trainer.checkpoint_every == 0:
            await self._checkpoint(step)

    async def _learn(self, batch: Seq[Example], learning_rate: float) -> Metrics:
        """One update on these examples."""
        found = await self._trajectories(batch)
        if isinstance(self.algorithm, Supervised):
            rows = self._weighed([found[one.wanted] for one in batch if one.wanted is not None], self.algorithm)
            update = await self.engine.forward_backward(rows, self.algorithm.loss)
        else:
            mismatched, examples = await self._preferences(batch, found)
            update = await self.engine.forward_backward_preferences(examples, self.preference_loss, mismatched)
        update["tokens_trained"] = update.pop("tokens")
        return update | await self.engine.optim_step(learning_rate, self.config.trainer.grad_clip)

    def _weighed(self, trajectories: Seq[Trajectory], algorithm: Supervised) -> list[Sequence]:
        """Rows whose token weights sum to 1."""
        weights = token_weights(trajectories, algorithm.aggregation)
        return [
            row
            for trajectory, of_calls in zip(trajectories, weights, strict=True)
            for row in answer_rows(trajectory, merged=algorithm.merge, weights=of_calls)
        ]

    async def _preferences(
        self, batch: Seq[Example], found: dict[str, Trajectory]
    ) -> tuple[list[Sequence], list[Preference]]:
        """Mismatched answers and the examples, with reference logprobs on every row."""
        named = [name for example in batch for name in (example.wanted, example.unwanted) if name is not None]
        answers = {name: answer_rows(found[name], merged=self.algorithm.merge) for name in dict.fromkeys(named)}
        mismatched: list[Sequence] = []
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

    async def _trajectories(self, examples: Seq[Example]) -> dict[str, Trajectory]:
        named = [name for example in examples for name in (example.wanted, example.unwanted) if name is not None]
        return await self.dataset.read(list(dict.fromkeys(named)))

    # --- how good it is ---------------------------------------------------------------------------------------------

    async def _evaluate(self, step: int) -> None:
        """The loss of what is held out, and the agent's greedy success."""
        if self.held_out:
            started = time.perf_counter()
            values = await self._held_out_values()
            metrics = {f"heldout_{name}": value for name, value in values.items()}
            await self.watch.record(step, "heldout_loss", metrics | {"seconds_heldout": time.perf_counter() - started})
            self.progress.note(f"step {step}: held-out loss {values['loss']:.4f} of {len(self.held_out)} examples")
        if self.val:
            await self._evaluate_agent(step, "greedy")

    async def _held_out_values(self) -> Metrics:
        if isinstance(self.algorithm, Supervised):
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
            rows = [row for one in found.values() for row in answer_rows(one, merged=self.algorithm.merge)]
            for row, values in zip(rows, await self.engine.logprobs(rows), strict=True):
                total -= sum(value for value, trained in zip(values, row.mask, strict=True) if trained)
                tokens += sum(row.mask)
        return {"loss": total / tokens}

    async def _log_ratios(self, answers: Seq[Seq[Sequence]]) -> list[float]:
        """log(policy / reference) of each answer."""
        values = iter(await self.engine.logprobs([row for rows in answers for row in rows]))
        found = []
        for rows in answers:
            total = 0.0
            for row in rows:
                known = zip(next(values), row.ref_logprobs or [], row.mask, strict=True)
                total += sum(now - reference for now, reference, trained in known if trained)
            found.append(total)
        return found

    async def _evaluate_agent(self, step: int, kind: Kind) -> None:
        started = time.perf_counter()
        await self._publish(step)
        measured = await measure(
            self.collector,
            self.run_id,
            self.val,
            step=step,
            kind=kind,
            max_tokens=self.config.model.max_tokens,
            retry=RetryPolicy(max_attempts=self.config.agent.max_attempts, timeout_s=self.config.agent.timeout_s),
            on_progress=partial(self.progress.phase, f"evaluate {kind}"),
        )
        name = f"heldout_{kind}"
        metrics = measured.metrics(name)
        await self.watch.record(step, name, metrics | {f"seconds_{name}": time.perf_counter() - started})
        self.progress.evaluated(step, kind, measured.success)

    # --- what is kept -----------------------------------------------------------------------------------------------

    async def _publish(self, step: int) -> None:
        """Take a version number that was never used, then serve the current weights under it."""
        (resource,) = await self.store.put_resources(
            [
                Resource(
                    run_id=self.run_id,
                    name=DEFAULT_POLICY,
                    kind="policy",
                    value=self.policy,
                    parent=self.version or None,
                    step=step,
                )
            ]
        )
        await self.engine.publish(resource.version)
        self.version = resource.version

    async def _checkpoint(self, step: int) -> None:
        keep = self.config.trainer.keep_checkpoints
        await save_checkpoint(self.store, self.engine, self.folder, step, self.version, keep)

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up, then linear decay to `final_learning_rate` of the rate at the end."""
        trainer = self.config.trainer
        warm = min(1.0, step / trainer.warmup_steps) if trainer.warmup_steps else 1.0
        decay = 1.0 - (1.0 - trainer.final_learning_rate) * (step - 1) / trainer.steps
        return trainer.learning_rate * warm * decay
