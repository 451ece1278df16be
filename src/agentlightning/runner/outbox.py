"""Outbox: what attempts of this worker have recorded on the way to the store, many attempts' spans in one request.

The worker drives it every few seconds and at the end of each attempt. Knows nothing of how spans are made.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

import orjson

from agentlightning.errors import AgentLightningError, ConflictError, NotFoundError, StoreError
from agentlightning.store.base import LightningStore
from agentlightning.types import Span

DELIVER_S = 2.0
"""Between deliveries while an attempt runs: what a killed worker loses at most."""
MOST_SPANS_A_REQUEST = 500
MOST_BYTES_A_REQUEST = 4 * 1024 * 1024
MOST_REFUSALS = 64
"""Requests of a batch that the store may refuse while it is looked for the spans at fault; then what is refused is lost."""
LONGEST_PAUSE_S = 2.0

Numbered = tuple[int, Span]
"""A span, and the place in its batch of the attempt that it is of."""

log = logging.getLogger(__name__)


class Outbox:
    """Delivers spans. give_up_s: how long it tries while the store is away; as long as leases last without it."""

    def __init__(self, store: LightningStore, give_up_s: float) -> None:
        self._store = store
        self._give_up_s = give_up_s
        self._waiting: list[tuple[Sequence[Span], asyncio.Future[int]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def deliver(self, spans: Sequence[Span]) -> int:
        """Returns once they, and all that was given before, are in the store or given up: how many of these were.

        Spans are never worth an attempt's end.
        """
        if not spans and (self._sending is None or self._sending.done()):
            return 0
        lost: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((spans, lost))
        if self._sending is None or self._sending.done():
            # In a context of its own: it sends for every attempt, and must not count as a task of one of them.
            self._sending = asyncio.create_task(self._send_all(), context=contextvars.Context())
        return await lost

    async def _send_all(self) -> None:
        """What comes while a request is under way goes into the next one."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await self._send_batch(batch)
            except Exception:  # of our own making: the ends of attempts wait for this
                log.exception("spans of %d attempts could not be delivered", len(batch))
            finally:
                for spans, lost in batch:
                    _tell(lost, len(spans))

    async def _send_batch(self, batch: Sequence[tuple[Sequence[Span], asyncio.Future[int]]]) -> None:
        lost = [0] * len(batch)
        waiting = deque(_portions([(number, span) for number, (spans, _) in enumerate(batch) for span in spans]))
        give_up = time.monotonic() + self._give_up_s
        refusals = 0
        away = False
        while waiting:
            portion = waiting.popleft()
            end = "away" if away else await self._send([span for _, span in portion], give_up)
            away = end == "away"
            refusals += end == "refused"
            if end == "refused" and len(portion) > 1 and refusals < MOST_REFUSALS:
                waiting.extendleft((portion[len(portion) // 2 :], portion[: len(portion) // 2]))
            elif end != "taken":
                for number, _ in portion:
                    lost[number] += 1
        for count, (_, asked) in zip(lost, batch, strict=True):
            _tell(asked, count)

    async def _send(self, spans: Sequence[Span], give_up: float) -> Literal["taken", "refused", "away"]:
        """What became of them; sending again is harmless, ids that exist are ignored."""
        pause = 0.1
        while True:
            try:
                await self._store.append_spans(spans)
                return "taken"
            except AgentLightningError as error:
                if not isinstance(error, StoreError) or isinstance(error, NotFoundError | ConflictError):
                    return "refused"
                if time.monotonic() + pause > give_up:
                    return "away"
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)


def _portions(spans: Sequence[Numbered]) -> Iterator[list[Numbered]]:
    portion: list[Numbered] = []
    size = 0
    for numbered in spans:
        more = len(orjson.dumps(numbered[1]))
        if portion and (len(portion) >= MOST_SPANS_A_REQUEST or size + more > MOST_BYTES_A_REQUEST):
            yield portion
            portion, size = [], 0
        portion.append(numbered)
        size += more
    if portion:
        yield portion


def _tell(lost: asyncio.Future[int], count: int) -> None:
    if not lost.done():  # whoever waited may have been cancelled
        lost.set_result(count)
