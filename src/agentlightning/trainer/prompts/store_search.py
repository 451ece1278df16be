"""StoreSearch: the `SearchRun` of a real search, over a store and the workers that run its rollouts.

`optimization.py` makes one; algorithms see the interface alone. Whatever they get is in the store before they see it:
candidates, rollouts, which are enqueued under names of their own, and the optimiser model's answers.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from agentlightning.algorithms.prompts.search import PromptCandidate, RolloutScore, ScoreRequest, Split, Trace
from agentlightning.config.run import Config
from agentlightning.errors import AgentError, BudgetSpentError
from agentlightning.records import JSON, NewRollout, RetryPolicy, Rollout, Sampling
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.feedback import read_feedback
from agentlightning.store.prompt_candidates import group_id, shared_group_id
from agentlightning.store.scan import read_calls
from agentlightning.trainer.monitor.metric_logger import MetricLogger
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.prompts.budget import Budget, SearchUsage, usage_of
from agentlightning.trainer.prompts.candidates import CandidateBook
from agentlightning.trainer.prompts.optimizer_model import OptimizerModel
from agentlightning.trainer.prompts.rollout_traces import rollout_trace
from agentlightning.trainer.scheduler import RolloutCollector, check_calls_recorded, nothing_to_learn

READ_BATCH = 200
"""Rollouts whose records are read at a time."""
MAX_REPLICAS = 1000
"""Rollouts of one candidate on one task, at most, where those of all candidates on it are a group."""
MAX_ERROR = 2000
"""Characters of a rollout's failure that a search sees: the end of a traceback says what it was."""

Key = tuple[int, Split, int, int]
"""Candidate, split, task, replica."""


