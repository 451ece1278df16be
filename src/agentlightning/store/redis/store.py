"""RedisLightningStore: the methods on a Redis server.

Driven by whoever owns the store: a server, or a test; base.py says what the methods mean. Those that write are transactions,
which the writer applies together for all who call at the same time (transactions.py); what several of them have in common is
in writes.py. Those that read are in reads.py.
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
    FINAL_STATES,
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
    Span,
    Step,
    WorkerStatus,
)
from agentlightning.store import codec as records
from agentlightning.store import rules
from agentlightning.store.base import LEASE_S, SESSION_HOLDER, RolloutQuery
from agentlightning.store.models import ModelAlias, ModelVersion, moved_alias
from agentlightning.store.redis import codec, writes
from agentlightning.store.redis.codec import dump, read, whole
from agentlightning.store.redis.connection import (
    Address,
    RedisConnection,
    check_server,
    prepare_data,
)
from agentlightning.store.redis.reads import RedisReads
from agentlightning.store.redis.transactions import Reads, RedisWriter, Transaction, peek, together
from agentlightning.store.request import bound_token
from agentlightning.store.rules import check_run_id, refusal
from agentlightning.store.tokens import Token
from agentlightning.store.waiting import ALIASES, METRICS

P = ParamSpec("P")
R = TypeVar("R")


def _writes(
    write: Callable[Concatenate[RedisLightningStore, Transaction, P], Reads[R]],
) -> Callable[Concatenate[RedisLightningStore, P], Coroutine[Any, Any, R]]:
    """The method that applies this transaction."""

    @functools.wraps(write)
    async def method(store: RedisLightningStore, /, *args: P.args, **named: P.kwargs) -> R:
        return await store._write(lambda t: write(store, t, *args, **named))

    return method


class RedisLightningStore(RedisReads):
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

    def _opened(self) -> RedisConnection:
        if self._connection is None:
            raise StoreError(f"{self._address.name} is not open: use `async with store`, or await store.open()")
        return self._connection

    async def _write(self, write: Callable[[Transaction], Reads[R]], part: str = "") -> R:
        self._opened()
        assert self._writer is not None
        return await self._writer.submit(write, part)

    # --- runs ---------------------------------------------------------------------------------------------------------

    async def create_run(self, name: str, config: JSON, run_id: str | None = None) -> Run:
        if run_id is not None:
            check_run_id(run_id)
        binds = bound_token()
        [run] = await self.runs([await self._write(lambda t: writes.create_run(t, name, config, run_id, binds))])
        return run

    @_writes
    def update_run(
        self, t: Transaction, run_id: str, state: RunState | None = None, summary: JSON | None = None
    ) -> Reads[Run]:
        yield from t.require_runs([run_id])
        [row] = yield from t.read(("HGET", f"run:{run_id}", "run"))
        before = read(Run, row)
        if state is not None:
            t.write("SADD" if state == "running" else "SREM", "active", run_id)
        merged = before.summary | (summary or {})
        run = replace(before, state=state or before.state, summary=merged, updated_ns=t.now_ns)
        t.write("HSET", f"run:{run_id}", "run", dump(run, "summary"))
        return run

    # --- rollouts and attempts ----------------------------------------------------------------------------------------

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

    @_writes
    def heartbeat(
        self, t: Transaction, worker: WorkerStatus, leases: Sequence[Lease], lease_s: float = LEASE_S
    ) -> Reads[list[bool]]:
        place = (f"workers:{worker.run_id}", worker.id)
        _, [row], held = yield from together(
            t.require_runs([worker.run_id]), peek(("HGET", *place)), writes.held(leases)
        )
        if row is not None:  # only a claim says who it is, so that a beat never hides a predecessor from it
            known = read(WorkerStatus, row)
            worker = replace(worker, host=known.host, pid=known.pid)
        t.write("HSET", *place, dump(replace(worker, seen_ns=t.now_ns), "worker"))
        for attempt in held.values():
            writes.unchanged(t, attempt.stored)
            writes.extend(t, attempt.stored.rollout, lease_s)
        return [lease in held for lease in leases]

    @_writes
    def finish(self, t: Transaction, finishes: Sequence[Finish]) -> Reads[list[bool]]:
        held = yield from writes.held([finish.lease for finish in finishes])
        known = yield from writes.recorded_calls(
            [
                (held[each.lease].stored.rollout, reward.call_id)
                for each in finishes
                if each.lease in held
                for reward in each.rewards
                if reward.call_id is not None
            ]
        )
        answers = []
        for each in finishes:
            attempt = held.pop(each.lease, None)
            answers.append(attempt is not None)
            if attempt is not None:
                brought, ending = rules.last_rewards(attempt.live, each, t.now_ns, known)
                rewards = writes.distinct([*attempt.rewards, *brought])
                if len(rewards) > len(attempt.rewards):
                    t.write("SET", f"rw:{attempt.key}", writes.rewards_row(rewards))
                writes.end(t, attempt, ending, attempt.evidence(rewards))
        return t.once(answers)

    @_writes
    def cancel(self, t: Transaction, rollout_ids: Sequence[str]) -> Reads[int]:
        found = yield from writes.stored_rollouts(sorted(set(rollout_ids)))
        live = yield from writes.attempts(each for each in found.values() if each.rollout.state not in FINAL_STATES)
        for attempt in live:
            writes.end(t, attempt, rules.cancelled(), None)
        return t.once(len(live))

    async def expire_leases(self, within_s: float | None = None) -> int:
        until_ns = None
        if within_s is not None:
            now_ns, _ = await self._opened().query_at([], self._now_ns)
            until_ns = now_ns + int(within_s * 1e9)
        return await self._write(lambda t: writes.expire(t, until_ns))

    @_writes
    def _open_session(
        self, t: Transaction, session: NewRollout, rollout_id: str, token: str, lease_s: float
    ) -> Reads[Rollout]:
        group = f"g:{session.run_id}:{session.group_id}"
        _, _, [count], newest = yield from together(
            t.require_runs([session.run_id]),
            writes.require_templates([session]),
            peek(("HLEN", group)),  # replicas of sessions are numbered without a gap
            writes.newest_templates(session.run_id),
        )
        [last_id] = yield [("HGET", group, count - 1)]
        last = yield from writes.stored_rollouts([last_id.decode()] if last_id is not None else [])
        for stored in last.values():
            if stored.rollout.state == "running":
                writes.unchanged(t, stored)
                writes.extend(t, stored.rollout, lease_s)
                return stored.rollout
        t.check(("HGET", group, count), None)
        queued = records.new_rollout(replace(session, replica=count), rollout_id, t.now_ns)
        new = rules.pinned(replace(queued, state="running", attempt=1, started_ns=t.now_ns), newest)
        writes.put_new(t, new)
        writes.lease(t, new, SESSION_HOLDER, token, lease_s)
        return new

    # --- the record ---------------------------------------------------------------------------------------------------

    async def append_calls(self, calls: Sequence[Call]) -> None:
        new = [(call, codec.packed(records.call_row(call))) for call in calls]
        if new:
            await self._write(lambda t: writes.append_calls(t, new))

    async def append_spans(self, spans: Sequence[Span]) -> None:
        new = [(span, codec.packed(records.SPANS.row(span))) for span in spans]
        if new:
            await self._write(lambda t: writes.append_spans(t, new))

    @_writes
    def mark_delivered(
        self, t: Transaction, rollout_id: str, attempt: int, call_ids: Sequence[str], delivered: bool
    ) -> Reads[None]:
        key = f"c:{rollout_id}:{attempt}"
        rows = yield from t.read(*[("HGET", key, call_id) for call_id in call_ids])
        for call_id, row in zip(call_ids, rows, strict=True):
            if row is not None:
                marked = replace(codec.unpacked(records.CALLS, row), delivered=delivered)
                t.write("HSET", key, call_id, codec.packed(records.call_row(marked)))

    async def record_rewards(self, rewards: Sequence[Reward]) -> None:
        new = [replace(reward, value=rules.reward_number(reward.value, reward.name)) for reward in rewards]
        await self._write(lambda t: writes.record_rewards(t, new))

    async def record_feedback(self, rewards: Sequence[Reward]) -> None:
        new = [replace(reward, value=rules.reward_number(reward.value, reward.name)) for reward in rewards]
        await self._write(lambda t: writes.record_feedback(t, new))

    @_writes
    def put_files(self, t: Transaction, run_id: str, rollout_id: str | None, files: Mapping[str, bytes]) -> Reads[None]:
        yield from t.require_runs([run_id])
        if rollout_id is not None:
            found = yield from writes.stored_rollouts([rollout_id])
            if rollout_id not in found or found[rollout_id].rollout.run_id != run_id:
                raise refusal("no_file_user", rollout_id, run_id)
        for name, content in sorted(files.items()):
            t.write("HSETNX", f"files:{run_id}", name, content)
            if rollout_id is not None:
                t.write("SADD", f"file_users:{run_id}:{name}", rollout_id)
                t.write("SADD", f"file_uses:{rollout_id}", name)

    # --- what belongs to a run ----------------------------------------------------------------------------------------

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

    @_writes
    def log_metrics(self, t: Transaction, metrics: Sequence[Metric]) -> Reads[None]:
        yield from t.require_runs([metric.run_id for metric in metrics])
        for metric in metrics:
            kept = replace(metric, value=float(metric.value), created_ns=metric.created_ns or t.now_ns)
            t.write("RPUSH", f"metrics:{metric.run_id}", dump(kept, "metric"))
            t.tell(METRICS, metric.run_id)
        t.once(None)

    @_writes
    def open_step(self, t: Transaction, run_id: str, step: int, consumed: Sequence[Consumed]) -> Reads[Step]:
        yield from t.require_runs([run_id])
        present = rules.present_step((yield from writes.read_step(t, run_id, step)), run_id, step, consumed)
        if present is not None:
            return present
        wanted = [each.rollout_id for each in consumed]
        found = yield from writes.stored_rollouts(wanted)
        eaten = yield from t.read(*[("HGET", f"r:{each}", "consumed") for each in found])
        known = {}
        for stored, eaten_by in zip(found.values(), eaten, strict=True):
            by = None if eaten_by is None else int(eaten_by.decode().partition(" ")[0])
            listed = {name: getattr(stored.rollout, name) for name in ("run_id", "mode", "state")}
            known[stored.rollout.id] = rules.ListedRollout(**listed, step=by)
        rules.check_listed(run_id, step, wanted, known)
        opened = Step(run_id=run_id, step=step, state="open", consumed=list(consumed), created_ns=t.now_ns)
        t.write("HSET", f"steps:{run_id}", whole(step), dump(opened, "consumed"))
        for each in consumed:
            t.write("HSET", f"r:{each.rollout_id}", "consumed", f"{step} {each.outcome}")
        return opened

    @_writes
    def close_step(self, t: Transaction, run_id: str, step: int, version: int) -> Reads[Step]:
        closed = rules.closed_step((yield from writes.read_step(t, run_id, step)), run_id, step, version)
        t.write("HSET", f"steps:{run_id}", step, dump(closed, "version"))
        return closed

    @_writes
    def reopen_steps(self, t: Transaction, run_id: str, after: int) -> Reads[list[Step]]:
        yield from t.require_runs([run_id])
        [numbers, metrics, last] = yield [
            ("HKEYS", f"steps:{run_id}"),
            ("LLEN", f"metrics:{run_id}"),
            ("LINDEX", f"undone:{run_id}", -1),
        ]
        reopened = []
        for number in sorted(int(each) for each in numbers if int(each) > after):
            step = yield from writes.read_step(t, run_id, number)
            assert step is not None
            reopened.append(replace(step, state="open", version=None))
            if step.state == "closed":
                t.write("HSET", f"steps:{run_id}", number, dump(reopened[-1], "step"))
        entry = f"{after} {metrics}"
        if last != entry.encode():
            t.check(("LLEN", f"metrics:{run_id}"), metrics)
            t.write("RPUSH", f"undone:{run_id}", entry)
        return reopened

    @_writes
    def put_checkpoint(self, t: Transaction, checkpoint: Checkpoint) -> Reads[None]:
        yield from t.require_runs([checkpoint.run_id])
        if checkpoint.step < 0:
            raise refusal("negative_step", checkpoint.step, checkpoint.run_id)
        kept = replace(checkpoint, created_ns=checkpoint.created_ns or t.now_ns)
        t.write("HSET", f"checkpoints:{checkpoint.run_id}", whole(checkpoint.step), dump(kept, "checkpoint"))

    async def record_credit(self, credits: Sequence[CallCredit]) -> None:
        new = [(credit, codec.packed(records.credit_row(credit))) for credit in credits]
        await self._write(lambda t: writes.record_credit(t, new))

    @_writes
    def drop_credit(self, t: Transaction, run_id: str, before: int) -> Reads[None]:
        old = ("-inf", f"({whole(before)}")
        [ids] = yield [("ZRANGEBYSCORE", f"credit:{run_id}", *old)]
        for each in ids:
            t.write("UNLINK", f"cr:{each.decode()}")
        t.write("ZREMRANGEBYSCORE", f"credit:{run_id}", *old)

    # --- the end of data ----------------------------------------------------------------------------------------------

    @_writes
    def drop_records(self, t: Transaction, rollout_ids: Sequence[str]) -> Reads[int]:
        found = yield from writes.stored_rollouts(sorted(set(rollout_ids)))
        for stored in found.values():
            if stored.rollout.state not in FINAL_STATES:
                raise refusal("has_records_to_come", stored.rollout.id, stored.rollout.state)
        which = [f"{id_}:{attempt}" for id_, each in found.items() for attempt in range(1, each.rollout.attempt + 1)]
        counts = yield [("HLEN", f"c:{each}") for each in which]
        rows = yield [("GET", f"rw:{each}") for each in which]
        for each, row in zip(which, rows, strict=True):
            for kind in ("c", "sp", "x"):
                t.write("UNLINK", f"{kind}:{each}")
            rewards = read(list[Reward], row or b"[]")
            if any(reward.call_id is not None for reward in rewards):
                t.check(("GET", f"rw:{each}"), row)
                t.write("SET", f"rw:{each}", writes.rewards_row([replace(reward, call_id=None) for reward in rewards]))
        for stored in found.values():
            yield from writes.drop_files(t, stored.rollout)
            t.write("UNLINK", f"cr:{stored.rollout.id}")
            t.write("ZREM", f"credit:{stored.rollout.run_id}", stored.rollout.id)
        return t.once(sum(counts))

    async def delete_runs(self, run_ids: Sequence[str]) -> int:
        deleted = 0
        for run_id in dict.fromkeys(run_ids):
            await self.retire_models(run_id)
            portion, more = 0, True
            while more:
                part = f"{run_id} {portion}"
                known, more = await self._write(functools.partial(writes.delete_portion, run_id=run_id), part)
                deleted += known and not portion
                portion += 1
        return deleted

    # --- access and models --------------------------------------------------------------------------------------------

    async def _add_token(self, token: Token, secret_hash: str, lifetime_s: float | None) -> Token:
        token_id, created_ns, expires_ns = await self._write(
            lambda t: writes.add_token(t, token, secret_hash, lifetime_s)
        )
        return replace(token, id=token_id, created_ns=created_ns, expires_ns=expires_ns)

    @_writes
    def revoke_token(self, t: Transaction, token_id: str) -> Reads[Token]:
        [row] = yield from t.read(("HGET", "tokens", token_id))
        if row is None:
            raise refusal("no_token", token_id)
        token = read(Token, row)
        if token.revoked_ns is not None:
            return token
        revoked = replace(token, revoked_ns=t.now_ns)
        t.write("HSET", "tokens", token_id, dump(revoked, "token"))
        return revoked

    async def _put_model(self, version: ModelVersion) -> ModelVersion:
        part = f"{version.reference} {version.revision}"  # a run that is deleted changes several
        return await self._write(lambda t: writes.put_model(t, version), part)

    @_writes
    def _put_alias(self, t: Transaction, alias: ModelAlias) -> Reads[ModelAlias]:
        place = ("aliases", f"{alias.name}@{alias.alias}")
        [row] = yield from t.read(("HGET", *place))
        known = None if row is None else read(ModelAlias, row)
        [row] = yield from t.read(("HGET", "models", f"{alias.name}@{alias.number}"))
        version = None if row is None else read(ModelVersion, row)
        moved = moved_alias(alias, known, version, t.now_ns)
        if moved.number is None:
            t.write("HDEL", *place)
        else:
            t.write("HSET", *place, dump(moved, "alias"))
        t.write("HINCRBY", "meta", "alias_moves", 1)
        t.tell(ALIASES, moved.name)
        return moved
