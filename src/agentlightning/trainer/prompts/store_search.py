"""StoreSearch: the `SearchRun` of a real search, over a store and the workers that run its rollouts.

`optimization.py` makes one; algorithms see the interface alone. Whatever they get is in the store before they see it:
candidates, rollouts under names of their own, and the optimiser model's answers.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from agentlightning.algorithms.prompts.search import PromptCandidate, RolloutScore, ScoreRequest, Split, Trace
from agentlightning.config.prompts import OptimizeConfig
from agentlightning.config.run import Config, public_task
from agentlightning.errors import AgentError, BudgetSpentError, InputError
from agentlightning.prompts.templates import Template, check_candidate
from agentlightning.records import JSON, Call, NewRollout, Resource, RetryPolicy, Rollout, Sampling, Span
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import FEEDBACK, read_calls, read_feedback
from agentlightning.store.templates import CandidateRecord, group_id, read_candidates
from agentlightning.trainer.load_trajectories import used_tokens
from agentlightning.trainer.monitor.metric_logger import MetricLogger
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.scheduler import RolloutCollector, check_calls_recorded, nothing_to_learn

READ_BATCH = 200
"""Rollouts whose records are read at a time."""
MAX_ERROR = 2000
"""Characters of a rollout's failure that a search sees: the end of a traceback says what it was."""

