"""Credit inputs: data that a credit rule needs besides the step's groups: earlier steps from the store, a judge's scores,
the returns of forks.

The step planner drives it before the algorithm plans. What it gathers is recorded, so that a step that is executed again
gathers the same and pays nothing. A further input is a name in a rule's `needs`, a field of `Evidence` and a method here.
"""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import httpx

from agentlightning.adapters.trajectories import trajectories
from agentlightning.algorithms.credit import CREDIT, Evidence
from agentlightning.algorithms.credit.forked import call_estimates, chosen_calls
from agentlightning.algorithms.credit.judge import judge_groups
from agentlightning.algorithms.credit.rule import HISTORY
from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.rewards import shaped_air
from agentlightning.errors import ConfigError, UnjudgeableError
from agentlightning.records import FINAL_STATES, Call, NewRollout, Rollout, Step
from agentlightning.runner.llm_judge import ChatEndpoint, bearer
from agentlightning.runtime.code_loader import load_function
from agentlightning.runtime.disk import open_private
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.forks import calls_before, forks_of, replay_ended
from agentlightning.trainer.load_trajectories import DISCARDED, fixed_inputs, read_inputs, with_failures
from agentlightning.trainer.progress import Progress, Silent
from agentlightning.trainer.scheduler import RolloutCollector
from agentlightning.training_types import Trajectory, Transition

READ_BATCH = 128
"""Rollouts whose calls are read at a time: calls hold all text."""
TIMEOUT_S = 300.0
PRIORITY = 1
"""Of forks: their step waits for them, and for none of the rollouts that run ahead of it."""
S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkReturns:
    """Returns and numbers of the forks of a step."""

    returns: Mapping[str, Mapping[str, Sequence[float]]]
    """Of the forks that count, by rollout and by the id of the call that they sampled first."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A state to fork."""

    rollout: Rollout
    calls: int
    """Those to replay before it."""
    call_id: str
    """The call that follows."""
    number: int
    """Of that call among those that are learned from: what a step that was opened does not find otherwise again."""

    @property
    def group_id(self) -> str:
        """The group of its forks: of names alone, since completions are drawn by it, and ids are others in every run."""
        return f"fork:credit:{self.rollout.group_id}:{self.rollout.replica}:{self.number}"


def _places_of(rollout: Rollout, trajectory: Trajectory, calls: Sequence[Call], chosen: set[str]) -> list[_Place]:
    places: list[_Place] = []
    ids = sorted(call.call_id for call in trajectory.transitions)
    places_by_id = calls_before(calls)
    for number, (previous, call_id) in enumerate(pairwise(ids), 1):
        before = places_by_id.get(call_id)
        further_choice = before == places_by_id.get(previous)  # of the same request
        if before is not None and not further_choice and chosen & {previous, call_id}:
            places.append(_Place(rollout=rollout, calls=before, call_id=call_id, number=number))
    return places


def _by_rollout(calls: Sequence[Call]) -> defaultdict[str, list[Call]]:
    found: defaultdict[str, list[Call]] = defaultdict(list)
    for call in calls:
        found[call.rollout_id].append(call)
    return found


