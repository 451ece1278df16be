"""Reading from Redis: lists, in portions of one moment each; nothing here changes anything.

Driven by the Redis store's methods. base.py says what they mean.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import orjson

from agentlightning.records import (
    Attempt,
    Call,
    CallCredit,
    Checkpoint,
    Metric,
    Mode,
    Resource,
    Reward,
    Rollout,
    RolloutState,
    Run,
    RunSize,
    RunStatistics,
    Span,
    Step,
    WorkerStatus,
)
from agentlightning.store.audit import AUDITED_KINDS, AuditEntry, current_actor, noted_value
from agentlightning.store.base import EXPIRING_S, SEEN_S, RolloutQuery
from agentlightning.store.codec import chunks, text
from agentlightning.store.redis import codec
from agentlightning.store.redis.connection import RedisConnection
from agentlightning.store.summaries import Place, downsampled, first_rows, is_after
from agentlightning.store.summary_types import RolloutSummary, SeriesPoint, SummaryQuery
from agentlightning.store.tokens import Token
from agentlightning.store.where import Comparison, Filter, matches

MAX_ROLLOUTS_PER_READ = 500
"""Rollouts of one reply: a millisecond or two, during which others wait."""
MAX_RECORD_ROLLOUTS_PER_READ = 50
"""Rollouts whose calls, spans or rewards are one reply."""
MAX_METRICS_PER_READ = 5000
MAX_ENTRIES_PER_READ = 1000
MAX_FILES_PER_READ = 50
MAX_CLOCK_STEP_NS = 60 * 10**9
"""By how much a server's clock may be set back, or that of its replica be behind."""

_MODES: tuple[Mode, ...] = get_args(Mode)
_STATES: tuple[RolloutState, ...] = get_args(RolloutState)

Clock = Callable[[], int] | None
Write = Callable[[str, Any, Sequence[bytes]], Awaitable[Any]]


async def now_ns(connection: RedisConnection, clock: Clock) -> int:
    """By the store's clock."""
    if clock is not None:
        return clock()
    [(second, microsecond)] = await connection.at_home(lambda: connection.ask([("TIME",)]))
    return int(second) * 10**9 + int(microsecond) * 1000


# --- runs -------------------------------------------------------------------------------------------------------------


async def runs(connection: RedisConnection, ids: Sequence[str] | None = None, limit: int | None = None) -> list[Run]:
    """Newest first."""
    if ids is None:
        ids = await _run_ids(connection, limit)
    found: list[Run] = []
    for part in chunks(ids, MAX_ROLLOUTS_PER_READ):
        for run_id, (flat, summary) in zip(part, await connection.read("read_runs", {"ids": part}), strict=True):
            if flat:
                found.append(codec.read_run(run_id, flat, summary))
    return sorted(found, key=lambda run: (run.created_ns, run.id), reverse=True)[:limit]


async def workers(connection: RedisConnection, run_id: str | None = None) -> list[WorkerStatus]:
    run_ids = [run_id] if run_id is not None else await _run_ids(connection)
    replies = await connection.query([("HGETALL", f"workers:{each}") for each in run_ids])
    found = [
        codec.read_worker(each, worker_id.decode(), row)
        for each, flat in zip(run_ids, replies, strict=True)
        for worker_id, row in zip(flat[::2], flat[1::2], strict=True)
    ]
    return sorted(found, key=lambda worker: (-worker.seen_ns, worker.id))


async def _run_ids(connection: RedisConnection, limit: int | None = None) -> list[str]:
    """Newest first."""
    [members] = await connection.query(
        [("ZREVRANGEBYLEX", "runs", "+", "-", "LIMIT", 0, -1 if limit is None else limit)]
    )
    return [member.decode().partition(":")[2] for member in members]


# --- rollouts ---------------------------------------------------------------------------------------------------------


async def rollouts(connection: RedisConnection, query: RolloutQuery) -> list[Rollout]:
    found: list[Rollout] = []
    async for portion in _portions_of_rollouts(connection, query):
        found += portion
        if query.limit is not None and len(found) >= query.limit:
            break
    return found[: query.limit]


