"""Records: what the store has of attempts that have ended, read together for those that end at about the same time.

`judging.py` drives it. A request costs the server more than what it asks for: while one is under way, the next gather.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextvars import Context

from agentlightning.errors import StoreError
from agentlightning.store.base import LightningStore
from agentlightning.types import Call, Span

MOST_AT_ONCE = 32
"""Rollouts in one request: bounds the size of its answer."""

Record = tuple[list[Call], list[Span]]


class Records:
    """Of one worker, on its event loop."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store
        self._waiting: list[tuple[str, asyncio.Future[Record]]] = []
        self._reading: asyncio.Task[None] | None = None

    async def latest(self, rollout_id: str) -> Record:
        """Calls and spans of the rollout's latest attempt, calls in the order they finished. Raises StoreError."""
        asked: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        self._waiting.append((rollout_id, asked))
        if self._reading is None or self._reading.done():
            # of no attempt: what it reads is several attempts'
            self._reading = asyncio.get_running_loop().create_task(self._read(), context=Context())
        return await asked

    async def _read(self) -> None:
        while self._waiting:
            part, self._waiting = self._waiting[:MOST_AT_ONCE], self._waiting[MOST_AT_ONCE:]
            ids = [rollout_id for rollout_id, _ in part]
            try:
                calls, spans = await asyncio.gather(self._store.calls(ids), self._store.spans(ids))
            except Exception as error:  # whatever it is, an attempt's end waits for the answer
                why = str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
                for _, asked in part:
                    if not asked.done():
                        asked.set_exception(StoreError(why))
                continue
            calls_of, spans_of = defaultdict[str, list[Call]](list), defaultdict[str, list[Span]](list)
            for call in calls:
                calls_of[call.rollout_id].append(call)
            for span in spans:
                spans_of[span.rollout_id].append(span)
            for rollout_id, asked in part:
                if not asked.done():
                    asked.set_result((calls_of[rollout_id], spans_of[rollout_id]))
