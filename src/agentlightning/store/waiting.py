"""WaitingStore: the methods that wait for what others write, and those that are made of others; and the Notifier.

Base of the stores of this process, SQL and Redis. A method that waits looks, subscribes to the notifier and looks again when
it is notified: pushed, not polled. A writer notifies after its commit, and a listener for other processes; a notification
promises nothing. Knows nothing of databases: each store says how it looks.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import uuid_utils

from agentlightning.errors import InputError
from agentlightning.records import (
    Claim,
    Lease,
    Metric,
    NewRollout,
    Resource,
    Rollout,
    WorkerStatus,
)
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.base import LEASE_S, MAX_FINISHED, LightningStore
from agentlightning.store.models import ModelAlias, ModelVersion, check_alias, check_name, check_version
from agentlightning.store.request import current_request
from agentlightning.store.summaries import (
    RolloutSummary,
    SeriesPoint,
    SummaryPage,
    SummaryPlace,
    SummaryQuery,
    check_points,
    check_query,
    page_of,
)
from agentlightning.store.tokens import (
    NewToken,
    Token,
    TokenRole,
    check_token,
    hash_of,
    mint_key,
    new_secret,
    new_token_id,
    session_token,
)
from agentlightning.store.where import Filter, parse

R = TypeVar("R")


class WaitingStore(LightningStore):
    """A store with a notifier."""

    background: BackgroundTasks

    def __init__(self) -> None:
        self.background = BackgroundTasks()
        self._notifier = Notifier()
        self._secret = b""

    async def claim(
        self,
        worker: WorkerStatus,
        limit: int = 1,
        lease_s: float = LEASE_S,
        wait_s: float = 0.0,
    ) -> list[Claim]:
        _check_limit(limit)
        taken = await self._until(QUEUED, worker.run_id, lambda: self._take(worker, limit, lease_s), wait_s)
        return [self._claim(rollout, lease) for rollout, lease in taken]

    def _claim(self, rollout: Rollout, lease: Lease) -> Claim:
        key, judge_key = (mint_key(self._secret, rollout.id, rollout.attempt, judge) for judge in (False, True))
        return Claim(rollout=rollout, lease=lease, key=key, judge_key=judge_key)

    async def open_session(self, session: NewRollout, lease_s: float) -> Claim:
        rollout_id = str(uuid_utils.uuid7())
        token = session_token(self._secret, rollout_id)
        rollout = await self._open_session(replace(session, kind="session"), rollout_id, token, lease_s)
        token = session_token(self._secret, rollout.id)
        lease = Lease(rollout_id=rollout.id, attempt=rollout.attempt, token=token)
        return self._claim(rollout, lease)

    async def wait(self, run_id: str, after: int = 0, at_least: int = 1, timeout_s: float = 30.0) -> list[Rollout]:
        goal = after + at_least

        async def enough() -> bool:
            return await self._last_finished(run_id) >= goal

        await self._until(FINISHED, run_id, enough, timeout_s, goal)
        return await self._finished(run_id, after, MAX_FINISHED)

    async def wait_resources(self, run_id: str, after: Mapping[str, int], timeout_s: float = 30.0) -> list[Resource]:
        return await self._until(RESOURCES, run_id, lambda: self._later_resources(run_id, after), timeout_s)

    async def summaries(self, query: SummaryQuery) -> SummaryPage:
        place, tree = check_query(query), parse(query.where)
        return page_of(await self._summaries(query, tree, place), query)

    async def series(
        self, run_id: str, names: Sequence[str] | None = None, max_points: int = 500, after_step: int | None = None
    ) -> dict[str, list[SeriesPoint]]:
        check_points(max_points)
        return await self._series(run_id, names, max_points, after_step)

    async def follow_metrics(
        self, run_id: str, after: int = 0, timeout_s: float = 30.0, limit: int = 10_000
    ) -> list[Metric]:
        _check_limit(limit)
        return await self._until(METRICS, run_id, lambda: self._later_metrics(run_id, after, limit), timeout_s)

    async def create_token(
        self, name: str, role: TokenRole, run_id: str | None = None, lifetime_s: float | None = None
    ) -> NewToken:
        check_token(name, role, run_id, lifetime_s)
        request = current_request()
        secret = new_secret(None if request is None else request.secret(self._secret))
        token = Token(id=new_token_id(), name=name, role=role, run_id=run_id)
        return NewToken(token=await self._add_token(token, hash_of(secret), lifetime_s), secret=secret)

    async def put_model(self, version: ModelVersion) -> ModelVersion:
        check_version(version)
        return await self._put_model(version)

    async def put_alias(self, alias: ModelAlias) -> ModelAlias:
        check_name(alias.name)
        check_alias(alias.alias)
        return await self._put_alias(alias)

    async def wait_aliases(self, name: str, known: Mapping[str, int], timeout_s: float = 30.0) -> list[ModelAlias]:
        async def changed() -> bool:
            return {each.alias: each.number for each in await self.aliases(name)} != dict(known)

        await self._until(ALIASES, name, changed, timeout_s)
        return await self.aliases(name)

    @abstractmethod
    async def _take(self, worker: WorkerStatus, limit: int, lease_s: float) -> Sequence[tuple[Rollout, Lease]]:
        """Begins attempts of rollouts that are queued now."""

    @abstractmethod
    async def _open_session(self, session: NewRollout, rollout_id: str, token: str, lease_s: float) -> Rollout:
        """Returns the running rollout of the group; one that begins has this id and its lease this token."""

    @abstractmethod
    async def _last_finished(self, run_id: str) -> int:
        """Returns the number of finished rollouts of the run. NotFoundError if there is no such run."""

    @abstractmethod
    async def _finished(self, run_id: str, after: int, limit: int) -> list[Rollout]: ...

    @abstractmethod
    async def _summaries(self, query: SummaryQuery, tree: Filter, place: SummaryPlace | None) -> list[RolloutSummary]:
        """Returns the rows of the page, and one more where there is a next."""

    @abstractmethod
    async def _series(
        self, run_id: str, names: Sequence[str] | None, max_points: int, after_step: int | None
    ) -> dict[str, list[SeriesPoint]]:
        """Returns the points of metrics. NotFoundError if there is no such run."""

    @abstractmethod
    async def _later_resources(self, run_id: str, after: Mapping[str, int]) -> list[Resource]: ...

    @abstractmethod
    async def _later_metrics(self, run_id: str, after: int, limit: int) -> list[Metric]: ...

    @abstractmethod
    async def _add_token(self, token: Token, secret_hash: str, lifetime_s: float | None) -> Token:
        """Stores a token, with its times. NotFoundError if its run does not exist."""

    @abstractmethod
    async def _put_model(self, version: ModelVersion) -> ModelVersion: ...

    @abstractmethod
    async def _put_alias(self, alias: ModelAlias) -> ModelAlias: ...

    async def _until(
        self, topic: str, run_id: str, look: Callable[[], Awaitable[R]], wait_s: float, goal: int = 0
    ) -> R:
        """Returns what `look` finds, as soon as it finds something, or after `wait_s` seconds; it looks when notified."""
        if wait_s <= 0:
            return await look()
        deadline = time.monotonic() + wait_s
        with self._notifier.subscribe((topic, run_id), goal) as subscription:
            found = await look()
            while not found and (left_s := deadline - time.monotonic()) > 0:
                await subscription.wait(left_s)
                found = await look()
        return found


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise InputError(f"limit: expected at least 1, got {limit}")


# --- notifications ----------------------------------------------------------------------------------------------------

Topic = tuple[str, str]  # one of these, and a run
QUEUED = "queued"
FINISHED = "finished"
RESOURCES = "resources"
METRICS = "metrics"
ALIASES = "aliases"
"""Rollouts of the run are queued; the number of it that have finished; a resource has a new version; there are metrics. Of a
model's name in the place of the run: an alias was moved."""


