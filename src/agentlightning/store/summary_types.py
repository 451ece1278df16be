"""Finished rollouts and metrics as lists, plots and filters show them, and the query for a page of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentlightning.records import Mode, Outcome, RolloutState

Order = Literal["finished", "reward", "step", "turns", "sampled_tokens", "duration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """One finished rollout as lists, plots and filters show it: made in the transaction that finishes it."""

    id: str
    run_id: str
    mode: Mode
    step: int
    state: RolloutState
    group_id: str
    replica: int
    task_key: str
    """Hash of the task: rollouts of one task have it in common, whatever their step."""
    title: str
    """The beginning of the task's text."""
    reward: float | None
    turns: int
    """Model calls of its last attempt, as are the next four."""
    prompt_tokens: int
    sampled_tokens: int
    """Those of external models as they reported them; those that a fork replayed were sampled for another rollout."""
    forks: int
    agents: list[str]
    """Names of its sub-agents that its calls were recorded with, sorted."""
    attempts: int
    lost: int
    refused: bool
    failure: str | None
    """The line of the error that names it; of a refused rollout, of its warning."""
    outcome: Outcome | None
    created_ns: int
    finished_ns: int
    finished_seq: int
    duration_s: float
    """From its first claim to its end; 0 where it was never claimed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryQuery:
    """A page of summaries of finished rollouts. Those without a reward come last, in either direction."""

    run_id: str | None = None
    """None: all runs."""
    where: str = ""
    """A filter: ``reward < 0.2 and step > 50 and agent = 'writer'`` (where.py)."""
    order_by: Order = "finished"
    descending: bool = True
    after: str | None = None
    """The `next` of the page before, of the same order."""
    limit: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryPage:
    """Some summaries in order."""

    rows: list[RolloutSummary]
    next: str | None
    """Cursor of the next page; None where there is no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPoint:
    """A metric over a bucket of steps."""

    step: int
    value: float
    """The last value of the bucket, its step and its time."""
    low: float
    high: float
    created_ns: int
