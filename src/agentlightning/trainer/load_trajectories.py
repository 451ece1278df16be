"""Trajectories of a training step, read from the store once for all policies that learn from them, and counted.

`step.py` drives it, and whatever looks back at earlier steps. What the first reading found is written into the step's list
when it opens (`ConsumedInputs`) and counts from then on, whatever comes later. Knows nothing of algorithms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from agentlightning.adapters.side_calls import side_calls
from agentlightning.adapters.trajectories import JUDGE, counts, trajectories
from agentlightning.algorithms.selection import Selection
from agentlightning.config.run import Config
from agentlightning.engines.base import Metrics
from agentlightning.errors import AgentError, ConflictError
from agentlightning.records import Call, Cause, ConsumedInputs, Outcome, Reward, Rollout, Step
from agentlightning.store.base import LightningStore
from agentlightning.store.gateway_events import BROKEN, BROKEN_SPANS, broken_counts
from agentlightning.store.rules import AIR_PREFIX
from agentlightning.store.scan import by_attempt, read_images
from agentlightning.tracing.tool_uses import named_calls
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.scheduler import TreeTally, check_calls_recorded
from agentlightning.training_types import Trajectory

S = 1e9


def slots_of(config: Config, policies: int = 1) -> Metrics:
    """Bounds of what goes on at a time: rollouts of workers, calls of samplers; those that are started elsewhere have none
    that is known here."""
    agent, engine = config.agent, config.engine
    found = {"workers/slots": float(agent.workers * agent.concurrency)} if agent.workers else {}
    if engine.name == "local" and engine.sampler.type == "local":
        found["sampler/slots"] = float(engine.max_num_seqs * policies)
    return found


@dataclass(slots=True)
class TimeTally:
    """Sums over the rollouts of one step; keeps two numbers per call."""

    _rollouts: int = 0
    _sums: Counter[str] = field(default_factory=Counter)
    """Nanoseconds queued, in model calls and after the last one; tokens."""
    _running_ns: list[int] = field(default_factory=list)
    _calls: list[tuple[int, int]] = field(default_factory=list)
    _external_calls: list[tuple[int, int]] = field(default_factory=list)

    def add(self, rollouts: Iterable[Rollout], calls: Sequence[Call]) -> None:
        """Rollouts that have finished, with the calls of their last attempts."""
        by_rollout: dict[str, list[tuple[int, int]]] = {}
        for call in calls:
            times = call.started_ns, call.finished_ns
            if call.policy:
                by_rollout.setdefault(call.rollout_id, []).append(times)
                self._sums["sampled"] += len(call.sampled_ids) if call.replayed_id is None else 0
                self._sums["prompt"] += call.prompt_tokens if "." not in call.id else 0  # further choices share theirs
            else:  # of a rollout's time, a call to an external model is the agent's own affair, like a tool
                self._external_calls.append(times)
                self._sums["external"] += sum(used_tokens(call))
        for rollout in rollouts:
            started, finished = rollout.started_ns, rollout.finished_ns
            if started is None or finished is None:
                continue
            within = by_rollout.get(rollout.id, [])
            self._rollouts += 1
            self._running_ns.append(max(0, finished - started))
            self._sums["queued"] += max(0, started - rollout.created_ns)
            self._sums["model"] += covered(within)
            self._sums["after"] += max(0, finished - max((end for _, end in within), default=started))
            self._calls += within

    def metrics(self, step_s: float, slots: Metrics, external: bool = False) -> Metrics:
        """By the wall time of the step; none where it has no rollout. external: the run has external models."""
        if not self._rollouts or step_s <= 0:
            return {}
        count, running_s = self._rollouts, sum(self._running_ns) / S
        busy_s = covered(self._calls) / S
        outside_s = max(0.0, running_s - (self._sums["model"] + self._sums["after"]) / S)
        found = {
            "rollout/queued_s": self._sums["queued"] / S / count,
            "rollout/duration_s": running_s / count,
            "rollout/duration_max_s": max(self._running_ns) / S,
            "rollout/model_s": self._sums["model"] / S / count,
            "rollout/between_calls_s": outside_s / count,
            "rollout/after_calls_s": self._sums["after"] / S / count,
            "workers/running_mean": running_s / step_s,
            "workers/queued_mean": self._sums["queued"] / S / step_s,
            "sampler/busy_share": min(1.0, busy_s / step_s),
            "gateway/busy_share": min(1.0, covered([*self._calls, *self._external_calls]) / S / step_s),
            "cost/agent_s": running_s,
            "cost/prompt_tokens": float(self._sums["prompt"]),
            "cost/sampled_tokens": float(self._sums["sampled"]),
        }
        if external:
            found["cost/external_tokens"] = float(self._sums["external"])
        if busy_s:
            found["sampler/calls_mean"] = sum(end - start for start, end in self._calls) / S / busy_s
            found["sampler/tokens_per_s"] = self._sums["sampled"] / busy_s
        if "workers/slots" in slots:
            found["workers/busy_share"] = min(1.0, found["workers/running_mean"] / slots["workers/slots"])
        return found | slots


def used_tokens(call: Call) -> tuple[int, int]:
    """Tokens of the prompt and of the completion: recorded ones, else those that an external model reported."""
    reported = [call.usage.get(name) for name in ("prompt_tokens", "sampled_tokens")]
    prompt, sampled = (count if isinstance(count, int) and count > 0 else 0 for count in reported)
    return call.prompt_tokens or prompt, len(call.sampled_ids) or sampled


def covered(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of the union of these intervals.

    >>> covered([(0, 4), (2, 6), (8, 9), (3, 1)])
    7
    """
    total, reached = 0, None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            total, reached = total + max(0, end - start), max(start, end)
        elif end > reached:
            total, reached = total + end - reached, end
    return total