async def count(connection: RedisConnection, run_id: str) -> dict[tuple[Mode, RolloutState], int]:
    which = [(mode, state) for mode in _MODES for state in _STATES]
    counts = await connection.read("read_counts", {"sets": [f"s:{run_id}:{mode}:{state}" for mode, state in which]})
    return {each: number for each, number in zip(which, counts, strict=True) if number}


async def attempts(connection: RedisConnection, rollout_ids: Sequence[str]) -> list[Attempt]:
    return [
        codec.read_attempt(rollout_id.decode(), attempt, flat)
        for part in chunks(rollout_ids, MAX_ROLLOUTS_PER_READ)
        for rollout_id, attempt, flat in await connection.read("read_attempts", {"ids": part})
    ]


async def last_finished(connection: RedisConnection, run_id: str) -> int:
    """Returns the number of finished rollouts of the run. NotFoundError if there is no such run."""
    [last] = await connection.read("read_finished", {"run": run_id, "after": "0", "limit": 0})
    return int(last)


async def finished(connection: RedisConnection, run_id: str, after: int, limit: int) -> list[Rollout]:
    """By place, those after `after`. NotFoundError if there is no such run."""
    found: list[Rollout] = []
    while len(found) < limit:
        portion = min(MAX_ROLLOUTS_PER_READ, limit - len(found))
        question = {"run": run_id, "after": str(after), "limit": portion}
        _, *rows = await connection.read("read_finished", question)
        found += [codec.read_rollout(row) for row in rows]
        if len(rows) < portion:
            break
        after = found[-1].finished_seq or 0
    return found


async def summaries(
    connection: RedisConnection, query: SummaryQuery, tree: Filter, place: Place | None
) -> list[RolloutSummary]:
    """The rows of the page, and one more where there is a next. Filters are evaluated here, on all of a run's summaries."""
    best: list[RolloutSummary] = []
    for run_id in [query.run_id] if query.run_id is not None else await _run_ids(connection):
        async for portion in _portions_of_summaries(connection, run_id, query, tree):
            found = [row for row in portion if is_after(row, place, query) and matches(tree, row)]
            best = first_rows([*best, *found], query, query.limit + 1)
            if query.order_by == "finished" and len(best) > query.limit and portion:
                # Places are nearly in the order of times: only a clock that was set back makes a difference.
                times = [row.finished_ns for row in portion]
                if query.descending and max(times) < best[-1].finished_ns - MAX_CLOCK_STEP_NS:
                    break
                if not query.descending and min(times) > best[-1].finished_ns + MAX_CLOCK_STEP_NS:
                    break
    return best


async def _portions_of_summaries(
    connection: RedisConnection, run_id: str, query: SummaryQuery, tree: Filter
) -> AsyncIterator[list[RolloutSummary]]:
    if isinstance(tree, Comparison) and tree.field == "id" and tree.sign in ("=", "in"):
        for part in chunks(map(str, tree.values), MAX_ROLLOUTS_PER_READ):
            _, *rows = await connection.read("read_summaries", {"run": run_id, "ids": part})
            yield [codec.read_summary(*row) for row in rows]
        return
    newest_first = query.order_by == "finished" and query.descending
    after = "+inf" if newest_first else "-inf"
    while after:
        question = {"run": run_id, "after": after, "limit": MAX_ROLLOUTS_PER_READ, "newest_first": newest_first}
        cursor, *rows = await connection.read("read_summaries", question)
        yield [codec.read_summary(*row) for row in rows]
        after = cursor.decode()


