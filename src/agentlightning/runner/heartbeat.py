"""The worker's second thread: extends leases, whatever the agents do to the event loop, and notices when they block it.

It has a client and an event loop of its own. Where agent code blocks the worker's loop for too long, nothing in the process
can go on: the thread reports the guilty attempt as timed out and its siblings as lost, and ends the process. Driven by the
worker; knows nothing of agents' results.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from os import _exit  # the true one, whatever the worker makes of os._exit
from typing import TYPE_CHECKING, NoReturn

from agentlightning.errors import AgentLightningError
from agentlightning.runner.attempt import AttemptContext
from agentlightning.runner.execution import ended
from agentlightning.runner.failure import stack
from agentlightning.runner.guardian import Guardian
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.runtime.clock import elapsed_s
from agentlightning.store.base import LightningStore

if TYPE_CHECKING:
    from agentlightning.runner.worker import Worker

EXIT_REPLACE = 75
"""Exit code (EX_TEMPFAIL) of a worker process that an agent has hung: start another in its place."""
TICK_S = 0.5
"""Interval at which the worker's event loop is probed."""
OVERDUE_S = 1.0
"""A loop that has not turned for so long is blocked, once the deadline of the attempt that blocks it is over as well."""
MARGIN = 1 / 6
"""Share of a lease before its end at which agents are stopped that could not renew it."""
CLOSE_PAUSE_S = 0.1
"""Time for the server to see that the blocked loop no longer waits for work."""
FINAL_REPORT_TIMEOUT_S = 5.0
"""Longest time for the report before the process ends."""


class Heartbeat:
    """Starts with `start`, on the worker's loop, where it interrupts attempts whose lease is no longer held."""

    def __init__(
        self,
        worker: Worker,
        open_store: Callable[[], LightningStore],
        guardian: Guardian | None,
    ) -> None:
        self._worker = worker
        self._options = worker.options
        self._open_store = open_store
        self._guardian = guardian
        self._thread = threading.Thread(target=self._main, name="heartbeat", daemon=True)
        self._own: asyncio.AbstractEventLoop | None = None
        self._beating: asyncio.Task[None] | None = None
        self._started = threading.Event()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._asked = self._answered = time.monotonic()
        self._unanswered = 0
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the leases it held run out."""
        self._started.wait(FINAL_REPORT_TIMEOUT_S)
        if self._own is not None and self._beating is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed already
                self._own.call_soon_threadsafe(self._beating.cancel)
        self._thread.join(FINAL_REPORT_TIMEOUT_S)

    def _main(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(BackgroundTasks().run("heartbeat", self._beat_until_stopped))

    async def _beat_until_stopped(self) -> None:
        self._own = asyncio.get_running_loop()
        self._beating = asyncio.current_task()
        self._started.set()
        # Beside the beat, which may hang with the server.
        leases = asyncio.create_task(BackgroundTasks().run("lease watch", self._watch_leases))
        try:
            await self._beat_for_ever()
        finally:
            leases.cancel()

    async def _beat_for_ever(self) -> None:
        next_beat = time.monotonic() + self._options.heartbeat_s
        async with self._open_store() as store:
            while True:
                await asyncio.sleep(min(TICK_S, self._options.heartbeat_s / 2))
                await self._check_loop(store)
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + self._options.heartbeat_s
                    await self._beat(store)

    async def _beat(self, store: LightningStore) -> None:
        held, lease_s = self._worker.held, self._options.lease_s
        asked_s = elapsed_s()
        try:
            async with asyncio.timeout(lease_s / 2):
                still = await store.heartbeat(
                    self._worker.status(), [attempt.lease for attempt in held], lease_s=lease_s
                )
        except (AgentLightningError, TimeoutError):
            self._loop.call_soon_threadsafe(self._worker.note_absence)
            return
        for attempt, kept in zip(held, still, strict=True):
            if kept:
                attempt.lease_ends = asked_s + lease_s  # the server counts from when it heard, which was later
                if self._guardian is not None:
                    self._guardian.renewed(attempt.lease, attempt.lease_ends)
            else:
                self._loop.call_soon_threadsafe(attempt.interrupt, "revoked")

    async def _watch_leases(self) -> None:
        """Stops agents whose leases cannot be renewed, before another attempt of their rollouts can act; what runs when its
        lease ends all the same (a thread, or anything where this process had been stopped) ends with this process."""
        margin_s = self._options.lease_s * MARGIN
        while True:
            now = elapsed_s()
            for attempt in self._worker.acting:
                if now >= attempt.lease_ends:
                    self._abandon_process("its lease ended while an agent still ran")
                if now >= attempt.lease_ends - margin_s:
                    self._loop.call_soon_threadsafe(attempt.interrupt, "expired")
            await asyncio.sleep(min(TICK_S, margin_s / 4))

    async def _check_loop(self, store: LightningStore) -> None:
        if self._answered >= self._asked:
            self._asked = time.monotonic()
            self._unanswered = 0
            self._loop.call_soon_threadsafe(self._answer)
            return
        now = time.monotonic()
        blocked = now - self._asked
        if blocked < OVERDUE_S:
            return
        self._unanswered += 1
        if self._unanswered < 2:
            return  # where the whole process stood still (a machine asleep), its loop answers before the next look
        guilty = self._blocker()
        overdue = guilty is not None and now > guilty.deadline
        if overdue or blocked > self._options.blocked_s:
            await self._end_process(store, guilty, blocked)

    def _answer(self) -> None:
        self._answered = time.monotonic()

    def _blocker(self) -> AttemptContext | None:
        task = asyncio.current_task(self._loop)
        return next((attempt for attempt in self._worker.held if task in attempt.tasks), None)

    async def _end_process(self, store: LightningStore, guilty: AttemptContext | None, blocked: float) -> None:
        where = stack(self._loop_thread)
        finishes = [
            ended(
                attempt,
                "timed_out",
                f"the agent blocked the event loop of its worker for {blocked:.1f} s; it was at:\n{where}",
            )
            if attempt is guilty
            else ended(attempt, "lost", f"another agent blocked the event loop of the worker for {blocked:.1f} s")
            for attempt in self._worker.held
            if attempt.interruption != "revoked"
        ]
        with contextlib.suppress(AgentLightningError, OSError):  # their leases run out instead
            async with asyncio.timeout(FINAL_REPORT_TIMEOUT_S):
                close_connections()
                await asyncio.sleep(CLOSE_PAUSE_S)
                await store.finish(finishes)
        self._abandon_process(f"an agent blocked the event loop for {blocked:.1f} s")

    def _abandon_process(self, why: str) -> NoReturn:
        try:
            if sys.__stderr__ is not None:
                with contextlib.suppress(OSError, ValueError):  # a full disk; an agent closed it
                    sys.__stderr__.write(f"worker: {why}; replacing the process\n")
                    sys.__stderr__.flush()
            if self._guardian is not None:
                self._guardian.kill_left()
        finally:  # nothing that failed above, for want of descriptors, say, keeps the process
            _exit(EXIT_REPLACE)


def close_connections() -> None:
    """Shut down every TCP connection of this process, which is about to end.

    One of the blocked loop's waits for work: what is given up now would be given to this very process.
    """
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