Key = tuple[int, Split, int, int]
"""Candidate, split, task, replica."""
Texts = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchUsage:
    """Tokens of some calls."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0

    def __add__(self, other: SearchUsage) -> SearchUsage:
        return SearchUsage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            sampled_tokens=self.sampled_tokens + other.sampled_tokens,
        )

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.sampled_tokens


def usage_of(calls: Sequence[Call]) -> SearchUsage:
    """Tokens of these calls; an external model that reports no usage counts as nothing."""
    prompt, sampled = (sum(counts) for counts in zip((0, 0), *map(used_tokens, calls), strict=True))
    return SearchUsage(prompt_tokens=prompt, sampled_tokens=sampled)


@dataclass(slots=True)
class Budget:
    """The bounds of one search, and what it has used, counted along its own path: one that is run again counts the same."""

    bounds: OptimizeConfig
    rollouts: int = 0
    used: SearchUsage = SearchUsage()

    def check(self, rollouts: int = 0) -> None:
        """BudgetSpentError where so many more rollouts would pass their bound, or the tokens are spent."""
        bounds, used = self.bounds, self.used
        if self.rollouts + rollouts > bounds.max_rollouts:
            raise BudgetSpentError(
                f"The budget of {bounds.max_rollouts} rollouts is spent: {self.rollouts} were run, and the next "
                f"{rollouts} would pass it (optimize.max_rollouts)."
            )
        if bounds.max_tokens is not None and used.tokens >= bounds.max_tokens:
            raise BudgetSpentError(
                f"The budget of {bounds.max_tokens} tokens is spent: {used.tokens} were used (optimize.max_tokens)."
            )


class CandidateBook:
    """The candidates of one search, checked, recorded in the store, and found again. From one event loop, after `open`.

    A candidate's texts are versions of the run's templates; its record names them. What a search wrote before it was killed
    is used again: proposing equal texts twice changes nothing.
    """

    def __init__(self, store: LightningStore, run_id: str, searched: Sequence[str]) -> None:
        """searched: names of the templates whose texts candidates differ in."""
        self._store = store
        self._run_id = run_id
        self._searched = searched
        self._writing = asyncio.Lock()
        self._records: dict[Texts, CandidateRecord] = {}
        self._versions: dict[int, Mapping[str, int]] = {}
        self._stored: dict[str, dict[object, int]] = {}
        """By template, the first version of each text."""
        self._templates: dict[str, Template] = {}
        """Those that the search starts from."""
        self.proposed: list[PromptCandidate] = []
        """The candidates that this process has met, in order."""

    def versions(self, number: int) -> Mapping[str, int]:
        """Versions of all templates of the run for the rollouts of a candidate."""
        return self._versions[number]

    async def open(self) -> PromptCandidate:
        """The candidate that the search starts from: the newest versions, or those that it began with."""
        records = await read_candidates(self._store, self._run_id)
        self._records = {_key(each.texts): each for each in records}
        found = await self._store.resources(self._run_id, latest=False)
        versions = [each for each in found if each.kind == "prompt_template"]
        for each in versions:
            self._stored.setdefault(each.name, {}).setdefault(_content(Template.parse(each.value)), each.version)
        first = next((each for each in records if each.number == 0), None)
        start = {each.name: each.version for each in versions} if first is None else dict(first.versions)
        begun = [each for each in versions if each.version == start.get(each.name)]
        self._templates = {each.name: Template.parse(each.value) for each in begun}
        if first is None:
            texts = [component_texts(name, self._templates[name]) for name in self._searched]
            whole = {name: text for each in texts for name, text in each.items()}
            first = await self._record(CandidateRecord(number=0, texts=whole, versions=start, source="seed"))
        return self._met(first)

    async def propose(
        self, texts: Mapping[str, str], parents: Sequence[PromptCandidate], source: str
    ) -> PromptCandidate:
        """As of `SearchRun.propose`."""
        whole = {**self.proposed[0].texts, **(parents[0].texts if parents else {}), **texts}
        async with self._writing:
            known = self._records.get(_key(whole)) or await self._new(whole, parents, source)
            if known.number is None:
                raise InputError(known.refused)
            return self._met(known)

    async def _new(self, texts: Mapping[str, str], parents: Sequence[PromptCandidate], source: str) -> CandidateRecord:
        numbers = tuple(each.number for each in parents)
        record = CandidateRecord(number=None, texts=texts, parents=numbers, source=source)
        try:
            if unknown := sorted(set(texts) - set(self.proposed[0].texts)):
                raise InputError(f"{unknown[0]}: expected a text of {', '.join(self.proposed[0].texts)}")
            templates = {name: self._template(name, texts, source) for name in self._searched}
        except InputError as refused:
            return await self._record(replace(record, refused=str(refused)))
        versions, new = dict(self._versions[0]), []
        for name, template in templates.items():
            if (stored := self._stored[name].get(_content(template))) is not None:
                versions[name] = stored
                continue
            made_from = tuple(dict.fromkeys(self._versions[number][name] for number in numbers or (0,)))
            value = replace(template, parents=made_from).value()
            new.append(
                Resource(run_id=self._run_id, name=name, kind="prompt_template", value=value, parent=made_from[0])
            )
        # The versions first: a record names nothing that is not there, and a version without one is found by its text.
        for resource in await self._store.put_resources(new) if new else []:
            versions[resource.name] = resource.version
            self._stored[resource.name][_content(templates[resource.name])] = resource.version
        number = 1 + max(each.number for each in self._records.values() if each.number is not None)
        return await self._record(replace(record, number=number, versions=versions))

    def _template(self, name: str, texts: Mapping[str, str], source: str) -> Template:
        try:
            template = with_texts(name, replace(self._templates[name], source=source, parents=()), texts)
            check_candidate(self._templates[name], template)
        except InputError as refused:
            raise InputError(f"{name}: {refused}") from None
        return template

    async def _record(self, record: CandidateRecord) -> CandidateRecord:
        await self._store.put_resources([record.resource(self._run_id)])
        self._records[_key(record.texts)] = record
        return record

    def _met(self, record: CandidateRecord) -> PromptCandidate:
        assert record.number is not None  # those that were refused are not met
        if record.number not in self._versions:
            self._versions[record.number] = record.versions
            self.proposed.append(
                PromptCandidate(
                    number=record.number, texts=dict(record.texts), parents=record.parents, source=record.source
                )
            )
        return next(one for one in self.proposed if one.number == record.number)


def component_texts(name: str, template: Template) -> dict[str, str]:
    """The texts of a template that a search may change: NAME, or of messages NAME.0, NAME.1 and so on."""
    if isinstance(template.template, str):
        return {name: template.template}
    return {f"{name}.{place}": each["content"] for place, each in enumerate(template.template)}


def with_texts(name: str, template: Template, texts: Mapping[str, str]) -> Template:
    """The template with other texts. InputError where it does not parse."""
    changed: object = texts.get(name)
    if not isinstance(template.template, str):
        changed = [{**each, "content": texts[f"{name}.{place}"]} for place, each in enumerate(template.template)]
    value = template.value() | {"template": changed}
    del value["placeholders"]  # found anew, so that the sentence names both lists
    return Template.parse(value)


def _key(texts: Mapping[str, str]) -> Texts:
    return tuple(sorted(texts.items()))


def _content(template: Template) -> object:
    """The template without who made it."""
    text = template.template
    return template.format, text if isinstance(text, str) else tuple((one["role"], one["content"]) for one in text)


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
                task = public_task(rollout.task, self.config.data.private)  # a prompt could tell agents of the others
                found[rollout.id] = rollout_trace(
                    replace(rollout, task=task),
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
        found: dict[int, list[float]] = {}
        for (number, of, task, _), score in sorted(self._scores.items(), key=lambda one: one[0]):
            if (number, of) == (candidate.number, split):
                found.setdefault(task, []).append(score.reward)
        return {task: statistics.fmean(values) for task, values in found.items()}

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
        if unjudged := sum(not rollout.judged for rollout in rollouts):
            self.note(
                f"batch {self.batches}: {unjudged} rollouts, which infrastructure or the reward function failed, count as 0"
            )
        for key, rollout, words in zip(keys, rollouts, feedback, strict=True):
            self._scores[key] = rollout_score(key[2], rollout, words)
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
        whole = len(self.tasks["val"])
        known = [self.rewards(candidate) for candidate in self.book.proposed]
        means = [statistics.fmean(rewards.values()) for rewards in known if len(rewards) == whole]
        metrics = {
            "prompts/candidates": float(len(self.book.proposed)),
            "prompts/rollouts": float(self.budget.rollouts),
            "prompts/tokens": float(self.budget.used.tokens),
            "prompts/batch_mean": statistics.fmean(self._scores[key].reward for key in keys),
            "cost/prompt_tokens": float(used.prompt_tokens),
            "cost/sampled_tokens": float(used.sampled_tokens),
        }
        if means:
            metrics["prompts/best_mean"] = max(means)
        await self.logger.record(self.batches, "prompts", metrics)
        self.progress.phase("rollouts", self.budget.rollouts, self.budget.bounds.max_rollouts)
        best = metrics.get("prompts/best_mean")
        if best is not None and best != self._best:
            self._best = best
            self.progress.evaluated(self.batches, "best prompts", best)


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