class Notifier:
    """Listeners of any event loop, woken from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscriptions: dict[Topic, set[_Subscription]] = defaultdict(set)

    @contextmanager
    def subscribe(self, topic: Topic, goal: int = 0) -> Iterator[_Subscription]:
        """Subscribes to notifications of `topic` with at least the value `goal`.

        Enter before looking at the data: what is committed between the look and the wait then ends the wait.
        """
        subscription = _Subscription(goal)
        with self._lock:
            self._subscriptions[topic].add(subscription)
        try:
            yield subscription
        finally:
            with self._lock:
                self._subscriptions[topic].discard(subscription)
                if not self._subscriptions[topic]:
                    del self._subscriptions[topic]

    def notify(self, values: Mapping[Topic, int]) -> None:
        """Wake the subscriptions of these topics whose goal is reached."""
        with self._lock:
            woken = [
                subscription
                for topic, value in values.items()
                for subscription in self._subscriptions.get(topic, ())
                if subscription.goal <= value
            ]
        for subscription in woken:
            subscription.wake()

    def notify_all(self) -> None:
        """Wake every subscription, whatever it waits for: a notification may have been missed."""
        with self._lock:
            woken = [subscription for subscriptions in self._subscriptions.values() for subscription in subscriptions]
        for subscription in woken:
            subscription.wake()


class _Subscription:
    def __init__(self, goal: int) -> None:
        self.goal = goal
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def wake(self) -> None:
        with suppress(RuntimeError):  # its loop has closed, perhaps this very moment: nobody waits any more
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, timeout_s: float) -> None:
        """Return when notified since the last wait, or after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return
        self._event.clear()
