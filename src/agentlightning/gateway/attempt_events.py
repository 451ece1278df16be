"""AttemptEvents: the spans of some names by which the gateway tells an attempt's record of events, read back by the gateway.

Driven by stored_responses.py and uploaded_files.py: what was deleted or uploaded is in the record alone, so that it outlives
the server and is the same for all of several. Kept in memory for the attempts used last.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from agentlightning.gateway.attempts import SHARED_ATTEMPT_AGE_S, TrackedAttempt
from agentlightning.gateway.gateway_span import gateway_span
from agentlightning.records import JSON, Span
from agentlightning.store.base import LightningStore

MAX_ATTEMPTS = 1024
"""Attempts whose events are kept in memory; those of others are read again."""


@dataclass(slots=True)
class _Events:
    spans: list[Span]
    read_s: float


class AttemptEvents:
    """Use from one event loop."""

    def __init__(self, store: LightningStore, names: frozenset[str]) -> None:
        self._store = store
        self._names = names
        self._known: OrderedDict[tuple[str, int], _Events] = OrderedDict()

    async def read(self, attempt: TrackedAttempt) -> list[Span]:
        """Events by way of this server, or a few seconds ago by another, oldest first."""
        identity = attempt.rollout.id, attempt.number
        known = self._known.get(identity)
        now = time.monotonic()
        if known is None or (not attempt.complete and now - known.read_s > SHARED_ATTEMPT_AGE_S):
            spans = await self._store.spans([attempt.rollout.id])
            mine = [span for span in spans if span.name in self._names and span.attempt == attempt.number]
            known = self._known.get(identity)
            if known is None or known.read_s < now:  # else a read that began later has ended before this one
                known = self._known[identity] = _Events(mine, now)
            while len(self._known) > MAX_ATTEMPTS:
                self._known.popitem(last=False)
        self._known.move_to_end(identity)
        return known.spans

    async def append(self, attempt: TrackedAttempt, name: str, attributes: JSON) -> Span:
        """Tell of an event; durable when it returns."""
        span = gateway_span(attempt.rollout, attempt.number, name, attributes)
        await self._store.append_spans([span])
        spans = await self.read(attempt)
        if all(one.id != span.id for one in spans):
            spans.append(span)
        return span
