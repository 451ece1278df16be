"""Reading a whole run in portions: whoever does so holds a bounded part of it in memory, whatever the store holds.

Driven by the doctor, by exports and by pruning; works on any store, through its verbs. What is written meanwhile may be seen
or not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence

from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.types import Call, Metric, Rollout, Step

ROLLOUTS = 200
"""Most rollouts of a portion."""
CALLS = 1000
"""Most calls of a portion, as far as rollouts tell before they are read."""
STEPS = 20
METRICS = 5000


async def read_rollouts(store: LightningStore, run_id: str) -> AsyncIterator[list[Rollout]]:
    """All rollouts of the run in id order, in portions whose calls can be held in memory."""
    after: str | None = None
    while page := await store.rollouts(RolloutQuery(run_id=run_id, after=after, limit=ROLLOUTS)):
        for portion in _by_calls(page):
            yield portion
        after = page[-1].id


async def read_calls(store: LightningStore, rollouts: Sequence[Rollout]) -> list[Call]:
    """The calls of every attempt of these rollouts."""
    found: list[Call] = []
    for number in range(1, max((rollout.attempt for rollout in rollouts), default=0) + 1):
        found += await store.calls([rollout.id for rollout in rollouts if rollout.attempt >= number], number)
    return found


async def read_steps(store: LightningStore, run_id: str) -> AsyncIterator[list[Step]]:
    """All steps of the run that are not abandoned, in order."""
    after: int | None = None
    while page := await store.steps(run_id, after, STEPS):
        yield page
        after = page[-1].step


async def read_metrics(store: LightningStore, run_id: str) -> AsyncIterator[list[Metric]]:
    """All metrics of the run in the order in which the store took them in."""
    after = 0
    while page := await store.follow_metrics(run_id, after, 0.0, METRICS):
        yield page
        after = page[-1].seq


def _by_calls(page: Sequence[Rollout]) -> Iterator[list[Rollout]]:
    portion: list[Rollout] = []
    weight = 0
    for rollout in page:
        calls = max(1, rollout.calls) * max(1, rollout.attempt)
        if portion and weight + calls > CALLS:
            yield portion
            portion, weight = [], 0
        portion.append(rollout)
        weight += calls
    if portion:
        yield portion
