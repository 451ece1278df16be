"""Reading from Redis: lists, in portions of one moment each; nothing here changes anything.

Driven by the Redis store's methods. base.py says what they mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

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
from agentlightning.store.audit import AuditEntry
from agentlightning.store.base import EXPIRING_S, SEEN_S, RolloutQuery
from agentlightning.store.codec import chunks
from agentlightning.store.redis import codec
from agentlightning.store.redis.connection import Command, RedisConnection
from agentlightning.store.redis.writes import MODES, STATES
from agentlightning.store.rules import refusal
from agentlightning.store.summaries import (
    RolloutSummary,
    SeriesPoint,
    SummaryPlace,
    SummaryQuery,
    downsampled,
    first_rows,
    is_after,
)
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

Clock = Callable[[], int] | None


# --- runs -------------------------------------------------------------------------------------------------------------


async def runs(connection: RedisConnection, ids: Sequence[str] | None = None, limit: int | None = None) -> list[Run]:
    """Newest first."""
    if ids is None:
        ids = await _run_ids(connection, limit)
    found: list[Run] = []
    for part in chunks(ids, MAX_ROLLOUTS_PER_READ):
        keys = [f"{kind}:{run_id}" for run_id in part for kind in ("run", "summary")]
        replies = await connection.query([("HGETALL", key) for key in keys], at_once=True)
        for run_id, flat, summary in zip(part, replies[::2], replies[1::2], strict=True):
            if flat:
                found.append(codec.read_run(run_id, flat, summary))
    return sorted(found, key=lambda run: (run.created_ns, run.id), reverse=True)[:limit]


async def workers(connection: RedisConnection, run_id: str | None = None) -> list[WorkerStatus]:
    run_ids = [run_id] if run_id is not None else await _run_ids(connection)
    replies = await connection.query([("HGETALL", f"workers:{each}") for each in run_ids])
    found = [
        codec.read_worker(each, worker_id, row)
        for each, flat in zip(run_ids, replies, strict=True)
        for worker_id, row in codec.pairs(flat)
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
    which = [(mode, state) for mode in MODES for state in STATES]
    counts = await connection.query([("ZCARD", f"s:{run_id}:{mode}:{state}") for mode, state in which], at_once=True)
    return {each: number for each, number in zip(which, counts, strict=True) if number}


async def attempts(connection: RedisConnection, rollout_ids: Sequence[str]) -> list[Attempt]:
    found = []
    for part in chunks(rollout_ids, MAX_ROLLOUTS_PER_READ):
        which = [(each.id, number) for each in await _by_id(connection, part) for number in range(1, each.attempt + 1)]
        rows = await connection.query([("HMGET", f"a:{each}:{number}", "known", "expires") for each, number in which])
        found += [codec.read_attempt(*place, row) for place, row in zip(which, rows, strict=True) if None not in row]
    return found


async def _by_id(connection: RedisConnection, ids: Sequence[str]) -> list[Rollout]:
    """Those of a portion of rollouts that exist, in this order."""
    rows = await connection.query([("HMGET", f"r:{each}", *codec.ROLLOUT) for each in ids])
    return [stored.rollout for row in rows if (stored := codec.read_rollout(row)) is not None]


async def last_finished(connection: RedisConnection, run_id: str) -> int:
    """Returns the number of finished rollouts of the run. NotFoundError if there is no such run."""
    [finished] = await connection.query([("HGET", f"run:{run_id}", "finished")])
    if finished is None:
        raise refusal("no_run", run_id)
    return int(finished)


async def finished(connection: RedisConnection, run_id: str, after: int, limit: int) -> list[Rollout]:
    """By place, those after `after`. NotFoundError if there is no such run."""
    await last_finished(connection, run_id)
    [ids] = await connection.query([("ZRANGEBYSCORE", f"finished:{run_id}", f"({after}", "+inf", "LIMIT", 0, limit)])
    found: list[Rollout] = []
    for start in range(0, len(ids), MAX_ROLLOUTS_PER_READ):
        found += await _by_id(connection, [each.decode() for each in ids[start : start + MAX_ROLLOUTS_PER_READ]])
    return found


async def summaries(
    connection: RedisConnection, query: SummaryQuery, tree: Filter, place: SummaryPlace | None
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
            yield [row for row in await _summaries_of(connection, part) if row.run_id == run_id]
        return
    newest_first = query.order_by == "finished" and query.descending
    command, end = ("ZREVRANGEBYSCORE", "-inf") if newest_first else ("ZRANGEBYSCORE", "+inf")
    place = "+inf" if newest_first else "-inf"
    while place:
        asked = (command, f"finished:{run_id}", place, end, "WITHSCORES", "LIMIT", 0, MAX_ROLLOUTS_PER_READ)
        [flat] = await connection.query([asked])
        yield await _summaries_of(connection, [each.decode() for each in flat[::2]])
        place = f"({int(float(flat[-1]))}" if len(flat) == 2 * MAX_ROLLOUTS_PER_READ else ""


async def _summaries_of(connection: RedisConnection, ids: Sequence[str]) -> list[RolloutSummary]:
    rows = await connection.query([("HMGET", f"r:{each}", "summary", "place", "consumed") for each in ids])
    return [summary for row in rows if (summary := codec.read_summary(row)) is not None]


async def _portions_of_rollouts(connection: RedisConnection, query: RolloutQuery) -> AsyncIterator[list[Rollout]]:
    """Those that match, in order; none is missed however states change between."""
    ids = query.ids
    if ids is None and query.group_ids is not None:
        ids = await _ids_of_groups(connection, query)
    if ids is not None:
        chosen = [each for each in ids if query.after is None or each > query.after]
        parts = list(chunks(chosen, MAX_ROLLOUTS_PER_READ))
        for part in reversed(parts) if query.newest_first else parts:
            portion = [each for each in await _by_id(connection, part) if _matches(each, query)]
            yield portion[::-1] if query.newest_first else portion
        return
    sets, last = await _sets(connection, query), query.after or ""
    size = MAX_ROLLOUTS_PER_READ if query.limit is None else min(MAX_ROLLOUTS_PER_READ, max(query.limit, 1))
    after = ""
    while True:
        some = await _next_ids(connection, sets, after, last, size, query.newest_first)
        yield [each for each in await _by_id(connection, some) if _matches(each, query)]
        if len(some) < size:
            return
        after = some[-1]


async def _next_ids(
    connection: RedisConnection, sets: Sequence[str], after: str, last: str, limit: int, newest_first: bool
) -> list[str]:
    """The next ids in any of the sets, of one moment, in order, after `after`; all of them greater than `last`."""
    low = f"({last}" if last else "-"
    if newest_first:
        bounds = ("ZREVRANGEBYLEX", f"({after}" if after else "+", low)
    else:
        bounds = ("ZRANGEBYLEX", f"({after}" if after else low, "+")
    command, start, end = bounds
    asked = [(command, key, start, end, "LIMIT", 0, limit) for key in sets]
    found = {each.decode() for ids in await connection.query(asked, at_once=True) for each in ids}
    return sorted(found, reverse=newest_first)[:limit]


def _matches(rollout: Rollout, query: RolloutQuery) -> bool:
    return (
        query.run_id in (None, rollout.run_id)
        and query.mode in (None, rollout.mode)
        and (query.states is None or rollout.state in query.states)
        and query.step in (None, rollout.step)
        and not (query.unconsumed and rollout.outcome is not None)
        and (query.group_ids is None or rollout.group_id in query.group_ids)
    )


async def _sets(connection: RedisConnection, query: RolloutQuery) -> list[str]:
    """Keys of the sets that hold the rollouts of these runs, modes and states."""
    run_ids = [query.run_id] if query.run_id is not None else await _run_ids(connection)
    modes = MODES if query.mode is None else (query.mode,)
    states = STATES if query.states is None else tuple(query.states)
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
    found = []
    for part in chunks(rollout_ids, MAX_RECORD_ROLLOUTS_PER_READ):
        which = [f"{each}:{attempt}" for each in part]
        if attempt is None:
            which = [f"{rollout.id}:{rollout.attempt}" for rollout in await _by_id(connection, part)]
        for rows in await connection.query([("HVALS", f"c:{each}") for each in which]):
            found += [codec.read_call(row) for row in rows]
    return sorted(found, key=lambda call: (call.rollout_id, call.finished_ns, call.id))


async def spans(connection: RedisConnection, rollout_ids: Sequence[str]) -> list[Span]:
    found = [codec.read_span(row) async for rows in _records(connection, "sp", rollout_ids) for row in rows]
    return sorted(found, key=lambda span: (span.rollout_id, span.started_ns, span.id))


async def rewards(connection: RedisConnection, rollout_ids: Sequence[str]) -> list[Reward]:
    found = [reward async for rows in _records(connection, "rw", rollout_ids) for reward in codec.read_rewards(rows)]
    return sorted(found, key=lambda reward: (reward.rollout_id, reward.created_ns, reward.attempt))


async def _records(
    connection: RedisConnection, kind: Literal["sp", "rw"], rollout_ids: Sequence[str]
) -> AsyncIterator[list[bytes]]:
    """Rows of each attempt."""
    for part in chunks(rollout_ids, MAX_RECORD_ROLLOUTS_PER_READ):
        rollouts = await _by_id(connection, part)
        which = [f"{each.id}:{attempt}" for each in rollouts for attempt in range(1, each.attempt + 1)]
        for rows in await connection.query([("HVALS", f"{kind}:{each}") for each in which]):
            yield rows


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


# --- what belongs to a run --------------------------------------------------------------------------------------------


async def resources(
    connection: RedisConnection, run_id: str, name: str | None = None, latest: bool = True, version: int | None = None
) -> list[Resource]:
    key = f"resources:{run_id}"
    if version is not None and name is not None:
        rows = await connection.query([("HGET", key, f"{version} {name}")])
    elif latest and version is None:
        return [each for each in await _newest_resources(connection, run_id, {}) if name in (None, each.name)]
    else:
        [rows] = await connection.query([("HVALS", key)])
    found = [codec.read_resource(row) for row in rows if row is not None]
    chosen = [each for each in found if name in (None, each.name) and version in (None, each.version)]
    return sorted(chosen, key=lambda each: (each.name, each.version))


async def later_resources(connection: RedisConnection, run_id: str, after: Mapping[str, int]) -> list[Resource]:
    """By name, the newest of each that is later. NotFoundError if there is no such run."""
    await last_finished(connection, run_id)
    return await _newest_resources(connection, run_id, after)


async def _newest_resources(connection: RedisConnection, run_id: str, after: Mapping[str, int]) -> list[Resource]:
    [flat] = await connection.query([("HGETALL", f"versions:{run_id}")])
    wanted = [(name, int(version)) for name, version in codec.pairs(flat) if int(version) > after.get(name, 0)]
    rows = await connection.query(
        [("HGET", f"resources:{run_id}", f"{version} {name}") for name, version in sorted(wanted)]
    )
    return [codec.read_resource(row) for row in rows if row is not None]


async def metrics(connection: RedisConnection, run_id: str, name: str | None = None) -> list[Metric]:
    found = [metric for metric in await _all_metrics(connection, run_id) if name in (None, metric.name)]
    return sorted(found, key=lambda metric: (metric.step, metric.name, metric.created_ns, metric.seq))


async def series(
    connection: RedisConnection, run_id: str, names: Sequence[str] | None, max_points: int, after_step: int | None
) -> dict[str, list[SeriesPoint]]:
    """Metrics are a list by time: all of a run's are looked through. NotFoundError if there is no such run."""
    await last_finished(connection, run_id)
    chosen = [
        metric
        for metric in await _all_metrics(connection, run_id)
        if (names is None or metric.name in names) and (after_step is None or metric.step > after_step)
    ]
    return downsampled(chosen, max_points)


