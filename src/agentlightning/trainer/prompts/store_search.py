"""StoreSearch: the `SearchRun` of a real search, over a store and the workers that run its rollouts.

`optimization.py` makes one; algorithms see the interface alone. Whatever they get is in the store before they see it:
candidates, rollouts, which are enqueued under names of their own, and the optimiser model's answers.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from agentlightning.algorithms.prompts.search import PromptCandidate, RolloutScore, ScoreRequest, Split, Trace
from agentlightning.config.run import Config
from agentlightning.errors import AgentError, BudgetSpentError
from agentlightning.records import JSON, Call, NewRollout, RetryPolicy, Rollout, Sampling, Span
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import FEEDBACK, read_calls, read_feedback
from agentlightning.store.templates import group_id
from agentlightning.trainer.monitor.metric_logger import MetricLogger
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.prompts.budget import Budget, SearchUsage, usage_of
from agentlightning.trainer.prompts.candidates import CandidateBook
from agentlightning.trainer.scheduler import RolloutCollector, check_calls_recorded, nothing_to_learn

READ_BATCH = 200
"""Rollouts whose records are read at a time."""
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
    answer: Callable[[str, str, int], Awaitable[tuple[str, SearchUsage]]]
    """The optimiser model: of a request, its purpose and number, the answer and its usage."""
    budget: Budget
    tasks: Mapping[Split, Sequence[JSON]]
    seed: PromptCandidate
    logger: MetricLogger
    progress: Progress
    stopping: bool = False
    """Set to end before the next batch."""
    stopped: bool = False
    """True once something was refused because of `stopping`."""
    batches: int = 0
    sizes: Mapping[Split, int] = field(init=False)
    _scores: dict[Key, RolloutScore] = field(default_factory=dict)
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
        text, usage = await self.answer(prompt, purpose, number)
        if request not in self._asked:
            self._asked.add(request)
            self.budget.used += usage
        return text

    def note(self, sentence: str) -> None:
        """As of `SearchRun`."""
        self.progress.note(sentence)

    def rewards(self, candidate: PromptCandidate, split: Split = "val") -> dict[int, float]:
        """By task, the mean reward of the rollouts of a candidate that this search has seen."""
        found = self._rewards.get((candidate.number, split), {})
        return {task: statistics.fmean(values) for task, values in sorted(found.items())}

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
            used += usage_of(await read_calls(self.store, part))
            feedback += await read_feedback(self.store, part)
        self.budget.rollouts += len(rollouts)
        self.budget.used += used
        for key, rollout, words in zip(keys, rollouts, feedback, strict=True):
            self._keep(key, rollout_score(key[2], rollout, words))
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
        model, agent = self.config.model, self.config.agent
        return NewRollout(
            run_id=self.collector.run_id,
            task=self.tasks[split][task],
            group_id=group_id(number, split, task, 0 if number else self._again),
            replica=replica,
            mode="eval",
            step=self.batches,
            sampling=Sampling(temperature=model.temperature, max_tokens=model.max_tokens),
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
        await self.logger.record(self.batches, "prompts", metrics)
        self.progress.phase("rollouts", self.budget.rollouts, self.budget.bounds.max_rollouts)
        best = metrics.get("prompts/best_mean")
        if best is not None and best != self._best:
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


def rollout_trace(rollout: Rollout, calls: Sequence[Call], spans: Sequence[Span], score: RolloutScore) -> Trace:
    """One rollout: its calls and spans of the last attempt, in the order in which they began."""
    steps = [(call.started_ns, call_step(call)) for call in calls if call.attempt == rollout.attempt]
    steps += [
        (span.started_ns, span_step(span))
        for span in spans
        if span.attempt == rollout.attempt and span.name != FEEDBACK
    ]
    ordered = tuple(text for _, text in sorted(steps, key=lambda step: step[0]))
    return Trace(task=json.dumps(rollout.task, ensure_ascii=False), steps=ordered, score=score)


def call_step(call: Call) -> str:
    """A model call: the messages that no earlier call had, tool results among them, and the completion."""
    lines = [_message(each) for each in (*call.messages, call.completion)]
    if call.finish_reason == "length":
        lines.append("(the completion was cut off: it reached the most tokens that it may have)")
    head = f"model call of agent {call.agent}:" if call.agent else "model call:"
    return "\n".join([head, *lines])


def span_step(span: Span) -> str:
    """A step of the agent outside model calls, with its attributes, and with the error where it ended in one."""
    own = {name: value for name, value in span.attributes.items() if not name.startswith(("resource.", "scope."))}
    text = f"{span.name} {json.dumps(own, ensure_ascii=False, default=str)}" if own else span.name
    failures = [span.status_message or "failed"] if span.status == "error" else []
    for event in span.events:
        attributes = event.get("attributes") or {}
        if event.get("name") == "exception":
            failures.append(f"{attributes.get('exception.type', '')}: {attributes.get('exception.message', '')}")
    return text + "".join(f"\n  error: {one}" for one in dict.fromkeys(failures))


def message_text(message: JSON) -> str:
    """The text of a message, whose content is a text or parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _message(message: JSON) -> str:
    text = message_text(message)
    if tools := message.get("tool_calls"):
        text += f" calls tools {json.dumps(tools, ensure_ascii=False)}"
    return f"[{message.get('role')}] {text}"
