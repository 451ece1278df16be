"""The worker: claims rollouts under a lease, runs many at a time, and reports how each attempt ended.

Drives an `Execution` against any `LightningStore`; whoever made it calls `run` and, from the same loop, `stop`. Knows
nothing of how agents run, of models, or of training.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentlightning.errors import AgentLightningError, ConflictError, InputError, NotFoundError, StoreError
from agentlightning.records import Claim, Finish, Lease, WorkerStatus
from agentlightning.runner.attempt import AttemptContext, attributed_task, status_here
from agentlightning.runner.circuit_breaker import CircuitBreaker
from agentlightning.runner.execution import Execution, ended
from agentlightning.runner.failure import describe
from agentlightning.runner.guardian import Guardian
from agentlightning.runner.heartbeat import EXIT_REPLACE, FINAL_REPORT_TIMEOUT_S, Heartbeat
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.runtime.backoff import Backoff
from agentlightning.runtime.clock import elapsed_s
from agentlightning.store.base import LEASE_S, LightningStore

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 10.0
DELIVERY_INTERVAL_S = 2.0
"""Between deliveries of spans while an attempt runs: what a killed worker loses at most."""
CLAIM_WAIT_S = 20.0
"""Time for which one request for work stays open."""
LINGER = 0.1
MAX_LINGER_S = 0.05
"""An end waits this share of what an attempt usually takes for others to be reported with it, and claimed for with it: a
request costs the server as much as ten ends do."""
USUAL_OVER = 20
"""Attempts that the moving average looks back on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Settings of a worker."""

    run_id: str
    worker_id: str
    concurrency: int
    """Attempts at a time."""
    lease_s: float = LEASE_S
    heartbeat_s: float = HEARTBEAT_INTERVAL_S
    blocked_s: float = 60.0
    """Longest time for which an agent may block the event loop."""
    drain_timeout_s: float = 5.0
    """Time for running attempts to end by themselves once the worker drains."""


class Worker:
    """Runs attempts of one run.

    open_store: makes another client of the same store, for the heartbeat thread. boots: ids of the starts of its servers
    that have answered so far. guardian: told how long leases last; ends what agents left behind where the process is given
    up. left: attempts of this worker's predecessor whose
    agents still run, with the seconds since they began; None where agents end with the worker that runs them.
    """

    def __init__(
        self,
        execution: Execution,
        options: WorkerOptions,
        *,
        open_store: Callable[[], LightningStore],
        boots: Callable[[], frozenset[str]] = frozenset,
        guardian: Guardian | None = None,
        left: Sequence[tuple[Claim, float]] | None = None,
    ) -> None:
        self._store = execution.store
        self._execution = execution
        self.options = options
        self._boots = boots
        self._left = list(left or ())
        self._outlived = left is not None
        self._running: dict[asyncio.Task[None], AttemptContext] = {}
        self._held: dict[Lease, AttemptContext] = {}
        """Attempts whose end the store does not know yet: they take a place and their leases are extended."""
        self._unsent: list[Finish] = []
        self._usual_s = 0.0
        """Seconds that an attempt usually takes, a moving average."""
        self._news = asyncio.Event()
        self._freed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._hurried = asyncio.Event()
        self._claiming: asyncio.Task[None] | None = None
        self._hung = False
        self._background = BackgroundTasks()
        self._away = float("-inf")
        """time.monotonic() of the last time the server could not be reached."""
        self._breaker = CircuitBreaker()
        self._heartbeat = Heartbeat(self, open_store, guardian)

    @property
    def held(self) -> tuple[AttemptContext, ...]:
        """Attempts whose end the store does not know yet."""
        return tuple(self._held.values())

    @property
    def acting(self) -> tuple[AttemptContext, ...]:
        """Attempts whose agents may still do something: not those that wait for a server that is away, to be told how they
        ended, but one that could not be interrupted, whose agent goes on. From any thread."""
        return tuple(each for each in self.held if each.work is None or not each.work.done())

    def stop(self, now: bool = False) -> None:
        """Drain: claim nothing more; running attempts get the drain timeout, the rest end as lost. With `now`, all do."""
        if self._claiming is not None:  # at once: what is given up now must not come back to this worker
            self._claiming.cancel()
        self._stopping.set()
        if now:
            self._hurried.set()

    async def run(self) -> int:
        """Work until `stop`; returns the exit code: 0, or EXIT_REPLACE where an agent could not be interrupted.

        Errors that no waiting mends (no such run, a wrong server key) are raised.
        """
        asyncio.get_running_loop().set_task_factory(attributed_task)
        self._heartbeat.start()
        self._claiming = claiming = asyncio.create_task(self._claim_for_ever())
        reporting = asyncio.create_task(self._report_for_ever())
        delivering = asyncio.create_task(self._background.run("span delivery", self._deliver_for_ever))
        working: tuple[asyncio.Task[None], ...] = (claiming, reporting, delivering)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({*working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in working:
                if task.done() and not task.cancelled():
                    await task  # raises what ended it
            claiming.cancel()  # one that the server granted just now is not seen any more; its lease runs out
            await self._drain()
        finally:
            stopping.cancel()
            for task in working:
                task.cancel()
            await asyncio.wait({*working, stopping})
            self._heartbeat.stop()
            self._execution.connections.close()
        return EXIT_REPLACE if self._hung else 0

    async def _take_over(self) -> None:
        """Go on with the attempts of this worker's predecessor whose leases it can still renew."""
        backoff = Backoff()
        while self._left:
            asked_s = elapsed_s()
            try:
                claims = await self._renewed([claim for claim, _ in self._left])
            except NotFoundError:
                raise
            except StoreError:
                self.note_absence()
                await backoff.sleep()
                continue
            ages = {claim.lease: age_s for claim, age_s in self._left}
            for claim in claims:
                self._start(claim, asked_s + self.options.lease_s, ages[claim.lease])
            self._left = []

    async def _claim_for_ever(self) -> None:
        await self._take_over()
        backoff = Backoff()
        while True:
            # A place is free once its attempt's end is in the store: what ended during one report is claimed for at once.
            if paused_s := self._breaker.wait_s(time.monotonic()):
                await asyncio.sleep(paused_s)
                continue
            free = self._breaker.allowed(self.options.concurrency - len(self._held), len(self._held))
            if free <= 0:
                self._freed.clear()
                await self._freed.wait()
                continue
            asked_s = elapsed_s()
            try:
                claims = await self._store.claim(
                    self.status(),
                    limit=free,
                    lease_s=self.options.lease_s,
                    wait_s=CLAIM_WAIT_S,
                )
                while claims and elapsed_s() > asked_s + self.options.lease_s / 2:
                    # It waited for work, or the answer was long on its way, and the leases may be over.
                    asked_s = elapsed_s()
                    claims = await self._renewed(claims)
            except NotFoundError:
                raise
            except StoreError:
                self.note_absence()
                await backoff.sleep()
                continue
            backoff.reset()
            for claim in claims:
                self._start(claim, asked_s + self.options.lease_s)

    async def _renewed(self, claims: Sequence[Claim]) -> list[Claim]:
        """Those that this worker still holds, with new leases."""
        leases = [claim.lease for claim in claims]
        held = await self._store.heartbeat(self.status(), leases, lease_s=self.options.lease_s)
        return [claim for claim, still in zip(claims, held, strict=True) if still]

    def _start(self, claim: Claim, lease_ends: float, age_s: float = 0.0) -> None:
        attempt = AttemptContext(claim, time.monotonic() - age_s, lease_ends, self._boots())
        self._held[claim.lease] = attempt
        task = asyncio.create_task(self._attempt(attempt))
        self._running[task] = attempt
        task.add_done_callback(self._running.__delitem__)

    async def _attempt(self, attempt: AttemptContext) -> None:
        try:
            finish = await self._execution.execute(attempt)
        except BaseException as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # with the worker
                raise
            # An agent's own are caught where it runs: this one is ours, and must not hold the lease for ever.
            log.exception("an attempt of rollout %s failed in the worker", attempt.lease.rollout_id)
            finish = ended(attempt, "lost", f"the worker failed, not the agent: {describe(error)}")
        self._usual_s += (time.monotonic() - attempt.started - self._usual_s) / USUAL_OVER
        if attempt.hung:
            self._hung = True
            self.stop()
        if attempt.interruption == "revoked":
            self._let_go([attempt.lease])
            return
        if finish.state in ("failed", "timed_out") and (why := await self._own_fault(attempt)):
            finish = ended(attempt, "lost", f"{why} during the attempt, which then failed: {finish.error}")
        if finish.state != "lost" or finish.cause == "infra":  # not where the server was away, or the worker is stopped
            broke = finish.error or "" if finish.cause == "infra" else None
            if self._breaker.add(broke, time.monotonic()):
                log.warning("%s", self._breaker.reason)
        self._report(finish)

    async def _own_fault(self, attempt: AttemptContext) -> str | None:
        """Returns what happened since the claim for which the agent is not to blame; None where nothing did."""
        if elapsed_s() >= attempt.lease_ends:  # the guardian ends agents then
            return "the worker stood still"
        if self._away < attempt.started:
            try:
                await self._store.heartbeat(self.status(), [attempt.lease], lease_s=self.options.lease_s)
            except (NotFoundError, ConflictError):
                return None
            except StoreError:
                self.note_absence()
        away = self._away >= attempt.started or not self._boots() <= attempt.boots
        return "the server was away" if away else None

    # --- reporting: what has ended since the last request goes into the next one ------------------------------------

    def _report(self, finish: Finish) -> None:
        self._unsent.append(finish)
        self._news.set()

    async def _report_for_ever(self) -> None:
        while True:
            await self._news.wait()
            if not self._stopping.is_set():
                await asyncio.sleep(min(MAX_LINGER_S, LINGER * self._usual_s))
            self._news.clear()
            batch, self._unsent = self._unsent, []
            if batch:
                await self._send(batch)
                self._let_go([finish.lease for finish in batch])

    async def _send(self, batch: list[Finish]) -> None:
        """Deliver until the server is back, but not longer than the leases can last without it."""
        backoff = Backoff(timeout_s=self.options.lease_s)
        while True:
            try:
                await self._store.finish(batch)
                return
            except (InputError, NotFoundError, ConflictError) as refused:
                if len(batch) == 1:
                    batch = [Finish(lease=batch[0].lease, state="failed", error=str(refused))]
                    with contextlib.suppress(AgentLightningError):
                        await self._store.finish(batch)
                    return
                for finish in batch:  # one of them spoils the transaction of all
                    await self._send([finish])
                return
            except StoreError:
                self.note_absence()
                if not await backoff.sleep():
                    return

    def _let_go(self, leases: list[Lease]) -> None:
        for lease in leases:
            self._held.pop(lease, None)
        self._freed.set()

    async def _deliver_for_ever(self) -> None:
        """Delivers what running agents record, soon: a worker that is killed loses little of it."""
        while True:
            await asyncio.sleep(DELIVERY_INTERVAL_S)
            await asyncio.gather(*(self._execution.deliver(attempt) for attempt in self._held.values()))

    # --- stopping -------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Time for what runs, then the rest is lost; returns when every end is reported or the server is not there."""
        if self._running:
            ended_all = asyncio.gather(*self._running, return_exceptions=True)
            hurried = asyncio.ensure_future(self._hurried.wait())
            until: set[asyncio.Future[Any]] = {ended_all, hurried}
            await asyncio.wait(until, timeout=self.options.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            hurried.cancel()
        for attempt in self._running.values():
            attempt.interrupt("lost")
        if self._running:
            await asyncio.wait(set(self._running), timeout=self._execution.abandon_s)
        for attempt in self._running.values():
            attempt.open = False
            self._hung = True
            self._report(ended(attempt, "lost", "the worker was stopped"))
        with contextlib.suppress(TimeoutError):
            # The drain timeout is the agents'; the server gets a time of its own.
            report_s = 0.0 if self._hurried.is_set() else self.options.drain_timeout_s
            async with asyncio.timeout(max(report_s, FINAL_REPORT_TIMEOUT_S)):
                while self._held:
                    self._freed.clear()
                    await self._freed.wait()

    def note_absence(self) -> None:
        """The server could not be reached: what fails now may not be the agent's fault."""
        self._away = time.monotonic()

    def status(self) -> WorkerStatus:
        """The worker as the store lists it."""
        status = status_here(self.options.worker_id, self.options.run_id, len(self._held))
        status = replace(status, paused=self._breaker.reason)
        return replace(status, pid=0) if self._outlived else status