@dataclass(kw_only=True)
class StoreSearch:
    """One search. Use from one event loop."""

    config: Config
    store: LightningStore
    collector: RolloutCollector
    book: CandidateBook
    model: OptimizerModel
    budget: Budget
    tasks: Mapping[Split, Sequence[JSON]]
    seed: PromptCandidate
    logger: MetricLogger | None
    """Of the metrics of each batch; None: nobody records them."""
    progress: Progress
    step: int = 0
    """The training step that it is a part of: its rollouts on training tasks are then to be learned from. 0: none."""
    stopping: bool = False
    """Set to end before the next batch."""
    stopped: bool = False
    """True once something was refused because of `stopping`."""
    batches: int = 0
    sizes: Mapping[Split, int] = field(init=False)
    _scores: dict[Key, RolloutScore] = field(default_factory=dict)
    _own: list[Key] = field(default_factory=list)
    _rewards: dict[tuple[int, Split], dict[int, list[float]]] = field(default_factory=dict)
    """By candidate and split, rewards by task."""
    _asked: set[tuple[str, str, int]] = field(default_factory=set)
    _again: int = 0
    _best: float | None = None
    _evaluating: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.sizes = {split: len(rows) for split, rows in self.tasks.items()}

    async def propose(
        self, texts: Mapping[str, str], parents: Sequence[PromptCandidate], source: str
    ) -> PromptCandidate:
        """As of `SearchRun`."""
        return await self.book.propose(texts, parents, source)

    async def evaluate(self, wanted: Sequence[ScoreRequest]) -> list[list[RolloutScore]]:
        """As of `SearchRun`. AgentError where every rollout of the first batch failed: nothing could be compared."""
        keys = [[(one.candidate.number, one.split, task, one.replica) for task in one.tasks] for one in wanted]
        async with self._evaluating:  # two batches with a rollout in common must not both count it
            new = [key for key in dict.fromkeys(key for part in keys for key in part) if key not in self._scores]
            if new:
                self._check(len(new))
                await self._run(new)
        return [[self._scores[key] for key in part] for part in keys]

    async def traces(self, scores: Sequence[RolloutScore]) -> list[Trace]:
        """As of `SearchRun`."""
        found: dict[str, Trace] = {}
        for start in range(0, len(scores), READ_BATCH):
            part = {score.rollout_id: score for score in scores[start : start + READ_BATCH]}
            rollouts = await self.store.rollouts(RolloutQuery(ids=list(part)))
            calls = await self.store.calls(list(part))
            spans = await self.store.spans(list(part))
            for rollout in rollouts:
                found[rollout.id] = rollout_trace(
                    rollout,
                    [call for call in calls if call.rollout_id == rollout.id],
                    [span for span in spans if span.rollout_id == rollout.id],
                    part[rollout.id],
                )
        return [found[score.rollout_id] for score in scores]

    async def ask(self, prompt: str, purpose: str, number: int = 0) -> str:
        """As of `SearchRun`."""
        request = (prompt, purpose, number)
        if request not in self._asked:
            self._check(0)
        answer = await self.model.ask(prompt, purpose, number)
        if request not in self._asked:
            self._asked.add(request)
            self.budget.used += answer.usage
        return answer.text

    def note(self, sentence: str) -> None:
        """As of `SearchRun`."""
        self.progress.note(sentence)

    def rewards(self, candidate: PromptCandidate, split: Split = "val") -> dict[int, float]:
        """By task, the mean reward of the rollouts of a candidate that this search has seen."""
        found = self._rewards.get((candidate.number, split), {})
        return {task: statistics.fmean(values) for task, values in sorted(found.items())}

    def know(self, rewards: Mapping[Key, RolloutScore]) -> None:
        """Scores of rollouts that were run for another reason; they cost nothing."""
        for key, score in rewards.items():
            self._keep(key, score)

    def rollout_ids(self, split: Split) -> list[str]:
        """Its own rollouts on the tasks of a split, without those that it only knows of."""
        return [self._scores[key].rollout_id for key in self._own if key[1] == split]

    def _keep(self, key: Key, score: RolloutScore) -> None:
        number, split, task, _ = key
        self._scores[key] = score
        self._rewards.setdefault((number, split), {}).setdefault(task, []).append(score.reward)

    def _check(self, rollouts: int) -> None:
        if self.stopping:
            self.stopped = True
            raise BudgetSpentError("The search was asked to end.")
        self.budget.check(rollouts)

    async def _run(self, keys: Sequence[Key]) -> None:
        self.batches += 1
        rollouts = await (self._collect(keys) if self._scores else self._first(keys))
        used, feedback = SearchUsage(), list[str]()
        for start in range(0, len(rollouts), READ_BATCH):
            part = rollouts[start : start + READ_BATCH]
            used += usage_of(await read_calls(self.store, part), self.config.external)
            feedback += await read_feedback(self.store, part)
        self.budget.rollouts += len(rollouts)
        self.budget.used += used
        for key, rollout, words in zip(keys, rollouts, feedback, strict=True):
            self._keep(key, rollout_score(key[2], rollout, words))
        self._own += keys
        await self._log(keys, used)

    async def _collect(self, keys: Sequence[Key]) -> list[Rollout]:
        return await self.collector.collect(
            [self._rollout(key) for key in keys], partial(self.progress.phase, f"batch {self.batches}")
        )

    async def _first(self, keys: Sequence[Key]) -> list[Rollout]:
        """The first rollouts of the search: those of the prompts that it starts from."""
        before, rollouts = await self.collector.begin(), list[Rollout]()
        for again in count():
            self._again = again
            rollouts = await self._collect(keys)
            # A start that failed whole ended the process before: the one that resumes makes other rollouts.
            if not nothing_to_learn(rollouts) or any((one.finished_seq or 0) > before for one in rollouts):
                break
        if all(rollout.state != "succeeded" for rollout in rollouts):
            raise AgentError(
                f"all {len(rollouts)} rollouts with the prompts that the search starts from failed, the first with: "
                f"{rollouts[0].error}"
            )
        if (silent := check_calls_recorded(rollouts)) is not None:
            self.note(silent)
        return rollouts

    def _rollout(self, key: Key) -> NewRollout:
        number, split, task, replica = key
        model, agent, optimize = self.config.model, self.config.agent, self.config.optimize
        own = None if optimize is None else optimize.temperature
        temperature = model.temperature if own is None else own
        again = 0 if number else self._again
        learned = split == "train" and self.step > 0
        return NewRollout(
            run_id=self.collector.run_id,
            task=self.tasks[split][task],
            # What is learned from is compared with the rollouts of the same task, whatever prompt they had.
            group_id=(shared_group_id(self.step, task) if learned else group_id(number, split, task, again, self.step)),
            replica=number * MAX_REPLICAS + replica + again if learned else replica,
            mode="train" if learned else "eval",
            step=self.step or self.batches,
            sampling=Sampling(temperature=temperature, max_tokens=model.max_tokens),
            retry=RetryPolicy(max_attempts=agent.max_attempts, timeout_s=agent.timeout_s),
            prompts=dict(self.book.versions(number)),
        )

    async def _log(self, keys: Sequence[Key], used: SearchUsage) -> None:
        """Records the numbers of a batch."""
        metrics = self.metrics() | {
            "prompts/batch_mean": statistics.fmean(self._scores[key].reward for key in keys),
            "cost/prompt_tokens": float(used.prompt_tokens),
            "cost/sampled_tokens": float(used.sampled_tokens),
        }
        if "prompts/cost_usd" in metrics:
            metrics["cost/external_usd"] = used.cost
        if self.logger is not None:
            await self.logger.record(self.batches, "prompts", metrics)
        self.progress.phase("rollouts", self.budget.rollouts, self.budget.bounds.max_rollouts)
        best = metrics.get("prompts/best_mean")
        if self.logger is not None and best is not None and best != self._best:
            self._best = best
            self.progress.evaluated(self.batches, "best prompts", best)

    def metrics(self) -> dict[str, float]:
        """Numbers of the search so far."""
        whole = range(len(self.tasks["val"]))
        means = {}
        for candidate in self.book.proposed:
            rewards = self.rewards(candidate)
            if len(rewards) == len(whole):
                means[candidate.number] = statistics.fmean(rewards.values())
        metrics = {
            "prompts/candidates": float(len(self.book.proposed)),
            "prompts/rollouts": float(self.budget.rollouts),
            "prompts/tokens": float(self.budget.used.tokens),
        }
        if any(one.input_cost_per_token is not None for one in self.config.external.values()):
            metrics["prompts/cost_usd"] = self.budget.used.cost
        if means:
            metrics["prompts/best_mean"] = max(means.values())
        return metrics


def rollout_score(task: int, rollout: Rollout, feedback: str) -> RolloutScore:
    failed = rollout.state != "succeeded"
    return RolloutScore(
        task=task,
        reward=0.0 if failed or rollout.reward is None else rollout.reward,
        feedback=feedback,
        error=(rollout.error or f"the rollout was {rollout.state}")[-MAX_ERROR:] if failed else "",
        rollout_id=rollout.id,
    )
