"""Utilisation: how long a step's rollouts waited, ran and called the model, and how busy workers and sampler so were.

`load_trajectories.py` adds the records that a step reads anyway; the loop asks for the metrics once the step's time is
known. Times are those of the records: a rollout's by the store's clock, a call's by its gateway's. With
trainer.max_staleness above 0 rollouts overlap several steps; a step then counts its own rollouts whole, which over several
steps comes to the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agentlightning.config import Config
from agentlightning.engines.base import Metrics
from agentlightning.types import Call, Rollout

S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Bounds of what goes on at a time; None where they are not known here."""

    workers: int | None
    """Rollouts."""
    sampler: int | None
    """Calls."""


def slots_of(config: Config, policies: int = 1) -> Slots:
    """Of workers that are started elsewhere, and of samplers that are not ours, nothing is known."""
    agent, engine = config.agent, config.engine
    ours = engine.name == "local" and engine.sampler == "local"
    return Slots(
        workers=agent.workers * agent.concurrency if agent.workers else None,
        sampler=engine.max_num_seqs * policies if ours else None,
    )


@dataclass(slots=True)
class TimeTally:
    """Sums over the rollouts of one step; keeps two numbers per call."""

    _rollouts: int = 0
    _queued_ns: int = 0
    _running_ns: list[int] = field(default_factory=list)
    _model_ns: int = 0
    _after_ns: int = 0
    _tokens: int = 0
    _calls: list[tuple[int, int]] = field(default_factory=list)

    def add(self, rollouts: Iterable[Rollout], calls: Sequence[Call]) -> None:
        """Rollouts that have finished, with the calls of their last attempts."""
        by_rollout: dict[str, list[tuple[int, int]]] = {}
        for call in calls:
            if call.policy:  # a call to an external model is the agent's own affair, like a tool
                by_rollout.setdefault(call.rollout_id, []).append((call.started_ns, call.finished_ns))
                self._tokens += len(call.sampled_ids)
        for rollout in rollouts:
            if rollout.started_ns is None or rollout.finished_ns is None:
                continue
            within = by_rollout.get(rollout.id, [])
            self._rollouts += 1
            self._queued_ns += max(0, rollout.started_ns - rollout.created_ns)
            self._running_ns.append(max(0, rollout.finished_ns - rollout.started_ns))
            self._model_ns += covered(within)
            last = max((end for _, end in within), default=rollout.started_ns)
            self._after_ns += max(0, rollout.finished_ns - last)
            self._calls += within

    def metrics(self, step_s: float, slots: Slots) -> Metrics:
        """By the wall time of the step; none where it has no rollout."""
        if not self._rollouts or step_s <= 0:
            return {}
        count, running_s = self._rollouts, sum(self._running_ns) / S
        busy_s = covered(self._calls) / S
        outside_s = max(0.0, running_s - (self._model_ns + self._after_ns) / S)
        found = {
            "rollout/queued_s": self._queued_ns / S / count,
            "rollout/duration_s": running_s / count,
            "rollout/duration_max_s": max(self._running_ns) / S,
            "rollout/model_s": self._model_ns / S / count,
            "rollout/between_calls_s": outside_s / count,
            "rollout/after_calls_s": self._after_ns / S / count,
            "workers/running_mean": running_s / step_s,
            "workers/queued_mean": self._queued_ns / S / step_s,
            "sampler/busy_share": min(1.0, busy_s / step_s),
        }
        if busy_s:
            found["sampler/calls_mean"] = sum(end - start for start, end in self._calls) / S / busy_s
            found["sampler/tokens_per_s"] = self._tokens / busy_s
        if slots.workers is not None:
            found["workers/slots"] = float(slots.workers)
            found["workers/busy_share"] = min(1.0, found["workers/running_mean"] / slots.workers)
        if slots.sampler is not None:
            found["sampler/slots"] = float(slots.sampler)
        return found


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
