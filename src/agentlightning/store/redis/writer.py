"""The writer of the Redis store: what callers want written at a time goes to the server as one script call per method.

Driven by the store. While one group is under way the next one gathers, so that a hundred concurrent appends cost a round
trip and a write of the server's file, not a hundred. Calls of a method are numbered; the server remembers the last reply of
each lane, so that a group which is sent again since its reply was lost is not executed twice.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from agentlightning.errors import StoreError
from agentlightning.store.coalescer import Coalescer
from agentlightning.store.redis.codec import Request, dump
from agentlightning.store.redis.connection import RedisConnection, Reply
from agentlightning.store.sentences import refusal

MAX_GROUP = 1000
"""Most callers of one script call."""
MAX_GROUP_BYTES = 4 << 20
"""Most bytes of one group, unless one caller alone wants more: the server does nothing else while it takes them in."""


@dataclass(slots=True, eq=False)
class _RedisWork:
    method: str
    request: bytes
    blobs: Sequence[bytes]
    since: float
    """time.monotonic() of its arrival."""

    @property
    def size(self) -> int:
        return len(self.request) + sum(map(len, self.blobs))


class RedisWriter:
    """Lives in the connection's event loop, until `stop`."""

    def __init__(self, connection: RedisConnection, now_ns: Callable[[], int] | None) -> None:
        self._connection = connection
        self._now_ns = now_ns
        self._client = secrets.token_hex(12)
        self._numbers: Counter[str] = Counter()
        """Calls so far, by method."""
        self._works = Coalescer[_RedisWork, Any](
            self._execute, max_items=MAX_GROUP, max_size=MAX_GROUP_BYTES, size=lambda work: work.size
        )
        self._stopping = False
        self.heard: Callable[[float, int], None] | None = None
        """Told of every group: seconds since the first was submitted, and how many they were."""

    async def stop(self) -> None:
        """Finish what was accepted; at once, if the server is away."""
        self._stopping = True
        self._connection.hasten()
        await self._works.drain()

    async def submit(self, method: str, request: Request, blobs: Sequence[bytes] = ()) -> Any:
        """Returns the script's reply to this request. Raises what it refuses with, or StoreError."""
        packed = dump(request)
        return await self._connection.at_home(lambda: self._accept(method, packed, blobs))

    async def _accept(self, method: str, request: bytes, blobs: Sequence[bytes]) -> Any:
        if self._stopping:
            raise StoreError("the store is closed; open it first")
        return await self._works.submit(_RedisWork(method, request, blobs, time.monotonic()))

    async def _execute(self, group: Sequence[_RedisWork]) -> Sequence[Any]:
        """One script call per method, in the order of their first callers."""
        lanes: dict[str, list[_RedisWork]] = defaultdict(list)
        for work in group:
            lanes[work.method].append(work)
        self._numbers.update(lanes.keys())
        now = "" if self._now_ns is None else str(self._now_ns())
        calls: list[tuple[str, Sequence[str | bytes]]] = []
        for method, works in lanes.items():
            requests = b"[" + b",".join(work.request for work in works) + b"]"
            blobs = [blob for work in works for blob in work.blobs]
            calls.append((method, (f"{self._client}:{method}", str(self._numbers[method]), now, requests, *blobs)))
        replies = await self._connection.run(calls)
        if self.heard is not None:
            self.heard(time.monotonic() - min(work.since for work in group), len(group))
        outcomes: dict[_RedisWork, Any] = {}
        for works, reply in zip(lanes.values(), replies, strict=True):
            outcomes.update(zip(works, self._outcomes(reply, len(works)), strict=True))
        return [outcomes[work] for work in group]

    def _outcomes(self, reply: Reply, count: int) -> list[Any]:
        if isinstance(reply, Exception):
            return [self._connection.address.explain(reply)] * count
        return [_outcome(answer) for answer in orjson.loads(reply)]


def _outcome(answer: Any) -> Any:
    refused = isinstance(answer, dict) and "refused" in answer
    return refusal(answer["refused"], *answer["about"]) if refused else answer
