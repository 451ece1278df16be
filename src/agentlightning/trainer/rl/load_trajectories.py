"""Trajectories of a training step, read from the store once for all policies that learn from them.

`step_planner.py` drives it. It knows nothing of algorithms; `algorithms.selection` tells which calls are whose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from agentlightning.adapters.trajectories import trajectories
from agentlightning.algorithms.selection import Selection
from agentlightning.engines.base import Metrics
from agentlightning.errors import AgentError
from agentlightning.records import Call, ConsumedInputs, Rollout
from agentlightning.store.base import LightningStore
from agentlightning.store.gateway_events import BROKEN, BROKEN_SPANS, broken_counts
from agentlightning.store.scan import read_images
from agentlightning.trainer.collect import check_calls_recorded
from agentlightning.trainer.data.air_report import AirTally
from agentlightning.trainer.progress import Progress
from agentlightning.trainer.rl.step_inputs import read_inputs, with_failures
from agentlightning.trainer.rl.tree_rollouts import TreeTally
from agentlightning.trainer.rl.utilisation import TimeTally
from agentlightning.training_types import Trajectory

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
    _rollouts: list[Rollout] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
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
        rollouts = with_failures(rollouts, self.on_failure)
        for start in range(0, len(rollouts), MAX_ROLLOUTS):
            await self._read(rollouts[start : start + MAX_ROLLOUTS], fixed or {})
        self._broken += await broken_spans(self.store, rollouts)

    def metrics(self) -> Metrics:
        """Counts of rollouts and calls, of broken spans by cause, of AIR's rules and of trees."""
        failed = sum(rollout.state != "succeeded" for rollout in self._rollouts)
        refused = sum(rollout.refused for rollout in self._rollouts)
        found = {"rollouts": float(len(self._rollouts)), "failed": float(failed)}
        found["refused_share"] = refused / max(1, len(self._rollouts))
        found |= {name: float(self._counts[name]) for name in ("calls", "forked_calls", "invalid")}
        if compactions := self._counts["compactions"]:
            found["compactions"] = float(compactions)
        if self._broken:
            found["broken_spans"] = float(self._broken.total())
            found |= {f"rollout/broken_spans/{cause}": float(count) for cause, count in self._broken.items()}
        return found | self._air.metrics() | (self.trees.metrics() if self.trees else {})

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
        for policy, selection in self.selections.items():
            self.selected[policy] |= {call.id for call in calls if selection(call)}
        self.names |= _names(calls)
        forked = sum(call.fork_cause is not None for call in calls)
        compactions = sum(one.compaction is not None for trajectory in kept for one in trajectory.transitions)
        self._counts.update(calls=len(calls), forked_calls=forked, compactions=compactions, invalid=len(left_out))


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


async def broken_spans(store: LightningStore, rollouts: Sequence[Rollout]) -> Counter[str]:
    """Broken spans by cause; spans are read only where a rollout's warning tells of broken ones."""
    causes: Counter[str] = Counter()
    for rollout in rollouts:  # one at a time: an attempt may have many megabytes of spans
        for span in await store.spans([rollout.id]) if BROKEN in (rollout.warning or "") else ():
            if span.name == BROKEN_SPANS and span.attempt == rollout.attempt:
                causes.update(broken_counts(span.attributes))
    return causes