async def _all_metrics(connection: RedisConnection, run_id: str) -> list[Metric]:
    found: list[Metric] = []
    while len(found) % MAX_METRICS_PER_READ == 0:
        portion = await _metrics_after(connection, run_id, len(found), MAX_METRICS_PER_READ)
        if not portion:
            break
        found += portion
    return found


async def _metrics_after(connection: RedisConnection, run_id: str, after: int, limit: int) -> list[Metric]:
    wanted = ("LRANGE", f"metrics:{run_id}", after, after + limit - 1)
    rows, undone = await connection.query([wanted, ("LRANGE", f"undone:{run_id}", 0, -1)], at_once=True)
    return codec.read_metrics(after + 1, rows, undone)


async def later_metrics(connection: RedisConnection, run_id: str, after: int, limit: int) -> list[Metric]:
    """In the order of `seq`. NotFoundError if there is no such run."""
    await last_finished(connection, run_id)
    return await _metrics_after(connection, run_id, after, limit)


async def steps(
    connection: RedisConnection, run_id: str, after: int | None = None, limit: int | None = None
) -> list[Step]:
    [numbers] = await connection.query([("HKEYS", f"steps:{run_id}")])
    wanted = sorted(number for number in map(int, numbers) if after is None or number > after)[:limit]
    asked = [("HGET", f"{kind}:{run_id}", number) for number in wanted for kind in ("steps", "consumed")]
    rows = await connection.query(asked, at_once=True)
    return [codec.read_step(run_id, *each) for each in zip(wanted, rows[::2], rows[1::2], strict=True) if each[1]]


