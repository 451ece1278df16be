"""RedisLightningStore: the methods on a Redis server.

Driven by whoever owns the store: a server, or a test. Each method that writes is one Lua script (lua/), so that it happens
wholly or not at all and costs one round trip; the writer sends those of concurrent callers together. Lists are read in
portions. Scripts publish what they brought, and one socket of the process notifies those who wait (waiting.py).
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, Concatenate, ParamSpec, TypeVar

import uuid_utils

from agentlightning.errors import StoreError
from agentlightning.records import (
    JSON,
    Call,
    CallCredit,
    Checkpoint,
    Consumed,
    Finish,
    Lease,
    Metric,
    NewRollout,
    Resource,
    Reward,
    Rollout,
    Run,
    RunState,
    RunStatistics,
    Span,
    Step,
    WorkerStatus,
)
from agentlightning.store.audit import current_actor
from agentlightning.store.base import LEASE_S
from agentlightning.store.codec import dump, text
from agentlightning.store.gateway_events import IGNORED_BASE_URL, NO_CALLS
from agentlightning.store.model_versions import ModelAlias, ModelVersion
from agentlightning.store.redis import codec, reads, scripts
from agentlightning.store.redis import models as registry
from agentlightning.store.redis.address import Address
from agentlightning.store.redis.checks import check_server, prepare_data
from agentlightning.store.redis.codec import Request, whole
from agentlightning.store.redis.connection import RedisConnection
from agentlightning.store.redis.writer import RedisWriter
from agentlightning.store.run_ids import check_run_id, run_ids
from agentlightning.store.session_store import HOLDER
from agentlightning.store.tokens import Token
from agentlightning.store.waiting import WaitingStore

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
        now_ns = await reads.now_ns(self._opened(), self._now_ns)
        request: dict[str, Any] = {"name": name, "config": dump(config, "config"), "created_ns": whole(now_ns)}
        if (binds := current_actor().binds) is not None:
            request["binds"] = binds
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
        request: dict[str, Any] = _by_actor(run_id=run_id, summary=merged)
        flat, known = await self._write("update_run", request | ({"state": state} if state is not None else {}))
        return codec.read_run(run_id, flat, known)

    runs = _reads(reads.runs)

    # --- rollouts and attempts ------------------------------------------------------------------------------------

    async def enqueue(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        run_ids = sorted({rollout.run_id for rollout in rollouts})
        pins = sorted({(rollout.run_id, *pin) for rollout in rollouts for pin in rollout.prompts.items()})
        new = [codec.new_rollout(rollout, str(uuid_utils.uuid7())) for rollout in rollouts]
        request = {"runs": run_ids, "templates": pins}
        enqueued: list[Rollout] = []
        for start in range(0, len(new), MAX_ROWS_PER_SCRIPT):
            rows_now, blobs = zip(*new[start : start + MAX_ROWS_PER_SCRIPT], strict=True)
            created_ns, found = await self._write("enqueue", request | {"rollouts": rows_now}, blobs)
            enqueued += [
                codec.read_rollout(known) if known else codec.queued(rollout, row["id"], int(created_ns))
                for rollout, row, known in zip(
                    rollouts[start : start + MAX_ROWS_PER_SCRIPT], rows_now, found, strict=True
                )
            ]
        return enqueued

    async def _take(self, worker: WorkerStatus, limit: int, lease_s: float) -> list[tuple[Rollout, Lease]]:
        request = {"worker": codec.worker_row(worker), "limit": limit, "lease_ns": codec.nanoseconds(lease_s)}
        taken = []
        for flat, token in await self._write("claim", {**request, "token": secrets.token_hex(12)}):
            rollout = codec.read_rollout(flat)
            taken.append((rollout, Lease(rollout_id=rollout.id, attempt=rollout.attempt, token=token)))
        return taken

    async def heartbeat(self, worker: WorkerStatus, leases: Sequence[Lease], lease_s: float = LEASE_S) -> list[bool]:
        held = [asdict(lease) for lease in leases]
        request = {"worker": codec.worker_row(worker), "leases": held, "lease_ns": codec.nanoseconds(lease_s)}
        return [bool(holds) for holds in await self._write("heartbeat", request)]

    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        new = [codec.finish_row(each) for each in finishes]
        parts = [new[start : start + MAX_ROWS_PER_SCRIPT] for start in range(0, len(new), MAX_ROWS_PER_SCRIPT)]
        return [bool(held) for part in parts for held in await self._write("finish", part)]

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        return int(await self._write("cancel", _by_actor(ids=sorted(set(rollout_ids)))))

    async def expire_leases(self, within_s: float | None = None) -> int:
        until = "" if within_s is None else str(await reads.now_ns(self._opened(), self._now_ns) + int(within_s * 1e9))
        return int(await self._write("expire", {"until_ns": until, "silence": f"{NO_CALLS}: {IGNORED_BASE_URL}"}))

    async def _open_session(self, session: NewRollout, rollout_id: str, token: str, lease_s: float) -> Rollout:
        row, blob = codec.new_rollout(session, rollout_id)
        request = {"rollout": row, "token": token, "lease_ns": codec.nanoseconds(lease_s), "holder": HOLDER}
        pins = sorted((session.run_id, *pin) for pin in session.prompts.items())
        return codec.read_rollout(await self._write("open_session", request | {"templates": pins}, [blob]))

    rollouts = _reads(reads.rollouts)
    count = _reads(reads.count)
    _summaries = _reads(reads.summaries)
    attempts = _reads(reads.attempts)

    _last_finished = _reads(reads.last_finished)
    _finished = _reads(reads.finished)
    workers = _reads(reads.workers)

    # --- the record -----------------------------------------------------------------------------------------------

    async def append_calls(self, calls: Sequence[Call]) -> None:
        await self._append("append_calls", [codec.call_row(call) for call in calls])

    async def append_spans(self, spans: Sequence[Span]) -> None:
        await self._append("append_spans", [codec.span_row(span) for span in spans])

    async def put_files(self, run_id: str, rollout_id: str | None, files: Mapping[str, bytes]) -> None:
        await self._write(
            "put_files", (run_id, rollout_id or "", sorted(files)), [files[name] for name in sorted(files)]
        )

    files = _reads(reads.files)

    async def mark_delivered(self, rollout_id: str, attempt: int, call_ids: Sequence[str], delivered: bool) -> None:
        # Read, then written whole: nothing else of a recorded call ever changes.
        wanted = set(call_ids)
        found = [call for call in await self.calls([rollout_id], attempt) if call.id in wanted]
        marked = [codec.call_row(replace(call, delivered=delivered)) for call in found]
        await self._append("replace_calls", marked)

    calls = _reads(reads.calls)
    spans = _reads(reads.spans)

    async def record_rewards(self, rewards: Sequence[Reward]) -> None:
        await self._append("record_rewards", [(codec.reward_row(reward),) for reward in rewards])

    async def record_feedback(self, rewards: Sequence[Reward]) -> None:
        await self._append("record_feedback", [(codec.reward_row(reward),) for reward in rewards])

    rewards = _reads(reads.rewards)

    async def put_resources(
        self, resources: Sequence[Resource], after: Mapping[str, int] | None = None
    ) -> list[Resource]:
        return await reads.put_resources(self._write, resources, after or {})

    resources = _reads(reads.resources)

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        await self._append("log_metrics", [(codec.metric_row(metric),) for metric in metrics])

    metrics = _reads(reads.metrics)
    _series = _reads(reads.series)

    # --- waiting and statistics -----------------------------------------------------------------------------------

    _later_resources = _reads(reads.later_resources)
    _later_metrics = _reads(reads.later_metrics)

    async def statistics(self, run_id: str | None = None) -> list[RunStatistics]:
        return await reads.statistics(self._opened(), self._now_ns, run_id)

    _size = _reads(reads.size)

    # --- the end of data ------------------------------------------------------------------------------------------

    async def drop_records(self, rollout_ids: Sequence[str]) -> int:
        return int(await self._write("drop_records", _by_actor(ids=sorted(set(rollout_ids)))))

    async def delete_runs(self, run_ids: Sequence[str]) -> int:
        deleted = 0
        for run_id in dict.fromkeys(run_ids):
            request = _by_actor(run_id=run_id, portion=MAX_DELETED_PER_SCRIPT)
            known, more = await self._write("delete_run", request)
            while more:
                _, more = await self._write("delete_run", request)
            deleted += known
        return deleted

    # --- access ---------------------------------------------------------------------------------------------------

    async def _add_token(self, token: Token, secret_hash: str, lifetime_s: float | None) -> Token:
        request = _by_actor(
            id=token.id, name=token.name, role=token.role, run_id=token.run_id or "", lifetime_s=lifetime_s
        )
        request |= {
            "secret_hash": secret_hash,
            "lifetime_ns": "" if lifetime_s is None else codec.nanoseconds(lifetime_s),
        }
        created_ns, expires_ns = await self._write("add_token", request)
        return replace(token, created_ns=int(created_ns), expires_ns=int(expires_ns) if expires_ns else None)

    tokens = _reads(reads.tokens)
    find_token = _reads(reads.find_token)

    async def revoke_token(self, token_id: str) -> Token:
        return codec.read_token(token_id, await self._write("revoke_token", _by_actor(id=token_id)))

    _entries = _reads(reads.audit)

    # --- steps and checkpoints ------------------------------------------------------------------------------------

    async def open_step(self, run_id: str, step: int, consumed: Sequence[Consumed]) -> Step:
        outcomes = [(each.rollout_id, each.outcome) for each in consumed]
        listed = codec.dump(codec.consumed_list(consumed)).decode()
        request = {"run_id": run_id, "step": whole(step), "consumed": outcomes, "list": listed}
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

    # --- credit ---------------------------------------------------------------------------------------------------

    async def record_credit(self, credits: Sequence[CallCredit]) -> None:
        await self._append("record_credit", [codec.credit_row(credit) for credit in credits])

    credit = _reads(reads.credit)

    async def drop_credit(self, run_id: str, before: int) -> None:
        await self._write("drop_credit", {"run_id": run_id, "before": whole(before)})

    # --- models ---------------------------------------------------------------------------------------------------

    async def _register_model(self, version: ModelVersion) -> ModelVersion:
        return await registry.register(self._write, version)

    models = _reads(registry.read)

    async def _describe_model(
        self, name: str, number: int, tags: dict[str, str] | None, notes: str | None, pinned: bool | None
    ) -> ModelVersion:
        return await registry.describe(self._write, name, number, tags, notes, pinned)

    async def _set_alias(self, name: str, alias: str, number: int | None, reason: JSON) -> ModelAlias:
        return await registry.set_alias(self._write, name, alias, number, reason)

    aliases = _reads(registry.aliases)

    async def _lease_model(self, name: str, number: int, holder: str, lifetime_s: float) -> None:
        await registry.lease(self._write, name, number, holder, lifetime_s)

    async def release_model(self, name: str, number: int, holder: str) -> None:
        await registry.release(self._write, name, number, holder)

    async def delete_model(self, name: str, number: int) -> None:
        await registry.delete(self._write, name, number)

    # --- how ------------------------------------------------------------------------------------------------------

    def _opened(self) -> RedisConnection:
        if self._connection is None:
            raise StoreError(f"{self._address.name} is not open: use `async with store`, or await store.open()")
        return self._connection

    async def _write(self, method: str, request: Request, blobs: Sequence[bytes] = ()) -> Any:
        self._opened()
        assert self._writer is not None
        return await self._writer.submit(method, request, blobs)

    async def _append(self, method: str, new: Sequence[tuple[list[Any], *tuple[bytes, ...]]]) -> None:
        """Rows, each with what its blobs are."""
        for start in range(0, len(new), MAX_ROWS_PER_SCRIPT):
            part = new[start : start + MAX_ROWS_PER_SCRIPT]
            await self._write(method, [row for row, *_ in part], [blob for _, *blobs in part for blob in blobs])


def _by_actor(**request: Any) -> dict[str, Any]:
    """A request of whoever calls now, which the audit log is to name."""
    return {"actor": text(current_actor().name), **request}