async def _portions_of_rollouts(connection: RedisConnection, query: RolloutQuery) -> AsyncIterator[list[Rollout]]:
    """Those that match, in order. Each portion is of one moment, and none is missed however states change between."""
    filters: dict[str, Any] = {"unconsumed": query.unconsumed or None, "states": query.states, "mode": query.mode}
    filters |= {"run": query.run_id, "step": None if query.step is None else str(query.step)}
    filters |= {"groups": query.group_ids}
    filters = {name: list(value) if isinstance(value, tuple) else value for name, value in filters.items()}
    asked = {name: value for name, value in filters.items() if value is not None}
    ids = query.ids
    if ids is None and query.group_ids is not None:
        ids = await _ids_of_groups(connection, query)
    if ids is not None:
        chosen = [each for each in ids if query.after is None or each > query.after]
        parts = list(chunks(chosen, MAX_ROLLOUTS_PER_READ))
        for part in reversed(parts) if query.newest_first else parts:
            _, *rows = await connection.read("read_rollouts", {**asked, "ids": part})
            portion = [codec.read_rollout(row) for row in rows]
            yield portion[::-1] if query.newest_first else portion
        return
    more = {"sets": await _sets(connection, query), "after": query.after or "", "newest_first": query.newest_first}
    cursor = ""
    while True:
        portion_size = (
            min(MAX_ROLLOUTS_PER_READ, query.limit or MAX_ROLLOUTS_PER_READ)
            if len(asked) == ("run" in asked)
            else MAX_ROLLOUTS_PER_READ
        )
        question = {**asked, **more, "from": cursor, "portion": portion_size}
        place, *rows = await connection.read("read_rollouts", question)
        yield [codec.read_rollout(row) for row in rows]
        cursor = place.decode()
        if not cursor:
            return


async def _sets(connection: RedisConnection, query: RolloutQuery) -> list[str]:
    """Keys of the sets that hold the rollouts of these runs, modes and states."""
    run_ids = [query.run_id] if query.run_id is not None else await _run_ids(connection)
    modes = _MODES if query.mode is None else (query.mode,)
    states = _STATES if query.states is None else tuple(query.states)
    return [f"s:{run_id}:{mode}:{state}" for run_id in run_ids for mode in modes for state in states]


async def _ids_of_groups(connection: RedisConnection, query: RolloutQuery) -> list[str]:
    run_ids = [query.run_id] if query.run_id is not None else await _run_ids(connection)
    groups = [f"g:{run_id}:{group_id}" for run_id in run_ids for group_id in query.group_ids or ()]
    return [each.decode() for found in await connection.query([("HVALS", group) for group in groups]) for each in found]


# --- the record -------------------------------------------------------------------------------------------------------