async def checkpoints(connection: RedisConnection, run_id: str) -> list[Checkpoint]:
    [rows] = await connection.query([("HVALS", f"checkpoints:{run_id}")])
    return sorted(map(codec.read_checkpoint, rows), key=lambda checkpoint: checkpoint.step)


# --- access ------------------------------------------------------------------------------------------------------------


async def tokens(connection: RedisConnection, run_id: str | None = None) -> list[Token]:
    [ids] = await connection.query([("SMEMBERS", "tokens" if run_id is None else f"run_tokens:{run_id}")])
    rows = await connection.query([("GET", f"token:{each.decode()}") for each in ids])
    found = [codec.read_token(row) for row in rows if row is not None]
    return sorted(found, key=lambda token: (token.created_ns, token.id))


async def find_token(connection: RedisConnection, secret_hash: str) -> Token | None:
    [token_id] = await connection.query([("HGET", "token_hashes", secret_hash)])
    if token_id is None:
        return None
    [row] = await connection.query([("GET", f"token:{token_id.decode()}")])
    return None if row is None else codec.read_token(row)


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
    now, (active,) = await connection.query_at([("SMEMBERS", "active")], clock)
    [soon] = await connection.query([("ZRANGEBYSCORE", "leases", "-inf", now // 1000 + EXPIRING_S * 10**6)])
    expiring = Counter(each.run_id for each in await _by_id(connection, [each.decode() for each in soon]))
    run_ids = sorted(each.decode() for each in active if run_id in (None, each.decode()))
    return [await _statistics(connection, each, now, expiring[each]) for each in run_ids]


async def _statistics(connection: RedisConnection, run_id: str, now: int, expiring: int) -> RunStatistics:
    sets = [f"s:{run_id}:{mode}:{state}" for state in ("queued", "running") for mode in MODES]
    asked: list[Command] = [("ZCARD", key) for key in sets]
    asked += [("ZRANGE", key, 0, 0) for key in sets[: len(MODES)]]
    *counts, train, held_out, rows = await connection.query([*asked, ("HVALS", f"workers:{run_id}")], at_once=True)
    first = await _by_id(connection, sorted(each.decode() for each in (*train, *held_out))[:1])
    seen = [codec.read_worker(run_id, "", row).seen_ns for row in rows]
    return RunStatistics(
        run_id=run_id,
        queued=counts[0] + counts[1],
        oldest_queued_s=max(0.0, (now - first[0].created_ns) / 1e9) if first else 0.0,
        running=counts[2] + counts[3],
        expiring=expiring,
        workers=sum(seen_ns > now - SEEN_S * 10**9 for seen_ns in seen),
    )


async def size(connection: RedisConnection, run_id: str) -> RunSize:
    """Sizes up one run; reads all of it, in portions. A run that is gone has nothing."""
    [files] = await connection.query([("HGETALL", f"files:{run_id}")])
    total = RunSize(run_id=run_id, rollouts=0, calls=0, spans=0, bytes=_bytes(files))
    async for portion in _portions_of_rollouts(connection, RolloutQuery(run_id=run_id)):
        for start in range(0, len(portion), MAX_RECORD_ROLLOUTS_PER_READ):
            part = portion[start : start + MAX_RECORD_ROLLOUTS_PER_READ]
            which = [f"{each.id}:{attempt}" for each in part for attempt in range(1, each.attempt + 1)]
            calls = await connection.query([("HGETALL", f"c:{each}") for each in which])
            spans = await connection.query([("HGETALL", f"sp:{each}") for each in which])
            others = await connection.query([("HGETALL", f"{kind}:{each.id}") for each in part for kind in ("r", "cr")])
            total = replace(
                total,
                rollouts=total.rollouts + len(part),
                calls=total.calls + sum(map(len, calls)) // 2,
                spans=total.spans + sum(map(len, spans)) // 2,
                bytes=total.bytes + sum(map(_bytes, (*calls, *spans, *others))),
            )
    return total


def _bytes(flat: Sequence[bytes]) -> int:
    return sum(map(len, flat))
