"""The writer of the Redis store: what callers want written at a time goes to the server as one script call a verb.

Driven by the store. While one group is under way the next one gathers, so that a hundred concurrent appends cost a round
trip and a write of the server's file, not a hundred. Calls of a verb are numbered; the server remembers the last answer of
each lane, so that a group which is sent again since its answer was lost is not executed twice.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentlightning import errors
from agentlightning.errors import AgentLightningError, StoreError
from agentlightning.store.redis.hashes import Request, dump
from agentlightning.store.redis.link import Link, Reply

GROUP = 1000
"""Most callers of one script call."""
GROUP_BYTES = 4 << 20
"""Most bytes of one group, unless one caller alone wants more: the server does nothing else while it takes them in."""


@dataclass(slots=True, eq=False)
class _Work:
    verb: str
    request: bytes
    blobs: Sequence[bytes]
    future: asyncio.Future[Any]
    since: float
    """time.monotonic() of its arrival."""

    @property
    def size(self) -> int:
        return len(self.request) + sum(map(len, self.blobs))


@dataclass(slots=True)
class _Lane:
    """One client's calls of one verb."""

    name: str
    number: int = 0
    works: list[_Work] = field(default_factory=list)


class Writer:
    """Lives in the link's event loop, between `start` and `stop`."""

    def __init__(self, link: Link, now_ns: Callable[[], int] | None) -> None:
        self._link = link
        self._now_ns = now_ns
        self._client = secrets.token_hex(12)
        self._lanes: dict[str, _Lane] = {}
        self._queue: deque[_Work] = deque()
        self._news = asyncio.Event()
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self.heard: Callable[[float, int], None] | None = None
        """Told of every group: seconds since the first was submitted, and how many they were."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._serve(), name="redis-writer")

    async def stop(self) -> None:
        """Finish what was accepted; at once, if the server is away."""
        self._stopping = True
        self._link.hasten()
        self._news.set()
        if self._task is not None:
            await self._task

    async def submit(self, verb: str, request: Request, blobs: Sequence[bytes] = ()) -> Any:
        """What the script answers to this request. Raises what it refuses with, or StoreError."""
        packed = dump(request)
        return await self._link.at_home(lambda: self._accept(verb, packed, blobs))

    async def _accept(self, verb: str, request: bytes, blobs: Sequence[bytes]) -> Any:
        if self._stopping:
            raise StoreError("the store is closed; open it first")
        work = _Work(verb, request, blobs, asyncio.get_running_loop().create_future(), time.monotonic())
        self._queue.append(work)
        self._news.set()
        return await work.future

    async def _serve(self) -> None:
        while self._queue or not self._stopping:
            self._news.clear()
            if not self._queue:
                await self._news.wait()
                await asyncio.sleep(0)  # whoever is ready to run in this turn of the loop joins
                continue
            lanes = self._next_group()
            if not lanes:
                continue
            try:
                await self._execute(lanes)
            except Exception as error:  # whatever it was, the callers get it, and the task lives on
                for work in (work for lane in lanes for work in lane.works):
                    _settle(work, error)

    def _next_group(self) -> list[_Lane]:
        """The lanes of what is queued, up to a bound, in the order of their first caller."""
        lanes: dict[str, _Lane] = {}
        size = 0
        while self._queue and len(lanes) < GROUP:
            work = self._queue[0]
            if work.future.cancelled():
                self._queue.popleft()
                continue
            size += work.size
            lane = self._lanes.setdefault(work.verb, _Lane(f"{self._client}:{work.verb}"))
            if lanes and (size > GROUP_BYTES or (work.verb in lanes and len(lane.works) >= GROUP)):
                break
            if work.verb not in lanes:
                lane.works = []
                lane.number += 1
                lanes[work.verb] = lane
            lane.works.append(self._queue.popleft())
        return list(lanes.values())

    async def _execute(self, lanes: Sequence[_Lane]) -> None:
        now = "" if self._now_ns is None else str(self._now_ns())
        calls: list[tuple[str, Sequence[str | bytes]]] = []
        for lane in lanes:
            requests = b"[" + b",".join(work.request for work in lane.works) + b"]"
            blobs = [blob for work in lane.works for blob in work.blobs]
            calls.append((lane.works[0].verb, (lane.name, str(lane.number), now, requests, *blobs)))
        replies = await self._link.run(calls)
        if self.heard is not None:
            works = [work for lane in lanes for work in lane.works]
            self.heard(time.monotonic() - min(work.since for work in works), len(works))
        for lane, reply in zip(lanes, replies, strict=True):
            self._answer(lane.works, reply)
            lane.works = []

    def _answer(self, works: Sequence[_Work], reply: Reply) -> None:
        if isinstance(reply, Exception):
            answers: list[Any] = [self._link.address.explain(reply)] * len(works)
        else:
            answers = orjson.loads(reply)
        for work, answer in zip(works, answers, strict=True):
            _settle(work, answer)


def _settle(work: _Work, answer: Any) -> None:
    if work.future.done():
        return
    if isinstance(answer, dict) and "refused" in answer:
        kind: type[AgentLightningError] = getattr(errors, answer["refused"])
        answer = kind(answer["said"])
    if isinstance(answer, Exception):
        work.future.set_exception(answer)
    else:
        work.future.set_result(answer)
