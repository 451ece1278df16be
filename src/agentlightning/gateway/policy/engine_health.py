"""EngineHealth: tells an engine that hangs from one that is busy, and sees when a hung one is back.

Driven by engine_router.py. A long queue may keep a completion back for minutes, so being late proves nothing: an engine of
which nothing was heard for a while is asked for ``/health``, which costs it nothing, and hangs if it does not answer that
either. It then takes no calls until it does. Knows nothing of requests; one timer per call is all that the hot path pays.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from agentlightning.gateway.asgi_response import Deadline
from agentlightning.gateway.http_client import HttpClient
from agentlightning.gateway.policy.balancer import Balancer, EngineLoad
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.runtime.backoff import Backoff

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
"""Pauses between the probes of an engine that hangs."""
PROBES = 2
"""Probes in a row that are not answered before an engine counts as hung: where this process stood still for a moment, the
first one is late although its answer is there."""
NEVER_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """Times of the question whether an engine lives."""

    after_s: float = 30.0
    """Seconds without a byte from it, while a call waits."""
    timeout_s: float = 5.0
    """For the answer to one probe."""


_Found = Literal["answers", "silent", "gone"]


class HungEngineError(ConnectionError):
    """Nothing comes from the engine that a call waits for."""


class EngineHealth:
    """Probes of all engines; those of several calls at a time are one."""

    def __init__(
        self,
        client: HttpClient,
        balancer: Balancer,
        settings: ProbeSettings,
        on_hang: Callable[[], None],
        background: BackgroundTasks,
    ) -> None:
        self.settings = settings
        self._client = client
        self._balancer = balancer
        self._on_hang = on_hang
        self._background = background
        self._probes: dict[str, asyncio.Task[_Found]] = {}
        self._waiting: dict[str, asyncio.Task[None]] = {}
        """By URL, for those that hang: the task that waits until they do no longer."""

    async def close(self) -> None:
        """End what is under way."""
        tasks = [*self._probes.values(), *self._waiting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def hangs(self, engine: EngineLoad, headers: Mapping[str, str]) -> bool:
        """Returns whether the engine answers nothing; one that does not takes no calls until it does."""
        probe = self._probes.get(engine.url)
        if probe is None:
            probe = self._probes[engine.url] = asyncio.create_task(self._look_at(engine.url, headers))
            probe.add_done_callback(lambda _: self._probes.pop(engine.url, None))
        if await asyncio.shield(probe) != "silent":
            return False  # one that is gone has closed the connections of its calls
        if not engine.hung:
            engine.hung = True
            self._on_hang()
            back = functools.partial(self._until_back, engine, headers)
            waiting = self._waiting[engine.url] = self._background.start("probes of an engine that hangs", back)
            waiting.add_done_callback(lambda _: self._waiting.pop(engine.url, None))
        return True

    async def _look_at(self, url: str, headers: Mapping[str, str]) -> _Found:
        for _ in range(PROBES):
            try:
                async with asyncio.timeout(self.settings.timeout_s):
                    async with await self._client.get(f"{url}/health", headers) as response:
                        return "answers" if response.status < 500 else "silent"  # who has no such route lives, too
            except TimeoutError:
                continue
            except OSError:
                return "gone"
        return "silent"

    async def _until_back(self, engine: EngineLoad, headers: Mapping[str, str]) -> None:
        backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)
        while engine.hung and self._balancer.knows(engine):
            await backoff.sleep()
            found = await self._look_at(engine.url, headers)
            if found == "answers":
                self._balancer.answered(engine)
            elif found == "gone":
                engine.hung = False
                self._balancer.failed(engine)


class SilenceWatch:
    """A context manager around one exchange with an engine, which gets HungEngineError where nothing comes any more.

    stall_timeout_s: silence after which the engine counts as failed although it answers probes. may_leave: says whether the
    call has anything to gain from leaving an engine that hangs; without, it waits on.
    """

    __slots__ = (
        "_deadline", "_engine", "_headers", "_health", "_heard", "_loop", "_may_leave", "_probe", "_reason", "_stall_s",
        "_timer", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        health: EngineHealth,
        engine: EngineLoad,
        headers: Mapping[str, str],
        stall_timeout_s: float | None,
        may_leave: Callable[[], bool],
    ) -> None:
        self._health = health
        self._engine = engine
        self._headers = headers
        self._stall_s = math.inf if stall_timeout_s is None else stall_timeout_s
        self._may_leave = may_leave
        self._probe: asyncio.Task[None] | None = None
        self._reason = ""
        self._loop = asyncio.get_running_loop()
        self.waiting = True
        """False while what came is handed on: an agent that reads slowly is not the engine's fault."""

    def __enter__(self) -> Self:
        self._deadline = Deadline(NEVER_S).__enter__()
        self._heard = self._loop.time()
        self._look_in(min(self._health.settings.after_s, self._stall_s))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._probe is not None:
            self._probe.cancel()
        try:
            self._deadline.__exit__(kind, error, trace)
        except TimeoutError:
            raise HungEngineError(f"the engine {self._reason}") from None

    def heard(self) -> None:
        """Something came, and the call waits for more."""
        self._heard = self._loop.time()
        self.waiting = True

    @property
    def _silent_s(self) -> float:
        return self._loop.time() - self._heard if self.waiting else 0.0

    def _look_in(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        silent, after = self._silent_s, self._health.settings.after_s
        if silent >= self._stall_s:
            self._give_up(f"gave nothing for {self._stall_s:g} s")
        elif silent >= after:
            self._probe = asyncio.create_task(self._ask())
        else:
            self._look_in(min(after, self._stall_s) - silent)

    async def _ask(self) -> None:
        heard, after = self._heard, self._health.settings.after_s
        hangs = await self._health.hangs(self._engine, self._headers)
        if hangs and heard == self._heard and self.waiting and self._may_leave():
            self._give_up(f"gave nothing for {self._silent_s:.0f} s and does not answer a health probe")
        else:
            self._look_in(max(0.0, min(after, self._stall_s - self._silent_s)))

    def _give_up(self, reason: str) -> None:
        self._reason = reason
        self._deadline.shorten(0.0)
