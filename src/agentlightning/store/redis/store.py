"""RedisLightningStore: the methods on a Redis server.

Driven by whoever owns the store: a server, or a test. Methods that write are transactions (writes.py), which the writer
applies together for all who call at the same time; lists are read in portions (reads.py). Transactions publish what they
brought, and one socket of the process notifies those who wait (waiting.py).
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import uuid_utils

from agentlightning.errors import StoreError
from agentlightning.records import (
    JSON,
    Call,
    CallCredit,
    Lease,
    NewRollout,
    Resource,
    Reward,
    Rollout,
    Run,
    RunState,
    RunStatistics,
    Span,
    WorkerStatus,
)
from agentlightning.store import codec as records
from agentlightning.store.audit import current_actor
from agentlightning.store.base import LEASE_S, RolloutQuery
from agentlightning.store.models import ModelVersion
from agentlightning.store.redis import codec, reads, writes
from agentlightning.store.redis import models as registry
from agentlightning.store.redis.address import Address
from agentlightning.store.redis.connection import RedisConnection, check_server, prepare_data
from agentlightning.store.redis.transactions import Reads, RedisWriter, Transaction
from agentlightning.store.rules import check_run_id, reward_number
from agentlightning.store.tokens import Token
from agentlightning.store.waiting import WaitingStore

P = ParamSpec("P")
R = TypeVar("R")

MAX_DELETED_PER_TRANSACTION = 200
"""Rollouts that one transaction deletes: a few milliseconds, during which others wait."""


def _reads(
    read: Callable[Concatenate[RedisConnection, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[RedisLightningStore, P], Coroutine[Any, Any, R]]:
    """The method that reads this."""

    @functools.wraps(read)
    async def method(store: RedisLightningStore, /, *args: P.args, **named: P.kwargs) -> R:
        return await read(store._opened(), *args, **named)

    return method


def _writes(
    write: Callable[Concatenate[Transaction, P], Reads[R]],
) -> Callable[Concatenate[RedisLightningStore, P], Coroutine[Any, Any, R]]:
    """The method that writes this."""

    @functools.wraps(write)
    async def method(store: RedisLightningStore, /, *args: P.args, **named: P.kwargs) -> R:
        return await store._write(lambda transaction: write(transaction, *args, **named))

    return method


class RedisLightningStore(WaitingStore):
    """A store at ``redis://host/number?prefix=name``. Its clock is the server's, unless `now_ns` is given."""

    def __init__(self, url: str, now_ns: Callable[[], int] | None = None) -> None:
        super().__init__()
        self._address = Address.at(url)
        self._now_ns = now_ns
        self._connection: RedisConnection | None = None
        self._writer: RedisWriter | None = None
        self._heard: Callable[[float, int], None] | None = None

    def watch_commits(self, heard: Callable[[float, int], None]) -> None:
        self._heard = heard
        if self._writer is not None:
            self._writer.heard = heard

    async def open(self) -> None:
        if self._connection is not None:
            return
        self._connection = RedisConnection(self._address, self._notifier)
        self._writer = RedisWriter(self._connection, self._now_ns)
        self._writer.heard = self._heard
        try:
            await self._connection.open()
            await check_server(self._connection)
            self._secret = await prepare_data(self._connection)
        except BaseException:
            await self.close()
            raise
        self._connection.listen(self.background)

    async def close(self) -> None:
        connection, writer = self._connection, self._writer
        self._connection = self._writer = None
        if writer is not None and connection is not None:
            await connection.at_home(writer.stop)
            await connection.at_home(connection.close)

    async def signing_secret(self) -> bytes:
        self._opened()
        return self._secret

    # --- runs -----------------------------------------------------------------------------------------------------

    async def create_run(self, name: str, config: JSON, run_id: str | None = None) -> Run:
        if run_id is not None:
            check_run_id(run_id)
        binds = current_actor().binds
        made = await self._write(lambda t: writes.create_run(t, name, config, run_id, binds))
        [run] = await self.runs([made])
        return run

    async def update_run(self, run_id: str, state: RunState | None = None, summary: JSON | None = None) -> Run:
        await self._write(lambda t: writes.update_run(t, run_id, state, summary or {}))
        [run] = await self.runs([run_id])
        return run

    runs = _reads(reads.runs)

    # --- rollouts and attempts ------------------------------------------------------------------------------------

    async def enqueue(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        new = [(str(uuid_utils.uuid7()), rollout) for rollout in rollouts]
        return await self._write(lambda t: writes.enqueue(t, new))

    async def _take(self, worker: WorkerStatus, limit: int, lease_s: float) -> list[tuple[Rollout, Lease]]:
        token = secrets.token_hex(12)
        taken: Any = None
        while taken is None:
            taken = await self._write(lambda t: writes.claim(t, worker, limit, lease_s, token))
        if taken and isinstance(taken[0][0], str):  # the request was sent again: these are what it took
            found = {each.id: each for each in await self.rollouts(RolloutQuery(ids=[each for each, _ in taken]))}
            taken = [(found[rollout_id], lease) for rollout_id, lease in taken if rollout_id in found]
        return [(each, Lease(rollout_id=each.id, attempt=each.attempt, token=lease)) for each, lease in taken]

    async def heartbeat(self, worker: WorkerStatus, leases: Sequence[Lease], lease_s: float = LEASE_S) -> list[bool]:
        return await self._write(lambda t: writes.heartbeat(t, worker, leases, lease_s))

    finish = _writes(writes.finish)
    cancel = _writes(writes.cancel)

    async def expire_leases(self, within_s: float | None = None) -> int:
        until_ns = None
        if within_s is not None:
            now_ns, _ = await self._opened().query_at([], self._now_ns)
            until_ns = now_ns + int(within_s * 1e9)
        return await self._write(lambda t: writes.expire(t, until_ns))

    _open_session = _writes(writes.open_session)

    rollouts = _reads(reads.rollouts)
    count = _reads(reads.count)
    _summaries = _reads(reads.summaries)
    attempts = _reads(reads.attempts)

    _last_finished = _reads(reads.last_finished)
    _finished = _reads(reads.finished)
    workers = _reads(reads.workers)

    # --- the record -----------------------------------------------------------------------------------------------

    async def append_calls(self, calls: Sequence[Call]) -> None:
        new = [(call, codec.packed(records.call_row(call))) for call in calls]
        if new:
            await self._write(lambda t: writes.append_calls(t, new))

    async def append_spans(self, spans: Sequence[Span]) -> None:
        new = [(span, codec.packed(records.SPANS.row(span))) for span in spans]
        if new:
            await self._write(lambda t: writes.append_spans(t, new))

    put_files = _writes(writes.put_files)
    files = _reads(reads.files)

    mark_delivered = _writes(writes.mark_delivered)
    calls = _reads(reads.calls)
    spans = _reads(reads.spans)

    async def record_rewards(self, rewards: Sequence[Reward]) -> None:
        new = [replace(reward, value=reward_number(reward.value, reward.name)) for reward in rewards]
        await self._write(lambda t: writes.record_rewards(t, new))

    async def record_feedback(self, rewards: Sequence[Reward]) -> None:
        new = [replace(reward, value=reward_number(reward.value, reward.name)) for reward in rewards]
        await self._write(lambda t: writes.record_feedback(t, new))

    rewards = _reads(reads.rewards)

    async def put_resources(
        self, resources: Sequence[Resource], after: Mapping[str, int] | None = None
    ) -> list[Resource]:
        if not resources:
            return []
        stored = await self._write(lambda t: writes.put_resources(t, resources, after or {}))
        return [
            replace(resource, version=version, created_ns=created_ns)
            for resource, (version, created_ns) in zip(resources, stored, strict=True)
        ]

    resources = _reads(reads.resources)

    log_metrics = _writes(writes.log_metrics)
    metrics = _reads(reads.metrics)
    _series = _reads(reads.series)

    # --- waiting and statistics -----------------------------------------------------------------------------------

    _later_resources = _reads(reads.later_resources)
    _later_metrics = _reads(reads.later_metrics)

    async def statistics(self, run_id: str | None = None) -> list[RunStatistics]:
        return await reads.statistics(self._opened(), self._now_ns, run_id)

    _size = _reads(reads.size)

    # --- the end of data ------------------------------------------------------------------------------------------

    drop_records = _writes(writes.drop_records)

    async def delete_runs(self, run_ids: Sequence[str]) -> int:
        deleted = 0
        for run_id in dict.fromkeys(run_ids):
            await self.retire_models(run_id)
            known, more = await self._delete_portion(run_id, 0)
            deleted += known
            portion = 0
            while more:
                portion += 1
                _, more = await self._delete_portion(run_id, portion)
        return deleted

    async def _delete_portion(self, run_id: str, portion: int) -> Sequence[bool]:
        part = f"{run_id} {portion}"
        return await self._write(lambda t: writes.delete_portion(t, run_id, MAX_DELETED_PER_TRANSACTION), part)

    # --- access ---------------------------------------------------------------------------------------------------

    async def _add_token(self, token: Token, secret_hash: str, lifetime_s: float | None) -> Token:
        token_id, created_ns, expires_ns = await self._write(
            lambda t: writes.add_token(t, token, secret_hash, lifetime_s)
        )
        return replace(token, id=token_id, created_ns=created_ns, expires_ns=expires_ns)

    tokens = _reads(reads.tokens)
    find_token = _reads(reads.find_token)

    revoke_token = _writes(writes.revoke_token)
    _entries = _reads(reads.audit)

    # --- steps and checkpoints ------------------------------------------------------------------------------------

    open_step = _writes(writes.open_step)
    close_step = _writes(writes.close_step)
    steps = _reads(reads.steps)

    reopen_steps = _writes(writes.reopen_steps)
    put_checkpoint = _writes(writes.put_checkpoint)
    checkpoints = _reads(reads.checkpoints)

    # --- credit ---------------------------------------------------------------------------------------------------

    async def record_credit(self, credits: Sequence[CallCredit]) -> None:
        new = [(credit, codec.packed(records.credit_row(credit))) for credit in credits]
        await self._write(lambda t: writes.record_credit(t, new))

    credit = _reads(reads.credit)

    drop_credit = _writes(writes.drop_credit)

    # --- models ---------------------------------------------------------------------------------------------------

    async def _put_model(self, version: ModelVersion) -> ModelVersion:
        part = f"{version.reference} {version.revision}"  # a run that is deleted changes several
        return await self._write(lambda t: registry.put_model(t, version), part)

    models = _reads(registry.read)
    _put_alias = _writes(registry.put_alias)
    aliases = _reads(registry.aliases)

    # --- how ------------------------------------------------------------------------------------------------------

    def _opened(self) -> RedisConnection:
        if self._connection is None:
            raise StoreError(f"{self._address.name} is not open: use `async with store`, or await store.open()")
        return self._connection

    async def _write(self, write: Callable[[Transaction], Reads[R]], part: str = "") -> R:
        self._opened()
        assert self._writer is not None
        return await self._writer.submit(write, current_actor().name, part)
