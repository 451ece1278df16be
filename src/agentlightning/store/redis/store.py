"""RedisLightningStore: the methods on a Redis server.

Driven by whoever owns the store: a server, or a test. Each method that writes is one Lua script (lua/), so that it happens
wholly or not at all and costs one round trip; the writer sends those of concurrent callers together. Lists are read in
portions. Waiting is pushed: scripts publish what they brought, and one socket of the process rings the notifier.
"""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import islice
from typing import Any, Concatenate, ParamSpec, TypeVar

import uuid_utils

from agentlightning.errors import InputError, StoreError
from agentlightning.store import keys
from agentlightning.store.base import LEASE_S, MAX_FINISHED, LightningStore
from agentlightning.store.codec import dump
from agentlightning.store.notifier import Notifier, Topic
from agentlightning.store.redis import codec, reads, scripts
from agentlightning.store.redis.address import Address
from agentlightning.store.redis.checks import check_server, prepare_data
from agentlightning.store.redis.codec import Request, whole
from agentlightning.store.redis.connection import RedisConnection
from agentlightning.store.redis.writer import RedisWriter
from agentlightning.store.run_ids import check_run_id, run_ids
from agentlightning.types import (
    JSON,
    Call,
    Checkpoint,
    Claim,
    Consumed,
    Finish,
    Lease,
    Metric,
    NewRollout,
    Resource,
    Reward,
    Rollout,
    Run,
    RunSize,
    RunState,
    RunStatistics,
    Span,
    Step,
    WorkerStatus,
)

P = ParamSpec("P")
R = TypeVar("R")

MAX_IDS_TRIED = 16
MAX_ROWS_PER_SCRIPT = 1000
"""Rows that one script takes in from one caller; longer lists are several transactions, each whole."""
MAX_DELETED_PER_SCRIPT = 200
"""Rollouts that one script deletes: a few milliseconds, during which others wait."""


