"""Offline training: batches of recorded rollouts, updates, held-out loss, checkpoints, resume.

`training.py` hands it everything it uses. No agent runs but for evaluations. What makes it safe to kill: the examples,
chosen once among the finished training rollouts of the source runs, are written to the run's folder before the first update
and count from then on, and each step's batch follows from them, the seed and the step's number alone.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from agentlightning.adapters.conversations import TRACE_PROTOCOL
from agentlightning.adapters.sequences import completion_rows, log_ratios, mismatched_completions, token_weights
from agentlightning.adapters.trajectories import named_rewards, trajectories
from agentlightning.algorithms.offline import (
    Candidate,
    Distill,
    Example,
    OfflineAlgorithm,
    PreferenceAlgorithm,
    SupervisedAlgorithm,
    preference_values,
)
from agentlightning.algorithms.plugins import own_code
from agentlightning.algorithms.selection import selection
from agentlightning.engines.base import DEFAULT_POLICY, SKIPPED, Metrics
from agentlightning.errors import ConfigError, DataError, NotFoundError
from agentlightning.records import JSON, Call, Resource, Rollout, Step
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import read_images, read_rollouts
from agentlightning.tracing.tool_uses import named_calls
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.data.tasks import content_key
from agentlightning.trainer.evaluate import Kind
from agentlightning.trainer.loop import TrainingLoop
from agentlightning.trainer.scheduler import TaskOrder
from agentlightning.training_types import Preference, PreferenceLoss, TrainingSequence, Trajectory

if TYPE_CHECKING:
    from agentlightning.rendering.renderer import Renderer

EXAMPLES = "examples.jsonl"
READ_BATCH = 128
"""Rollouts whose calls are read from the store at a time: bounds the size of one answer."""
REASONS_TOLD = 3


@dataclass(kw_only=True)
class OfflineDataset:
    """The examples of one run, and how they are read."""

    algorithm: OfflineAlgorithm
    store: LightningStore
    sources: Sequence[str]
    """Ids of the runs whose rollouts are learned from, all in `store`."""
    folder: RunFolder
    tokenizer: Path
    """Folder of the model that learns."""
    longest: int
    """Most tokens of a row."""
    note: Callable[[str], None]
    file: str = EXAMPLES
    """Name of the file of the chosen examples in the run's folder."""
    _renderer: Renderer | None = None

    async def examples(self) -> list[Example]:
        """The run's examples: those that were chosen before, else chosen now. Raises the errors of `choose`."""
        file = self.folder.path / self.file
        if file.exists():
            return [Example(**orjson.loads(line)) for line in file.read_bytes().splitlines()]
        chosen = await self.choose()
        self.folder.write_whole(self.file, b"".join(orjson.dumps(asdict(example)) + b"\n" for example in chosen))
        return chosen

    async def choose(self) -> list[Example]:
        """Look at every rollout and choose.

        NotFoundError where a source run does not exist, ConfigError where it was recorded with another tokenizer or where
        the settings choose nothing, DataError where it holds nothing that can be learned from.
        """
        candidates: list[Candidate] = []
        left_out: Counter[str] = Counter()
        for run_id in self.sources:
            if not await self.store.runs(ids=[run_id]):
                raise NotFoundError(f"data.from_run: {run_id}: no such run in this store; see: agl runs list")
            if not self.algorithm.renders:
                await self._check_tokenizer(run_id)
            async for part in self._finished(run_id):
                found, reasons = await self._trajectories(part)
                left_out.update(reasons.values())
                tasks = {rollout.id: content_key(rollout.task) for rollout in part}
                candidates += [_candidate(one, tasks[one.rollout_id]) for one in found]
        if left_out:
            told = "; ".join(f"{count} × {reason}" for reason, count in left_out.most_common(REASONS_TOLD))
            self.note(f"{left_out.total()} recorded rollouts cannot be learned from: {told}")
        if not candidates:
            raise DataError(
                f"data.from_run: {', '.join(self.sources)}: no finished training rollout that {self.algorithm.name} can "
                "learn from; record some with: agl record, or agl train"
            )
        with own_code(self.algorithm):
            return self.algorithm.examples(candidates)

    async def read(self, rollout_ids: Sequence[str]) -> dict[str, Trajectory]:
        """The trajectories of these rollouts. DataError where one can no longer be learned from: its record is gone."""
        found = {rollout.id: rollout for rollout in await self.store.rollouts(RolloutQuery(ids=rollout_ids))}
        kept: list[Trajectory] = []
        for start in range(0, len(rollout_ids), READ_BATCH):
            part = [found[one] for one in rollout_ids[start : start + READ_BATCH] if one in found]
            usable, reasons = await self._trajectories(part)
            kept += usable
            if reasons:
                name, reason = next(iter(reasons.items()))
                raise DataError(f"rollout {name} can no longer be learned from ({reason}); start the run again")
        by_id = {one.rollout_id: one for one in kept}
        if gone := [one for one in rollout_ids if one not in by_id]:
            raise DataError(f"rollout {gone[0]}: it was deleted from the store; start the run again")
        return by_id

    def _finished(self, run_id: str) -> AsyncIterator[list[Rollout]]:
        """The finished training rollouts of a run in the order of their ids."""
        return read_rollouts(self.store, RolloutQuery(run_id=run_id, mode="train", states=["succeeded"]))

    async def _trajectories(self, rollouts: Sequence[Rollout]) -> tuple[list[Trajectory], dict[str, str]]:
        """Those that can be learned from, and the reason of each that cannot."""
        ids = [rollout.id for rollout in rollouts]
        calls = await named_calls(self.store, await self.store.calls(ids))
        rewards = await self.store.rewards(ids)
        if self.algorithm.reward is not None:
            named = named_rewards(rewards, self.algorithm.reward)
            rollouts = [replace(one, reward=named.get((one.id, one.attempt))) for one in rollouts]
        of, agents = self.algorithm, self.algorithm.agents
        chosen = [selection(policy, agents, of.side_calls).ids(calls) for policy in {call.policy for call in calls}]
        selected = set[str]().union(*chosen)
        imported = {call.rollout_id for call in calls if call.protocol == TRACE_PROTOCOL}  # text without tokens
        as_text = [one for one in rollouts if self.algorithm.renders or one.id in imported]
        found, reasons = self._rendered(as_text, calls, selected)
        as_tokens = [one for one in rollouts if one not in as_text]
        if as_tokens:
            images = await read_images(self.store, calls)
            sampled, more = trajectories(as_tokens, calls, rewards, keep_unrewarded=True, images=images)
            found, reasons = [*found, *self._own(sampled, selected, more)], reasons | more
        kept = []
        for one in found:
            if max(len(row.tokens) for row in completion_rows(one)) <= self.longest:
                kept.append(one)
            else:
                reasons[one.rollout_id] = f"a row has more than {self.longest} tokens"
        return kept, reasons

    def _own(self, found: Sequence[Trajectory], selected: set[str], reasons: dict[str, str]) -> list[Trajectory]:
        """With the calls of the chosen agents alone; what has none gets its reason."""
        kept = []
        for one in found:
            own = [transition for transition in one.transitions if transition.call_id in selected]
            if own:
                kept.append(replace(one, transitions=own))
            else:
                reasons[one.rollout_id] = f"no call is of {', '.join(self.algorithm.agents or ())}"
        return kept

    def _rendered(
        self, rollouts: Sequence[Rollout], calls: Sequence[Call], selected: set[str]
    ) -> tuple[list[Trajectory], dict[str, str]]:
        from agentlightning.adapters.rendered import rendered
        from agentlightning.rendering.renderer import Renderer

        if self._renderer is None and rollouts:
            self._renderer = Renderer(self.tokenizer)
        algorithm = self.algorithm

        def taught(call: Call) -> bool:
            teaches = not isinstance(algorithm, Distill) or algorithm.teaches(call.policy, call.model)
            return call.id in selected and teaches

        kept, reasons = [], {}
        for rollout in rollouts:
            own = [call for call in calls if call.rollout_id == rollout.id]
            assert self._renderer is not None
            found = rendered(rollout, own, self._renderer, taught)
            if isinstance(found, str):
                reasons[rollout.id] = found
            else:
                kept.append(found)
        return kept, reasons

    async def _check_tokenizer(self, run_id: str) -> None:
        """Refuse token ids that mean nothing to a model with another tokenizer."""
        ours = _vocabulary(self.tokenizer)
        for policy in await self.store.resources(run_id):
            theirs = await self._recorded_vocabulary(policy) if policy.kind == "policy" else None
            if ours is None or theirs is None:
                self.note(f"{run_id}: cannot check that it was recorded with the tokenizer of this model")
            elif ours != theirs:
                raise ConfigError(
                    f"data.from_run: {run_id} was recorded with another tokenizer than that of {self.tokenizer}; only the "
                    "algorithm 'distill' renders its messages anew"
                )

    async def _recorded_vocabulary(self, policy: Resource) -> Any:
        """The tables of the tokenizer that a policy was recorded with; None where they are not to be found."""
        match policy.value.get("tokenizer"):
            case str(folder):
                return _vocabulary(Path(folder))
            case {"tokenizer.json": str(name)}:
                found = (await self.store.files(policy.run_id, [name])).get(name, b"")
                return await asyncio.to_thread(_tables, found)
        return None


