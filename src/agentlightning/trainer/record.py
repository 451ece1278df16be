"""Record: a step's rollouts as the store has them, read once for all policies that learn from them.

`lessons.py` drives it. It knows nothing of algorithms; which calls are whose is told by `algorithms.selection`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Literal

from agentlightning.adapters.trajectories import trajectories
from agentlightning.algorithms.selection import Selection
from agentlightning.engines.base import Metrics
from agentlightning.errors import AgentError
from agentlightning.store.base import LightningStore
from agentlightning.tracing.naming import named_calls
from agentlightning.trainer.air import AirTally
from agentlightning.trainer.broken import broken_spans
from agentlightning.trainer.collect import refuse_silence
from agentlightning.trainer.progress import Progress
from agentlightning.types import Call, Rollout, Trajectory

RECORD_BATCH = 128
"""Rollouts whose calls are read from the store at a time: bounds the size of one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What is recorded of some rollouts."""

    groups: list[list[Trajectory]]
    """In the order of the rollouts."""
    selected: Mapping[str, set[str]]
    """By policy: the ids of the calls that it is trained on."""
    names: set[str]
    """By which calls of policies could be selected: agents' names and the models that were asked for."""
    metrics: Metrics
    """rollouts, calls, forked_calls, failed and invalid: counts; what AIR's rules said; and what was broken in spans."""


async def read_record(
    store: LightningStore,
    rollouts: Seq[Rollout],
    selections: Mapping[str, Selection],
    on_failure: Literal["drop", "zero"],
    progress: Progress,
    air_rules: Iterable[str] = (),
) -> Recorded:
    """The trajectories of rollouts, with all step rewards, AIR's among them.

    AgentError where all rollouts failed, NoCallsError where none has a call.
    """
    silence = refuse_silence(rollouts)
    if silence is not None:
        progress.note(silence)
    failed = [rollout for rollout in rollouts if rollout.state != "succeeded"]
    if failed and len(failed) == len(rollouts):
        raise AgentError(f"all {len(rollouts)} rollouts of the step failed, the first with: {failed[0].error}")
    if on_failure == "zero":
        rollouts = [rollout if rollout.state == "succeeded" else replace(rollout, reward=0.0) for rollout in rollouts]
    groups: defaultdict[str, list[Trajectory]] = defaultdict(list)
    selected: dict[str, set[str]] = {policy: set() for policy in selections}
    names: set[str] = set()
    calls = forked = invalid = 0
    air = AirTally(air_rules)
    for start in range(0, len(rollouts), RECORD_BATCH):  # calls hold all text, too: never those of a whole step
        part = rollouts[start : start + RECORD_BATCH]
        ids = [rollout.id for rollout in part]
        found = await named_calls(store, await store.calls(ids))
        rewards = await store.rewards(ids)
        air.add(part, found, rewards)
        kept, left_out = trajectories(part, found, rewards, keep_unrewarded=True)
        for trajectory in kept:
            groups[trajectory.group_id].append(trajectory)
        for policy, selection in selections.items():
            selected[policy] |= {call.id for call in found if selection(call)}
        names |= _names(found)
        calls += len(found)
        forked += sum(call.fork_cause is not None for call in found)
        invalid += len(left_out)
    broken = await broken_spans(store, rollouts)
    counts = {"rollouts": len(rollouts), "calls": calls, "forked_calls": forked, "failed": len(failed)}
    return Recorded(
        groups=list(groups.values()),
        selected=selected,
        names=names,
        metrics={name: float(count) for name, count in (counts | {"invalid": invalid}).items()}
        | air.metrics()
        | broken,
    )


def seen_by(groups: Seq[Seq[Trajectory]], selected: set[str]) -> list[list[Trajectory]]:
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


def _names(calls: Seq[Call]) -> set[str]:
    return {name for call in calls if call.policy for name in (call.agent, call.model) if name}