def _reads(
    read: Callable[Concatenate[RedisConnection, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[RedisLightningStore, P], Coroutine[Any, Any, R]]:
    """The method that reads this."""

    @functools.wraps(read)
    async def method(store: RedisLightningStore, /, *args: P.args, **named: P.kwargs) -> R:
        return await read(store._opened(), *args, **named)

    return method


class RedisLightningStore(LightningStore):
    """A store at ``redis://host/number?prefix=name``. Its clock is the server's, unless `now_ns` is given."""

    def __init__(self, url: str, now_ns: Callable[[], int] | None = None) -> None:
        self._address = Address.at(url)
        self._now_ns = now_ns
        self._notifier = Notifier()
        self._connection: RedisConnection | None = None
        self._writer: RedisWriter | None = None
        self._secret = b""
        self._heard: Callable[[float, int], None] | None = None

    def watch_commits(self, heard: Callable[[float, int], None]) -> None:
        self._heard = heard
        if self._writer is not None:
            self._writer.heard = heard

    async def open(self) -> None:
        if self._connection is not None:
            return
        self._connection = RedisConnection(self._address, scripts.load(), self._notifier)
        self._writer = RedisWriter(self._connection, self._now_ns)
        self._writer.heard = self._heard
        try:
            await self._connection.open()
            await check_server(self._connection)
            self._secret = await prepare_data(self._writer, self._address.name)
        except BaseException:
            await self.close()
            raise
        self._connection.listen()

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
        now_ns = await reads.now_ns(self._opened(), self._now_ns)
        request: dict[str, Any] = {"name": name, "config": dump(config, "config"), "created_ns": whole(now_ns)}
        if run_id is not None:
            [made] = await self._write("create_run", {**request, "ids": [run_id], "given": 1})
        else:
            made = ""
            candidates = run_ids(now_ns)
            while not made:
                answer = await self._write("create_run", {**request, "ids": list(islice(candidates, MAX_IDS_TRIED))})
                made = answer[0] if answer else ""
        [run] = await self.runs([made])
        return run

    async def update_run(self, run_id: str, state: RunState | None = None, summary: JSON | None = None) -> Run:
        merged = [part for name, value in (summary or {}).items() for part in (name, dump(value, "summary"))]
        request: dict[str, Any] = {"run_id": run_id, "summary": merged}
        flat, known = await self._write("update_run", request | ({"state": state} if state is not None else {}))
        return codec.read_run(run_id, flat, known)

    runs = _reads(reads.runs)

    # --- rollouts and attempts ------------------------------------------------------------------------------------

    async def enqueue(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        run_ids = sorted({rollout.run_id for rollout in rollouts})
        new = [codec.new_rollout(rollout, str(uuid_utils.uuid7())) for rollout in rollouts]
        enqueued: list[Rollout] = []
        for start in range(0, len(new), MAX_ROWS_PER_SCRIPT):
            rows_now, blobs = zip(*new[start : start + MAX_ROWS_PER_SCRIPT], strict=True)
            created_ns, found = await self._write("enqueue", {"runs": run_ids, "rollouts": rows_now}, blobs)
            enqueued += [
                codec.read_rollout(known) if known else codec.queued(rollout, row["id"], int(created_ns))
                for rollout, row, known in zip(
                    rollouts[start : start + MAX_ROWS_PER_SCRIPT], rows_now, found, strict=True
                )
            ]
        return enqueued

    async def claim(
        self,
        worker: WorkerStatus,
        limit: int = 1,
        lease_s: float = LEASE_S,
        wait_s: float = 0.0,
    ) -> list[Claim]:
        if limit < 1:
            raise InputError(f"limit: expected at least 1, got {limit}")
        row = codec.worker_row(worker)

        async def take() -> list[tuple[list[str], str]]:
            request = {"worker": row, "limit": limit, "lease_ns": codec.nanoseconds(lease_s)}
            return list(await self._write("claim", {**request, "token": secrets.token_hex(12)}))

        taken = await self._until(("queued", worker.run_id), take, wait_s)
        claims = []
        for flat, token in taken:
            rollout = codec.read_rollout(flat)
            lease = Lease(rollout_id=rollout.id, attempt=rollout.attempt, token=token)
            claims.append(Claim(rollout=rollout, lease=lease, key=keys.mint(self._secret, rollout.id, rollout.attempt)))
        return claims

    async def heartbeat(self, worker: WorkerStatus, leases: Sequence[Lease], lease_s: float = LEASE_S) -> list[bool]:
        held = [codec.lease_row(lease) for lease in leases]
        request = {"worker": codec.worker_row(worker), "leases": held, "lease_ns": codec.nanoseconds(lease_s)}
        return [bool(holds) for holds in await self._write("heartbeat", request)]

    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        new = [codec.finish_row(each) for each in finishes]
        parts = [new[start : start + MAX_ROWS_PER_SCRIPT] for start in range(0, len(new), MAX_ROWS_PER_SCRIPT)]
        return [bool(held) for part in parts for held in await self._write("finish", part)]

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        return int(await self._write("cancel", sorted(set(rollout_ids))))

    async def expire_leases(self) -> int:
        return int(await self._write("expire", []))

    rollouts = _reads(reads.rollouts)
    count = _reads(reads.count)
    attempts = _reads(reads.attempts)

    async def wait(self, run_id: str, after: int = 0, at_least: int = 1, timeout_s: float = 30.0) -> list[Rollout]:
        connection, goal = self._opened(), after + at_least

        async def enough() -> bool:
            return await reads.last_finished(connection, run_id) >= goal

        await self._until(("finished", run_id), enough, timeout_s, goal)
        return await reads.finished(connection, run_id, after, MAX_FINISHED)

    workers = _reads(reads.workers)

    # --- the record -----------------------------------------------------------------------------------------------

    async def append_calls(self, calls: Sequence[Call]) -> None:
        await self._append("append_calls", [codec.call_row(call) for call in calls])

    async def append_spans(self, spans: Sequence[Span]) -> None:
        await self._append("append_spans", [codec.span_row(span) for span in spans])

    calls = _reads(reads.calls)
    spans = _reads(reads.spans)

    async def record_rewards(self, rewards: Sequence[Reward]) -> None:
        await self._append("record_rewards", [(codec.reward_row(reward),) for reward in rewards])

    rewards = _reads(reads.rewards)

    async def put_resources(self, resources: Sequence[Resource]) -> list[Resource]:
        return await reads.put_resources(self._write, resources)

    resources = _reads(reads.resources)

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        await self._append("log_metrics", [(codec.metric_row(metric),) for metric in metrics])

    metrics = _reads(reads.metrics)

    # --- news and numbers -----------------------------------------------------------------------------------------

    async def wait_resources(self, run_id: str, after: Mapping[str, int], timeout_s: float = 30.0) -> list[Resource]:
        connection = self._opened()
        return await self._until(
            ("resources", run_id), lambda: reads.later_resources(connection, run_id, after), timeout_s
        )

    async def follow_metrics(
        self, run_id: str, after: int = 0, timeout_s: float = 30.0, limit: int = 10_000
    ) -> list[Metric]:
        if limit < 1:
            raise InputError(f"limit: expected at least 1, got {limit}")
        connection = self._opened()
        return await self._until(
            ("metrics", run_id), lambda: reads.later_metrics(connection, run_id, after, limit), timeout_s
        )

    async def statistics(self) -> list[RunStatistics]:
        return await reads.statistics(self._opened(), self._now_ns)

    async def sizes(self, run_ids: Sequence[str] | None = None) -> list[RunSize]:
        found = await self.runs(run_ids)
        return [await reads.size(self._opened(), run.id) for run in found]

    # --- the end of data ------------------------------------------------------------------------------------------

    async def drop_records(self, rollout_ids: Sequence[str]) -> int:
        return int(await self._write("drop_records", sorted(set(rollout_ids))))

    async def delete_runs(self, run_ids: Sequence[str]) -> int:
        deleted = 0
        for run_id in dict.fromkeys(run_ids):
            request = {"run_id": run_id, "portion": MAX_DELETED_PER_SCRIPT}
            known, more = await self._write("delete_run", request)
            while more:
                _, more = await self._write("delete_run", request)
            deleted += known
        return deleted

    # --- steps and checkpoints ------------------------------------------------------------------------------------

    async def open_step(self, run_id: str, step: int, consumed: Sequence[Consumed]) -> Step:
        listed = codec.consumed_list(consumed)
        request = {"run_id": run_id, "step": whole(step), "consumed": listed, "list": codec.dump(listed).decode()}
        return codec.read_step(run_id, await self._write("open_step", request))

    async def close_step(self, run_id: str, step: int, version: int) -> Step:
        request = {"run_id": run_id, "step": whole(step), "version": whole(version)}
        return codec.read_step(run_id, await self._write("close_step", request))

    steps = _reads(reads.steps)

    async def reopen_steps(self, run_id: str, after: int) -> list[Step]:
        later = await self._write("reopen_steps", {"run_id": run_id, "after": after})
        return [codec.read_step(run_id, row) for row in later]

    async def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        await self._write("put_checkpoint", codec.checkpoint_row(checkpoint))

    checkpoints = _reads(reads.checkpoints)

    # --- how ------------------------------------------------------------------------------------------------------

    def _opened(self) -> RedisConnection:
        if self._connection is None:
            raise StoreError(f"{self._address.name} is not open: use `async with store`, or await store.open()")
        return self._connection

    async def _write(self, verb: str, request: Request, blobs: Sequence[bytes] = ()) -> Any:
        self._opened()
        assert self._writer is not None
        return await self._writer.submit(verb, request, blobs)

    async def _append(self, verb: str, new: Sequence[tuple[list[Any], *tuple[bytes, ...]]]) -> None:
        """Rows, each with what its blobs are."""
        for start in range(0, len(new), MAX_ROWS_PER_SCRIPT):
            part = new[start : start + MAX_ROWS_PER_SCRIPT]
            await self._write(verb, [row for row, *_ in part], [blob for _, *blobs in part for blob in blobs])

    async def _until(self, topic: Topic, look: Callable[[], Awaitable[R]], wait_s: float, goal: int = 0) -> R:
        """Returns what `look` finds, as soon as it finds something, or after `wait_s` seconds; it looks when notified."""
        deadline = time.monotonic() + wait_s
        with self._notifier.subscribe(topic, goal=goal) as subscription:
            found = await look()
            while not found and (left_s := deadline - time.monotonic()) > 0:
                await subscription.wait(left_s)
                found = await look()
        return found
