"""The event stream of a run: its new metrics and finished rollouts, as server-sent events, pushed as they are committed.

Served by the REST API's ``GET /events``. Each event's id is a cursor, which browsers send back as Last-Event-ID when they
reconnect: nothing is sent twice and nothing is missed, whichever server of the store they reach. Knows nothing of how a
store works.

    event: metrics     data: [{"step": 3, "name": "train/loss", "value": 0.1, "created_ns": …, "seq": 17}, …]
    event: rollouts    data: summaries of rollouts, in the order in which they finished
    : heartbeat        every 15 seconds in which nothing else was sent
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agentlightning.errors import InputError, StoreError
from agentlightning.gateway.asgi_response import disconnected
from agentlightning.store.base import LightningStore
from agentlightning.store.summaries import SummaryQuery

HEARTBEAT_S = 15.0
"""Proxies close connections that are silent for a minute."""
MAX_STREAM_S = 600.0
"""A client then reconnects, and is asked for its key again."""
MAX_METRICS = 1000
"""Metrics of one event."""

_CURSOR = re.compile(r"(\d{1,18})\.(\d{1,18})")


def parse_cursor(cursor: str) -> tuple[int, int]:
    """The last metric's `seq` and the last rollout's `finished_seq` of the client; InputError where it is none of ours."""
    found = _CURSOR.fullmatch(cursor)
    if found is None:
        raise InputError(f"after: expected the id of an event (0.0 for the beginning), got {cursor[:40]!r}")
    return int(found[1]), int(found[2])


class RunEvents(Response):
    """The response; it ends with the client, with its server (`stopping`), and when the store is away or the run is gone:
    clients then reconnect, or are told."""

    def __init__(
        self,
        store: LightningStore,
        run_id: str,
        cursor: tuple[int, int],
        stopping: asyncio.Event,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}  # nginx would keep events until it has many
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._store = store
        self._run_id = run_id
        self._metric, self._rollout = cursor
        self._stopping = stopping
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection, by ASGI."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        ends = [asyncio.ensure_future(one) for one in (disconnected(receive), self._stopping.wait(), self._send(send))]
        try:
            await asyncio.wait(ends, timeout=MAX_STREAM_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
            failed = (await asyncio.gather(*ends, return_exceptions=True))[-1]
        if isinstance(failed, Exception) and not isinstance(failed, StoreError):
            raise failed
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send) -> None:
        """Sends what comes, for ever."""
        looks = {"metrics": self._next_metrics, "rollouts": self._next_rollouts}
        waits: dict[str, asyncio.Future[bytes]] = {}
        try:
            while True:
                waits |= {name: asyncio.ensure_future(look()) for name, look in looks.items() if name not in waits}
                await asyncio.wait(waits.values(), timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
                found = [waits.pop(name).result() for name, wait in list(waits.items()) if wait.done()]
                events = b"".join(found) or b": heartbeat\n\n"
                await send({"type": "http.response.body", "body": events, "more_body": True})
        finally:
            for unfinished in waits.values():
                unfinished.cancel()

    async def _next_metrics(self) -> bytes:
        found = await self._store.follow_metrics(self._run_id, self._metric, self._heartbeat_s, MAX_METRICS)
        if not found:
            return b""
        self._metric = found[-1].seq
        names = ("step", "name", "value", "created_ns", "seq")
        return self._event(
            "metrics", [{name: getattr(each, name) for name in names} for each in found if not each.abandoned]
        )

    async def _next_rollouts(self) -> bytes:
        found = await self._store.wait(self._run_id, self._rollout, 1, self._heartbeat_s)
        if not found:
            return b""
        ids = ", ".join(f"'{each.id}'" for each in found)
        page = await self._store.summaries(SummaryQuery(run_id=self._run_id, where=f"id in ({ids})", limit=len(found)))
        self._rollout = found[-1].finished_seq or 0
        return self._event("rollouts", sorted(page.rows, key=lambda row: row.finished_seq))

    def _event(self, name: str, rows: Sequence[Any]) -> bytes:
        cursor = f"{self._metric}.{self._rollout}"
        return b"".join([f"event: {name}\nid: {cursor}\ndata: ".encode(), orjson.dumps(rows), b"\n\n"])