DISCARDED: frozenset[Outcome] = frozenset({"stale", "overprovisioned"})
"""Outcomes of rollouts that a step consumes without learning from them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The records of some rollouts."""

    calls: list[Call]
    """All calls of their latest attempts. Those that are learned from are `delivered`, and those that repeat what was
    sampled for another rollout; what the others hold is context."""
    rewards: list[Reward]
    """Those that count."""
    consumed: dict[str, ConsumedInputs]
    """By rollout: which of these it is learned from."""

    @property
    def delivered(self) -> list[Call]:
        """The calls that are learned from."""
        return [call for call in self.calls if call.learnable]


def fixed_inputs(step: Step) -> dict[str, ConsumedInputs]:
    """By rollout, what a step that was opened learns from; without those of which its list does not say it."""
    return {one.rollout_id: one.inputs for one in step.consumed if one.inputs is not None}


def with_failures(rollouts: Sequence[Rollout], on_failure: Literal["drop", "zero"]) -> list[Rollout]:
    """The rollouts as a step learns from them: where failures count as zero, those whose agents gave up have that reward."""
    if on_failure == "drop":
        return [*rollouts]
    return [replace(one, reward=0.0) if one.gave_up and one.state == "failed" else one for one in rollouts]


async def read_inputs(
    store: LightningStore, rollouts: Sequence[Rollout], fixed: Mapping[str, ConsumedInputs]
) -> StepInputs:
    """The records of these rollouts: those that are `fixed`, and of other rollouts all that is there now.

    ConflictError where one that is fixed is not recorded any more.
    """
    ids = [rollout.id for rollout in rollouts]
    recorded, rewards = by_attempt(await store.calls(ids)), by_attempt(await store.rewards(ids))
    unread = [call for calls in recorded.values() for call in calls if call.rollout_id not in fixed]
    named = by_attempt(await named_calls(store, unread))
    found = StepInputs(calls=[], rewards=[], consumed={})
    for rollout in rollouts:
        place = rollout.id, rollout.attempt
        told = [reward for reward in rewards[place] if counts(reward, rollout)]
        inputs = fixed.get(rollout.id)
        if inputs is None:
            inputs = _inputs(rollout, recorded[place], named[place], told)
        _check_present(rollout, inputs, recorded[place], rewards[place])
        agents, calls, kept = dict(inputs.agents), {*inputs.calls, *inputs.replayed}, set(inputs.rewards)
        found.calls.extend(
            replace(call, delivered=call.id in calls, agent=agents.get(call.id, call.agent)) for call in recorded[place]
        )
        found.rewards.extend(reward for reward in rewards[place] if reward.id in kept)
        found.consumed[rollout.id] = inputs
    return found


def _inputs(rollout: Rollout, calls: Sequence[Call], named: Sequence[Call], told: Sequence[Reward]) -> ConsumedInputs:
    names = {call.id: call.agent for call in named if call.agent is not None}
    return ConsumedInputs(
        attempt=rollout.attempt,
        calls=[call.id for call in calls if call.learnable],
        rewards=[reward.id for reward in told],
        agents=[(call.id, names[call.id]) for call in calls if names.get(call.id, call.agent) != call.agent],
        replayed=[call.id for call in calls if call.shared],
    )