async def files(connection: RedisConnection, run_id: str, hashes: Sequence[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for part in chunks(hashes, MAX_FILES_PER_READ):
        [kept] = await connection.query([("HMGET", f"files:{run_id}", *part)])
        found.update({name: bytes(data) for name, data in zip(part, kept, strict=True) if data is not None})
    return found


async def calls(connection: RedisConnection, rollout_ids: Sequence[str], attempt: int | None = None) -> list[Call]:
    found = [
        codec.read_call(*record)
        async for record in _records(connection, "c", rollout_ids, "latest" if attempt is None else attempt)
    ]
    return sorted(found, key=lambda call: (call.rollout_id, call.finished_ns, call.id))


async def spans(connection: RedisConnection, rollout_ids: Sequence[str]) -> list[Span]:
    found = [codec.read_span(*record) async for record in _records(connection, "sp", rollout_ids, "all")]
    return sorted(found, key=lambda span: (span.rollout_id, span.started_ns, span.id))


async def rewards(connection: RedisConnection, rollout_ids: Sequence[str]) -> list[Reward]:
    found = [codec.read_reward(*record) async for record in _records(connection, "rw", rollout_ids, "all")]
    found.sort(key=lambda each: (each[1].rollout_id, each[1].created_ns, each[1].attempt, each[0]))
    return [reward for _, reward in found]


async def credit(
    connection: RedisConnection, rollout_ids: Sequence[str], call_ids: Sequence[str] | None = None
) -> list[CallCredit]:
    if call_ids is not None and not call_ids:
        return []
    command, *names = ("HVALS",) if call_ids is None else ("HMGET", *sorted(set(call_ids)))
    found = [
        codec.read_credit(packed)
        for part in chunks(rollout_ids, MAX_RECORD_ROLLOUTS_PER_READ)
        for kept in await connection.query([(command, f"cr:{rollout_id}", *names) for rollout_id in part])
        for packed in kept
        if packed is not None
    ]
    return sorted(found, key=lambda each: (each.rollout_id, each.call_id))


async def _records(
    connection: RedisConnection, kind: Literal["c", "sp", "rw"], rollout_ids: Sequence[str], attempt: int | str
) -> AsyncIterator[tuple[str, int, bytes, bytes]]:
    """Rollout, attempt, id and row of each record."""
    for part in chunks(rollout_ids, MAX_RECORD_ROLLOUTS_PER_READ):
        question = {"kind": kind, "ids": part, "attempt": attempt}
        for rollout_id, number, flat in await connection.read("read_records", question):
            for record_id, row in zip(flat[::2], flat[1::2], strict=True):
                yield rollout_id.decode(), number, record_id, row


# --- what belongs to a run --------------------------------------------------------------------------------------------


async def put_resources(write: Write, resources: Sequence[Resource], after: Mapping[str, int]) -> list[Resource]:
    """Store them; with the versions they got."""
    if not resources:
        return []
    new = [codec.resource_row(resource) for resource in resources]
    kinds = [resource.kind if resource.kind in AUDITED_KINDS else "" for resource in resources]
    details = [orjson.dumps(noted_value(resource)).decode() for resource in resources]
    rows = [[*row, kind, detail] for (row, _), kind, detail in zip(new, kinds, details, strict=True)]
    known = {name: str(version) for name, version in after.items()}
    request = {"actor": text(current_actor().name), "rows": rows, "after": known}
    stored = await write("put_resources", request, [blob for _, blob in new])
    return [
        replace(resource, version=version, created_ns=int(created_ns))
        for resource, (version, created_ns) in zip(resources, stored, strict=True)
    ]


async def resources(
    connection: RedisConnection, run_id: str, name: str | None = None, latest: bool = True, version: int | None = None
) -> list[Resource]:
    if version is not None and name is not None:
        [row] = await connection.query([("HGET", f"resources:{run_id}", f"{version} {name}")])
        return [] if row is None else [codec.read_resource(run_id, name, version, row)]
    if latest and version is None:
        found = await _newest_resources(connection, {"run": run_id, "after": {}})
    else:
        [flat] = await connection.query([("HGETALL", f"resources:{run_id}")])
        found = []
        for place, row in zip(flat[::2], flat[1::2], strict=True):
            number, _, of = place.decode().partition(" ")
            found.append(codec.read_resource(run_id, of, int(number), row))
    chosen = [each for each in found if name in (None, each.name) and version in (None, each.version)]
    return sorted(chosen, key=lambda each: (each.name, each.version))


async def later_resources(connection: RedisConnection, run_id: str, after: Mapping[str, int]) -> list[Resource]:
    """By name, the newest of each that is later. NotFoundError if there is no such run."""
    known = {name: str(version) for name, version in after.items()}
    found = await _newest_resources(connection, {"run": run_id, "after": known, "exists": True})
    return sorted(found, key=lambda each: each.name)


async def _newest_resources(connection: RedisConnection, question: Mapping[str, Any]) -> list[Resource]:
    return [
        codec.read_resource(question["run"], name.decode(), int(version), row)
        for name, version, row in await connection.read("read_resources", question)
    ]


async def metrics(connection: RedisConnection, run_id: str, name: str | None = None) -> list[Metric]:
    found: list[Metric] = []
    after = 0
    while True:
        question = {"run": run_id, "after": str(after), "limit": MAX_METRICS_PER_READ}
        entries, undone, _ = await connection.read("read_metrics", question)
        portion = codec.read_metrics(run_id, entries, undone)
        found += [metric for metric in portion if name is None or metric.name == name]
        if len(portion) < MAX_METRICS_PER_READ:
            break
        after = portion[-1].seq
    return sorted(found, key=lambda metric: (metric.step, metric.name, metric.created_ns, metric.seq))


async def series(
    connection: RedisConnection, run_id: str, names: Sequence[str] | None, max_points: int, after_step: int | None
) -> dict[str, list[SeriesPoint]]:
    """Metrics are a stream by time: the server looks through all of a run's, and sends those asked for. NotFoundError if
    there is no such run."""
    found: list[Metric] = []
    question: dict[str, Any] = {"run": run_id, "limit": MAX_METRICS_PER_READ, "exists": True}
    question |= {} if names is None else {"names": list(names)}
    question |= {} if after_step is None else {"after_step": after_step}
    last = b"0"
    while last:
        after = last.partition(b"-")[0].decode()
        entries, undone, last = await connection.read("read_metrics", {**question, "after": after})
        found += codec.read_metrics(run_id, entries, undone)
    return downsampled(found, max_points)


async def later_metrics(connection: RedisConnection, run_id: str, after: int, limit: int) -> list[Metric]:
    """In the order of `seq`. NotFoundError if there is no such run."""
    question = {"run": run_id, "after": str(after), "limit": limit, "exists": True}
    entries, undone, _ = await connection.read("read_metrics", question)
    return codec.read_metrics(run_id, entries, undone)


async def steps(
    connection: RedisConnection, run_id: str, after: int | None = None, limit: int | None = None
) -> list[Step]:
    if limit == 0:
        return []
    question: dict[str, Any] = {"run": run_id, "limit": limit or 0}
    if after is not None:
        question["after"] = after
    found = []
    for step, fields, consumed in await connection.read("read_steps", question):
        found.append(codec.read_step(run_id, (step, *codec.texts(fields), consumed)))
    return found


async def checkpoints(connection: RedisConnection, run_id: str) -> list[Checkpoint]:
    [flat] = await connection.query([("HGETALL", f"checkpoints:{run_id}")])
    found = [codec.read_checkpoint(run_id, int(step), row) for step, row in zip(flat[::2], flat[1::2], strict=True)]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


# --- access ------------------------------------------------------------------------------------------------------------


async def tokens(connection: RedisConnection, run_id: str | None = None) -> list[Token]:
    found = await _tokens(connection, {} if run_id is None else {"run": run_id})
    return sorted(found, key=lambda token: (token.created_ns, token.id))


async def find_token(connection: RedisConnection, secret_hash: str) -> Token | None:
    return next(iter(await _tokens(connection, {"hash": secret_hash})), None)


async def _tokens(connection: RedisConnection, question: dict[str, Any]) -> list[Token]:
    return [
        codec.read_token(token_id.decode(), flat) for token_id, flat in await connection.read("read_tokens", question)
    ]


async def audit(
    connection: RedisConnection, run_id: str | None = None, after: int = 0, limit: int = 1000
) -> list[AuditEntry]:
    """The log is a list; an entry's place in it, counted from 1, is its `seq`."""
    found: list[AuditEntry] = []
    while len(found) < limit:
        [rows] = await connection.query([("LRANGE", "audit", after, after + MAX_ENTRIES_PER_READ - 1)])
        entries = [codec.read_entry(after + place, row) for place, row in enumerate(rows, start=1)]
        found += [entry for entry in entries if run_id is None or entry.run_id == run_id]
        if len(rows) < MAX_ENTRIES_PER_READ:
            break
        after += len(rows)
    return found[:limit]


# --- numbers ----------------------------------------------------------------------------------------------------------


async def statistics(connection: RedisConnection, clock: Clock, run_id: str | None) -> list[RunStatistics]:
    question = {"now": "" if clock is None else str(clock()), "soon_us": EXPIRING_S * 10**6, "run": run_id or ""}
    moment, *found = await connection.read("read_statistics", question)
    now = int(moment)
    statistics = []
    for each, queued, created_ns, running, expiring, workers in found:
        seen = [codec.read_worker("", "", row).seen_ns for row in workers]
        statistics.append(
            RunStatistics(
                run_id=each.decode(),
                queued=queued,
                oldest_queued_s=max(0.0, (now - int(created_ns)) / 1e9) if created_ns else 0.0,
                running=running,
                expiring=expiring,
                workers=sum(seen_ns > now - SEEN_S * 10**9 for seen_ns in seen),
            )
        )
    return statistics


async def size(connection: RedisConnection, run_id: str) -> RunSize:
    """Sizes up one run; reads all of it, in portions. A run that is gone has nothing."""
    sets = [f"s:{run_id}:{mode}:{state}" for mode in _MODES for state in _STATES]
    totals = [0, 0, 0, 0]
    cursor = b""
    while True:
        question = {"run": run_id, "sets": sets, "from": cursor.decode(), "portion": MAX_ROLLOUTS_PER_READ}
        cursor, *numbers = await connection.read("read_sizes", question)
        totals = [total + int(number) for total, number in zip(totals, numbers, strict=True)]
        if not cursor:
            break
    return RunSize(run_id=run_id, rollouts=totals[0], calls=totals[1], spans=totals[2], bytes=totals[3])