def _candidate(trajectory: Trajectory, task: str) -> Candidate:
    written = [transition.sampled_ids for transition in trajectory.transitions]
    return Candidate(
        rollout_id=trajectory.rollout_id,
        task=task,
        reward=None if math.isnan(trajectory.reward) else trajectory.reward,
        answer=content_key(written),
    )


def _vocabulary(folder: Path) -> Any:
    """The tokenizer's tables that decide a text's ids; None where the folder has none."""
    file = folder / "tokenizer.json"
    return _tables(file.read_bytes()) if file.is_file() else None


def _tables(tokenizer: bytes) -> Any:
    """Those of a tokenizer.json; None where it is none."""
    try:
        table = orjson.loads(tokenizer)
    except orjson.JSONDecodeError:
        return None
    added = {token["content"]: token["id"] for token in table.get("added_tokens") or []}
    return table.get("model", {}).get("vocab"), added  # merges are written in two ways that mean the same


MAX_HELD_OUT = 256
"""Held-out examples whose loss is computed, the first ones: enough to see a difference, few enough to wait for."""
HELD_OUT_BATCH = 32


@dataclass(kw_only=True)
class OfflineLoop(TrainingLoop):
    """The loop of a run that learns from recorded rollouts."""

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
        tokens = {"tokens_trained": update.pop("tokens")}
        made = await self.engine.optim_step(learning_rate, self.config.trainer.grad_clip)
        return tokens | made | (update if SKIPPED.keys().isdisjoint(made) else {})

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
    ) -> tuple[list[list[TrainingSequence]], list[Preference]]:
        """Mismatched completions and the examples, with reference logprobs on every row."""
        named = [name for example in batch for name in (example.wanted, example.unwanted) if name is not None]
        answers = {name: completion_rows(found[name]) for name in dict.fromkeys(named)}
        mismatched: list[list[TrainingSequence]] = []
        if self.preference_loss.name == "kto":
            mismatched = mismatched_completions([found[name] for name in answers], self.dataset.longest)
        completions = [*answers.values(), *mismatched]
        values = iter(await self.engine.reference_logprobs([row for rows in completions for row in rows]))
        known = [[replace(row, ref_logprobs=next(values)) for row in rows] for rows in completions]
        compared = dict(zip(answers, known, strict=False))
        examples = [
            Preference(
                chosen=[] if example.wanted is None else compared[example.wanted],
                rejected=[] if example.unwanted is None else compared[example.unwanted],
                weight=1.0 / len(batch),
            )
            for example in batch
        ]
        return known[len(answers) :], examples

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
            for name, answers in (("chosen", chosen), ("rejected", rejected), ("mismatched", mismatched)):
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
        return log_ratios(answers, await self.engine.logprobs([row for rows in answers for row in rows]))

    async def evaluate_agent(self, step: int, kind: Kind) -> None:
        await self.publish(step, self.version or None)
        await super().evaluate_agent(step, kind)