def _check_present(rollout: Rollout, inputs: ConsumedInputs, calls: Sequence[Call], rewards: Sequence[Reward]) -> None:
    learned = f"rollout {rollout.id}: a step of run {rollout.run_id} learned from"
    if rollout.attempt != inputs.attempt:
        raise ConflictError(f"{learned} attempt {inputs.attempt}, its latest one is {rollout.attempt}")
    known = {call.id for call in calls} | {reward.id for reward in rewards}
    if missing := [each for each in (*inputs.calls, *inputs.replayed, *inputs.rewards) if each not in known]:
        raise ConflictError(
            f"{learned} {len(missing)} records that are gone, {missing[0]} first (were records pruned or deleted?)"
        )


MAX_ROLLOUTS = 128
"""Rollouts whose calls are read at a time: calls hold all text, too, and those of a whole step are never held at once."""


@dataclass(slots=True, kw_only=True)
class LoadedTrajectories:
    """The rollouts of a step so far, with all step rewards, AIR's among them."""

    store: LightningStore
    selections: Mapping[str, Selection]
    """By policy: whose calls it is trained on."""
    on_failure: Literal["drop", "zero"]
    progress: Progress
    air_rules: Iterable[str] = ()
    trees: TreeTally | None = None
    """Counts what they share, where they are sampled as trees."""
    groups: dict[str, list[Trajectory]] = field(default_factory=dict)
    """By id, in the order of the rollouts."""
    selected: dict[str, set[str]] = field(init=False)
    """By policy: the ids of the calls that it is trained on."""
    inputs: dict[str, ConsumedInputs] = field(default_factory=dict)
    """By rollout: the records that it is learned from."""
    names: set[str] = field(default_factory=set)
    """Agents' names and the models that were asked for: by them calls can be selected."""
    times: TimeTally = field(default_factory=TimeTally)
    dropped: set[str] = field(default_factory=set)
    """Groups that are left out: one of their rollouts was not judged, after all its attempts."""
    _rollouts: list[Rollout] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _causes: Counter[str] = field(default_factory=Counter)
    """Ends of attempts, also of those that were followed by another."""
    _broken: Counter[str] = field(default_factory=Counter)
    _air: AirTally = field(init=False)

    def __post_init__(self) -> None:
        self.selected = {policy: set() for policy in self.selections}
        self._air = AirTally(self.air_rules)

    async def add(self, rollouts: Sequence[Rollout], fixed: Mapping[str, ConsumedInputs] | None = None) -> None:
        """Reads these rollouts, those that are `fixed` by a step that was opened as it read them. AgentError where all
        rollouts so far failed, NoCallsError where none has a call, ConflictError where a fixed record is gone."""
        self._rollouts += rollouts
        silence = check_calls_recorded(self._rollouts)
        if silence is not None:
            self.progress.note(silence)
        failed = [rollout for rollout in self._rollouts if rollout.state != "succeeded"]
        if failed and len(failed) == len(self._rollouts):
            why = failed[0].warning if failed[0].refused else failed[0].error
            raise AgentError(f"all {len(failed)} rollouts of the step failed, the first with: {why}")
        self._causes += await _ends(self.store, rollouts)
        self._drop([rollout for rollout in rollouts if not rollout.judged])
        rollouts = with_failures([one for one in rollouts if one.group_id not in self.dropped], self.on_failure)
        for start in range(0, len(rollouts), MAX_ROLLOUTS):
            await self._read(rollouts[start : start + MAX_ROLLOUTS], fixed or {})
        self._broken += await broken_spans(self.store, rollouts)

    def metrics(self) -> Metrics:
        """Counts of rollouts and calls, of broken spans by cause, of AIR's rules and of trees."""
        failed = sum(rollout.state != "succeeded" for rollout in self._rollouts)
        refused = sum(rollout.refused for rollout in self._rollouts)
        found = {"rollouts": float(len(self._rollouts)), "failed": float(failed)}
        found["refused_share"] = refused / max(1, len(self._rollouts))
        ended = max(1, self._causes.total())
        found |= {f"rollout/cause/{cause}": self._causes[cause] / ended for cause in get_args(Cause)}
        if self.dropped:
            found["dropped_groups"] = float(len(self.dropped))
        found |= {name: float(self._counts[name]) for name in ("calls", "forked_calls", "invalid")}
        if self._counts["side_calls"]:
            found["side_calls"] = float(self._counts["side_calls"])
        if self._broken:
            found["broken_spans"] = float(self._broken.total())
            found |= {f"rollout/broken_spans/{cause}": float(count) for cause, count in self._broken.items()}
        return found | self._air.metrics() | (self.trees.metrics() if self.trees else {})

    def outcome(self, rollout: Rollout) -> Outcome:
        """Of a rollout that no plan has."""
        return "dropped" if rollout.group_id in self.dropped else "invalid"

    def _drop(self, unjudged: Sequence[Rollout]) -> None:
        """Leaves the whole groups of these rollouts out: a smaller group would compare as if they had never been."""
        if not unjudged:
            return
        groups = {rollout.group_id for rollout in unjudged}
        self.dropped |= groups
        ended = ", ".join(f"{cause} {count}" for cause, count in Counter(str(one.cause) for one in unjudged).items())
        why = (unjudged[0].error or "an unknown error").strip().splitlines()[-1]
        self.progress.note(
            f"{_groups(len(groups))} left out: after all attempts, not the agent but something else "
            f"failed {len(unjudged)} of their rollouts ({ended}), the first with: {why}"
        )

    async def _read(self, rollouts: Sequence[Rollout], fixed: Mapping[str, ConsumedInputs]) -> None:
        inputs = await read_inputs(self.store, rollouts, fixed)
        self.inputs |= inputs.consumed
        calls = inputs.delivered
        self._air.add(rollouts, calls, inputs.rewards)
        self.times.add(rollouts, inputs.calls)
        if self.trees:
            self.trees.add(rollouts, inputs.calls)
        images = await read_images(self.store, inputs.calls)
        kept, left_out = trajectories(rollouts, inputs.calls, inputs.rewards, keep_unrewarded=True, images=images)
        for trajectory in kept:
            self.groups.setdefault(trajectory.group_id, []).append(trajectory)
        self._counts["side_calls"] += sum(len(side_calls(own)) for own in by_attempt(inputs.calls).values())
        for policy, selects in self.selections.items():
            self.selected[policy] |= selects.ids(inputs.calls) & {call.id for call in calls}
        self.names |= _names(calls)
        forked = sum(call.fork_cause is not None for call in calls)
        self._counts.update(calls=len(calls), forked_calls=forked, invalid=len(left_out))


