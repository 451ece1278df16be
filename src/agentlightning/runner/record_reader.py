"""Reads the records of attempts that have ended, together for those that end at about the same time.

`air.py` drives it. A request costs the server more than what it asks for: while one is under way, the next gather.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from agentlightning.errors import StoreError
from agentlightning.store.base import LightningStore
from agentlightning.store.coalescer import Coalescer
from agentlightning.types import Call, Span

MAX_ROLLOUTS_PER_REQUEST = 32
"""Rollouts in one request: bounds the size of its answer."""

AttemptRecord = tuple[list[Call], list[Span]]


class RecordReader:
    """Of one worker, on its event loop."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._reads = Coalescer[str, AttemptRecord](self._read, max_items=MAX_ROLLOUTS_PER_REQUEST)

    async def latest(self, rollout_id: str) -> AttemptRecord:
        """Calls and spans of the rollout's latest attempt, calls in the order they finished. Raises StoreError."""
        return await self._reads.submit(rollout_id)

    async def _read(self, ids: Sequence[str]) -> Sequence[AttemptRecord]:
        try:
            calls, spans = await asyncio.gather(self._store.calls(ids), self._store.spans(ids))
        except Exception as error:  # whatever it is, an attempt's end waits for the answer
            raise StoreError(
                str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
            ) from error
        calls_of, spans_of = defaultdict[str, list[Call]](list), defaultdict[str, list[Span]](list)
        for call in calls:
            calls_of[call.rollout_id].append(call)
        for span in spans:
            spans_of[span.rollout_id].append(span)
        return [(calls_of[rollout_id], spans_of[rollout_id]) for rollout_id in ids]