@dataclass(kw_only=True)
class CreditInputReader:
    """Gathers evidence for one run."""

    algorithm: LightningRL
    store: LightningStore
    run_id: str
    folder: Path
    """Folder of the judge's replies."""
    on_failure: Literal["drop", "zero"] = "drop"
    collector: RolloutCollector | None = None
    """Waits for forks. None: none is enqueued, and those that are recorded are read."""
    progress: Progress = field(default_factory=Silent)
    transport: httpx.AsyncBaseTransport | None = None

    async def gather(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> tuple[Evidence, dict[str, float]]:
        """The evidence for `step`, and what it cost."""
        rule = self.algorithm.rule
        settings = self.algorithm.rule_settings
        evidence, cost = Evidence(), dict[str, float]()
        if "history" in rule.needs:
            evidence = replace(evidence, history=await self._history(step, settings.get("history", HISTORY)))
        if "fork_returns" in rule.needs:
            sampled = await self.fork_returns(step, groups)
            evidence, cost = replace(evidence, fork_returns=sampled.returns), cost | sampled.metrics
        if "scores" in rule.needs:
            async with httpx.AsyncClient(timeout=TIMEOUT_S, transport=self.transport) as client:
                judge = ChatEndpoint(client, settings["url"], bearer(settings["key_env"]))
                asked = {name: settings[name] for name in ("model", "instructions")}
                judged = await judge_groups(groups, judge, _Replies(self.folder), **asked)
            if judged.unjudgeable is not None:
                if step == 1 and not judged.scores:  # it may be the judge's settings
                    raise UnjudgeableError(judged.unjudgeable)
                self.progress.note(f"step {step}: left out without scores: {judged.unjudgeable}")
            evidence, cost = replace(evidence, scores=judged.scores), cost | judged.stats
        return evidence, cost

    async def _history(self, step: int, steps: int) -> list[list[Trajectory]]:
        """Groups of the latest `steps` steps before this one that were learned from, oldest first."""
        if not steps:
            return []
        earlier = await self.store.steps(self.run_id, after=step - 1 - steps, limit=steps)
        groups: list[list[Trajectory]] = []
        for one in earlier:
            if one.state == "closed" and one.step < step:
                groups += await self._groups(one)
        return groups

    async def _groups(self, step: Step) -> list[list[Trajectory]]:
        """The groups of an earlier step as that step read them. ConflictError where their records are gone."""
        ids = [one.rollout_id for one in step.consumed if one.outcome not in DISCARDED]
        fixed, kept = fixed_inputs(step), list[Trajectory]()
        for start in range(0, len(ids), READ_BATCH):
            part = ids[start : start + READ_BATCH]
            found = {rollout.id: rollout for rollout in await self.store.rollouts(RolloutQuery(ids=part))}
            rollouts = with_failures([found[key] for key in part], self.on_failure)
            inputs = await read_inputs(self.store, rollouts, fixed)
            kept += trajectories(rollouts, inputs.calls, inputs.rewards, keep_unrewarded=True)[0]
        by_group: defaultdict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in kept:
            by_group[trajectory.group_id].append(trajectory)
        return shaped_air(list(by_group.values()), self.algorithm.call_gamma)

    async def fork_returns(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> ForkReturns:
        """Samples forks around the chosen calls of these groups, and waits until all have finished."""
        settings = self.algorithm.rule_settings
        groups = self.algorithm.learned_groups(groups)
        chosen = {one.rollout_id: chosen_calls(one, settings["calls"]) for group in groups for one in group}
        places = await self._places([one for group in groups for one in group], chosen)
        wanted = [
            replace(fork, kind="credit", group_id=place.group_id, mode="eval", step=step, priority=PRIORITY)
            for place in places
            for fork in forks_of(place.rollout, place.calls, settings["forks"])
        ]
        forks = await self._finished(wanted)
        found = await self._read_forks(forks, {place.group_id: place for place in places})
        variances = [
            call.variance
            for group in groups
            for one, calls in zip(group, call_estimates(group, found.returns), strict=True)
            if one.rollout_id in found.returns
            for call in calls
        ]
        if variances:
            found.metrics["forks/advantage_variance"] = statistics.fmean(variances)
        return found

    async def _places(self, members: Sequence[Trajectory], chosen: Mapping[str, Sequence[Transition]]) -> list[_Place]:
        """The states before and after the chosen calls, but the first, in which all of the group began, and the last."""
        places = []
        for start in range(0, len(members), READ_BATCH):
            part = members[start : start + READ_BATCH]
            ids = [one.rollout_id for one in part]
            rollouts = {one.id: one for one in await self.store.rollouts(RolloutQuery(ids=ids))}
            calls = _by_rollout(await self.store.calls(ids))
            for one in part:
                rollout = rollouts[one.rollout_id]
                recorded = [call for call in calls[rollout.id] if call.attempt == rollout.attempt]
                places += _places_of(rollout, one, recorded, {call.call_id for call in chosen[rollout.id]})
        return places

    async def _finished(self, wanted: Sequence[NewRollout]) -> list[Rollout]:
        if not wanted:
            return []
        if self.collector is not None:
            return await self.collector.collect(wanted, partial(self.progress.phase, "fork"))
        names = {(one.group_id, one.replica) for one in wanted}
        query = RolloutQuery(run_id=wanted[0].run_id, group_ids=sorted({group for group, _ in names}))
        found = await self.store.rollouts(query)
        return [one for one in found if (one.group_id, one.replica) in names and one.state in FINAL_STATES]

    async def _read_forks(self, forks: Sequence[Rollout], places: Mapping[str, _Place]) -> ForkReturns:
        """The returns of those that count: whose replay did not end early, and whose reward is known, which is 0 for one
        that failed where the run counts failures so."""
        returns: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        ended = failed = tokens = 0
        for start in range(0, len(forks), READ_BATCH):
            part = [one for one in forks[start : start + READ_BATCH] if one.state != "cancelled"]
            inputs = await read_inputs(self.store, with_failures(part, self.on_failure), {})
            calls = _by_rollout(inputs.calls)
            whole = {one.id: one for one in part if replay_ended(one, calls[one.id]) is None}
            ended += len(part) - len(whole)
            failed += sum(one.state == "failed" for one in part)
            tokens += sum(len(call.sampled_ids) for call in inputs.calls if call.policy and call.replayed_id is None)
            told = trajectories(
                with_failures(list(whole.values()), self.on_failure), inputs.calls, inputs.rewards, keep_unrewarded=True
            )
            [counted] = self.algorithm.settled([told[0]])
            for one in counted:
                place = places[one.group_id]
                returns[place.rollout.id][place.call_id].append(one.reward)
        spans = [(one.started_ns, one.finished_ns) for one in forks]
        metrics = {
            "forks/count": float(len(forks)),
            "forks/failed": float(failed),
            "forks/replay_ended_share": ended / max(1, len(forks)),
            "cost/fork_sampled_tokens": float(tokens),
            "cost/fork_agent_s": sum(max(0, end - begun) for begun, end in spans if begun and end) / S,
        }
        return ForkReturns(returns={one: dict(found) for one, found in returns.items()}, metrics=metrics)


def check_credit_inputs(algorithm: LightningRL) -> None:
    """ConfigError where the credit rule needs what this process cannot give; AgentError where code that it names fails."""
    rule, settings = algorithm.rule, algorithm.rule_settings
    if rule.name in CREDIT:  # in a rule of somebody's own the names may mean something else
        for name, what in (("key", "key function"), ("features", "feature function")):
            if settings.get(name) is not None:
                load_function(settings[name], ("transition",), what)
    if "scores" not in rule.needs:
        return
    if settings["url"] is None:
        raise ConfigError(
            f"algorithm.credit.url: is required with credit = {rule.name!r}: https://HOST/v1 of the judge"
        )
    if settings["key_env"] is not None and not os.environ.get(settings["key_env"]):
        raise ConfigError(f"algorithm.credit.key_env: the variable {settings['key_env']} is not set")


@dataclass(frozen=True)
class _Replies:
    """A file a reply, written whole or not at all."""

    folder: Path

    async def get(self, key: str) -> str | None:
        try:
            return (self.folder / key).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None

    async def put(self, key: str, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{key}.tmp"
        with open_private(temporary, "wb") as file:
            file.write(text.encode())
        temporary.replace(self.folder / key)