class AirTally:
    """Counts and sums of each AIR rule's rewards over a step's calls."""

    def __init__(self, rules: Iterable[str]) -> None:
        self._total = dict.fromkeys(rules, 0.0)
        self._count = Counter[str]()
        self._calls = 0

    def add(self, rollouts: Sequence[Rollout], calls: Sequence[Call], rewards: Iterable[Reward]) -> None:
        """Some rollouts with the calls of their latest attempts; other rewards than the rules' count nothing."""
        self._calls += sum(call.agent != JUDGE for call in calls)
        attempts = {rollout.id: rollout.attempt for rollout in rollouts}
        for reward in rewards:
            name = reward.name.removeprefix(AIR_PREFIX)
            if reward.source == "air" and name in self._total and attempts.get(reward.rollout_id) == reward.attempt:
                self._total[name] += reward.value
                self._count[name] += 1

    def metrics(self) -> Metrics:
        """By rule, the mean reward per call and the share of calls that it rewarded; none without rules."""
        calls = max(1, self._calls)
        found = {f"air/{name}/reward_mean": total / calls for name, total in self._total.items()}
        return found | {f"air/{name}/share": self._count[name] / calls for name in self._total}


def seen_by(groups: Sequence[Sequence[Trajectory]], selected: set[str]) -> list[list[Trajectory]]:
    """The groups as a policy sees them: calls that it is not trained on are context."""
    return [
        [
            trajectory
            if all(transition.call_id in selected for transition in trajectory.transitions)
            else replace(
                trajectory,
                transitions=[
                    replace(transition, trained=transition.call_id in selected) for transition in trajectory.transitions
                ],
            )
            for trajectory in group
        ]
        for group in groups
    ]


def _names(calls: Sequence[Call]) -> set[str]:
    return {name for call in calls if call.policy for name in (call.agent, call.model) if name}


async def _ends(store: LightningStore, rollouts: Sequence[Rollout]) -> Counter[str]:
    """Attempts of these rollouts by cause; cancelled ones have none."""
    again = [rollout.id for rollout in rollouts if rollout.attempt > 1]
    attempts = await store.attempts(again) if again else []
    once = [rollout.cause for rollout in rollouts if rollout.attempt <= 1]
    return Counter(cause for cause in (*once, *(one.cause for one in attempts)) if cause is not None)


def _groups(count: int) -> str:
    return "1 group is" if count == 1 else f"{count} groups are"


async def broken_spans(store: LightningStore, rollouts: Sequence[Rollout]) -> Counter[str]:
    """Broken spans by cause; spans are read only where a rollout's warning tells of broken ones."""
    causes: Counter[str] = Counter()
    for rollout in rollouts:  # one at a time: an attempt may have many megabytes of spans
        for span in await store.spans([rollout.id]) if BROKEN in (rollout.warning or "") else ():
            if span.name == BROKEN_SPANS and span.attempt == rollout.attempt:
                causes.update(broken_counts(span.attributes))
    return causes
