"""Utilisation: how long a step's rollouts waited, ran and called models, how busy workers, gateway and sampler so were, and
what that used up.

`step.py` adds the records that a step reads anyway; the loop asks for the metrics once the step's time is
known. Times are those of the records: a rollout's by the store's clock, a call's by its gateway's. With
trainer.max_staleness above 0 rollouts overlap several steps; a step then counts its own rollouts whole, which over several
steps comes to the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from agentlightning.config.external import ExternalModelConfig
from agentlightning.config.run import Config
from agentlightning.engines.base import Metrics
from agentlightning.records import Call, Rollout

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
    ours = engine.name == "local" and engine.sampler.type == "local"
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
    _prompt_tokens: int = 0
    _calls: list[tuple[int, int]] = field(default_factory=list)
    _external_calls: list[tuple[int, int]] = field(default_factory=list)
    _external_tokens: int = 0
    """Of prompts and completions."""

    def add(self, rollouts: Iterable[Rollout], calls: Sequence[Call]) -> None:
        """Rollouts that have finished, with the calls of their last attempts."""
        by_rollout: dict[str, list[tuple[int, int]]] = {}
        for call in calls:
            if call.policy:
                by_rollout.setdefault(call.rollout_id, []).append((call.started_ns, call.finished_ns))
                self._tokens += len(call.sampled_ids) if call.replayed_id is None else 0
                self._prompt_tokens += call.prompt_tokens if "." not in call.id else 0  # further choices share theirs
            else:  # of a rollout's time, a call to an external model is the agent's own affair, like a tool
                self._external_calls.append((call.started_ns, call.finished_ns))
                self._count_external(call)
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

    def metrics(
        self, step_s: float, slots: Slots, models: Mapping[str, ExternalModelConfig] = MappingProxyType({})
    ) -> Metrics:
        """By the wall time of the step; none where it has no rollout. `models`: the run's external models."""
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
            "gateway/busy_share": min(1.0, covered([*self._calls, *self._external_calls]) / S / step_s),
            "cost/agent_s": running_s,
            "cost/prompt_tokens": float(self._prompt_tokens),
            "cost/sampled_tokens": float(self._tokens),
        }
        if models:
            found["cost/external_tokens"] = float(self._external_tokens)
        if busy_s:
            found["sampler/calls_mean"] = sum(end - start for start, end in self._calls) / S / busy_s
            found["sampler/tokens_per_s"] = self._tokens / busy_s
        if slots.workers is not None:
            found["workers/slots"] = float(slots.workers)
            found["workers/busy_share"] = min(1.0, found["workers/running_mean"] / slots.workers)
        if slots.sampler is not None:
            found["sampler/slots"] = float(slots.sampler)
        return found

    def _count_external(self, call: Call) -> None:
        counts = (call.usage.get(name) for name in ("prompt_tokens", "sampled_tokens"))
        self._external_tokens += sum(max(0, count) for count in counts if isinstance(count, int))


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
