"""Reading from Redis: lists, in portions of one moment each; nothing here changes anything.

The methods of the Redis store that read; base.py says what they mean.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

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
    RunStatistics,
    Span,
    Step,
    WorkerStatus,
)
from agentlightning.store.base import EXPIRING_S, SEEN_S, RolloutQuery
from agentlightning.store.codec import CALLS, CREDIT, SPANS, chunks
from agentlightning.store.models import ModelAlias, ModelVersion
from agentlightning.store.redis import codec
from agentlightning.store.redis.codec import read
from agentlightning.store.redis.connection import Command, RedisConnection, Reply
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
from agentlightning.store.waiting import WaitingStore
from agentlightning.store.where import Comparison, Filter, matches

MODES: tuple[Mode, ...] = ("train", "eval")
STATES: tuple[RolloutState, ...] = ("queued", "running", "succeeded", "failed", "cancelled")

MAX_ROLLOUTS_PER_READ = 500
"""Rollouts of one reply: a millisecond or two, during which others wait."""
MAX_RECORD_ROLLOUTS_PER_READ = 50
"""Rollouts whose calls, spans or rewards are one reply; also files."""
MAX_METRICS_PER_READ = 5000
MAX_CLOCK_STEP_NS = 60 * 10**9
"""By how much a server's clock may be set back, or that of its replica be behind."""


class RedisReads(WaitingStore):
    """The part of the store that reads."""

    _now_ns: Callable[[], int] | None

    @abstractmethod
    def _opened(self) -> RedisConnection:
        """The connection. StoreError where the store is not open."""

    async def _query(self, *commands: Command) -> list[Reply]:
        return await self._opened().query(commands)

    async def _query_at_once(self, *commands: Command) -> list[Reply]:
        return await self._opened().query_at_once(commands)

    # --- runs ---------------------------------------------------------------------------------------------------------

    async def runs(self, ids: Sequence[str] | None = None, limit: int | None = None) -> list[Run]:
        found: list[Run] = []
        for part in chunks(await self._run_ids(limit) if ids is None else ids, MAX_ROLLOUTS_PER_READ):
            rows = await self._query(*[("HGET", f"run:{run_id}", "run") for run_id in part])
            found += [read(Run, row) for row in rows if row is not None]
        return sorted(found, key=lambda run: (run.created_ns, run.id), reverse=True)[:limit]

    async def _run_ids(self, limit: int | None = None) -> list[str]:
        """Newest first."""
        count = -1 if limit is None else limit
        [members] = await self._query(("ZREVRANGEBYLEX", "runs", "+", "-", "LIMIT", 0, count))
        return [member.decode().partition(":")[2] for member in members]

    async def workers(self, run_id: str | None = None) -> list[WorkerStatus]:
        run_ids = [run_id] if run_id is not None else await self._run_ids()
        replies = await self._query(*[("HVALS", f"workers:{each}") for each in run_ids])
        found = [read(WorkerStatus, row) for rows in replies for row in rows]
        return sorted(found, key=lambda worker: (-worker.seen_ns, worker.id))

    # --- rollouts -----------------------------------------------------------------------------------------------------

    async def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        found: list[Rollout] = []
        async for portion in self._portions_of_rollouts(query):
            found += portion
            if query.limit is not None and len(found) >= query.limit:
                break
        return found[: query.limit]

    async def count(self, run_id: str) -> dict[tuple[Mode, RolloutState], int]:
        which = [(mode, state) for mode in MODES for state in STATES]
        counts = await self._query_at_once(*[("ZCARD", f"s:{run_id}:{mode}:{state}") for mode, state in which])
        return {each: number for each, number in zip(which, counts, strict=True) if number}

    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        found: list[Attempt] = []
        for part in chunks(rollout_ids, MAX_ROLLOUTS_PER_READ):
            rows = await self._query(
                *[("HMGET", f"a:{each}", "known", "expires") for each in await self._attempts_of(part)]
            )
            found += [codec.read_attempt(row) for row in rows if None not in row]
        return found

    async def _by_id(self, ids: Sequence[str]) -> list[Rollout]:
        """Those of a portion of rollouts that exist, in this order."""
        rows = await self._query(*[("HMGET", f"r:{each}", *codec.ROLLOUT) for each in ids])
        return [stored.rollout for row in rows if (stored := codec.read_rollout(row)) is not None]

    async def _attempts_of(self, ids: Sequence[str]) -> list[str]:
        """``ROLLOUT:NUMBER`` of all attempts of a portion of rollouts."""
        return [f"{each.id}:{number}" for each in await self._by_id(ids) for number in range(1, each.attempt + 1)]

    async def _last_finished(self, run_id: str) -> int:
        [finished] = await self._query(("HGET", f"run:{run_id}", "finished"))
        if finished is None:
            raise refusal("no_run", run_id)
        return int(finished)

    async def _finished(self, run_id: str, after: int, limit: int) -> list[Rollout]:
        await self._last_finished(run_id)
        [ids] = await self._query(("ZRANGEBYSCORE", f"finished:{run_id}", f"({after}", "+inf", "LIMIT", 0, limit))
        return await self._by_id([each.decode() for each in ids])

    async def _summaries(self, query: SummaryQuery, tree: Filter, place: SummaryPlace | None) -> list[RolloutSummary]:
        """Filters are evaluated here, on all of a run's summaries."""
        best: list[RolloutSummary] = []
        for run_id in [query.run_id] if query.run_id is not None else await self._run_ids():
            async for portion in self._portions_of_summaries(run_id, query, tree):
                found = [row for row in portion if is_after(row, place, query) and matches(tree, row)]
                best = first_rows([*best, *found], query, query.limit + 1)
                if query.order_by != "finished" or not query.descending or len(best) <= query.limit or not portion:
                    continue
                # Places are nearly in the order of times: only a clock that was set back makes a difference.
                if max(row.finished_ns for row in portion) < best[-1].finished_ns - MAX_CLOCK_STEP_NS:
                    break
        return best

    async def _portions_of_summaries(
        self, run_id: str, query: SummaryQuery, tree: Filter
    ) -> AsyncIterator[list[RolloutSummary]]:
        if isinstance(tree, Comparison) and tree.field == "id" and tree.sign in ("=", "in"):
            for part in chunks(map(str, tree.values), MAX_ROLLOUTS_PER_READ):
                yield [row for row in await self._summaries_of(part) if row.run_id == run_id]
            return
        place = "+inf"
        while place:
            asked = ("ZREVRANGEBYSCORE", f"finished:{run_id}", place, "-inf", "WITHSCORES")
            [flat] = await self._query((*asked, "LIMIT", 0, MAX_ROLLOUTS_PER_READ))
            yield await self._summaries_of([each.decode() for each in flat[::2]])
            place = f"({int(float(flat[-1]))}" if len(flat) == 2 * MAX_ROLLOUTS_PER_READ else ""

    async def _summaries_of(self, ids: Sequence[str]) -> list[RolloutSummary]:
        rows = await self._query(*[("HMGET", f"r:{each}", "summary", "place", "consumed") for each in ids])
        return [summary for row in rows if (summary := codec.read_summary(row)) is not None]

    async def _portions_of_rollouts(self, query: RolloutQuery) -> AsyncIterator[list[Rollout]]:
        """Those that match, in order; none is missed however states change between."""
        run_ids = [query.run_id] if query.run_id is not None else [] if query.ids is not None else await self._run_ids()
        ids = query.ids
        if ids is None and query.group_ids is not None:
            groups = [("HVALS", f"g:{run_id}:{group}") for run_id in run_ids for group in query.group_ids]
            ids = [each.decode() for found in await self._query(*groups) for each in found]
        if ids is not None:
            parts = list(chunks([each for each in ids if each > (query.after or "")], MAX_ROLLOUTS_PER_READ))
            for part in reversed(parts) if query.newest_first else parts:
                portion = [each for each in await self._by_id(part) if _matches(each, query)]
                yield portion[::-1] if query.newest_first else portion
            return
        modes = MODES if query.mode is None else (query.mode,)
        states = STATES if query.states is None else query.states
        sets = [f"s:{run_id}:{mode}:{state}" for run_id in run_ids for mode in modes for state in states]
        size = MAX_ROLLOUTS_PER_READ if query.limit is None else min(MAX_ROLLOUTS_PER_READ, max(query.limit, 1))
        command = "ZREVRANGEBYLEX" if query.newest_first else "ZRANGEBYLEX"
        first, last = (f"({query.after}" if query.after else "-"), "+"
        while True:
            bounds = (last, first) if query.newest_first else (first, last)
            replies = await self._query_at_once(*[(command, key, *bounds, "LIMIT", 0, size) for key in sets])
            found = {each.decode() for some in replies for each in some}
            some = sorted(found, reverse=query.newest_first)[:size]
            yield [each for each in await self._by_id(some) if _matches(each, query)]
            if len(some) < size:
                return
            first, last = (first, f"({some[-1]}") if query.newest_first else (f"({some[-1]}", last)

    # --- the record ---------------------------------------------------------------------------------------------------

    async def files(self, run_id: str, hashes: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for part in chunks(hashes, MAX_RECORD_ROLLOUTS_PER_READ):
            [kept] = await self._query(("HMGET", f"files:{run_id}", *part))
            found |= {name: bytes(data) for name, data in zip(part, kept, strict=True) if data is not None}
        return found

    async def calls(self, rollout_ids: Sequence[str], attempt: int | None = None) -> list[Call]:
        found: list[Call] = []
        for part in chunks(rollout_ids, MAX_RECORD_ROLLOUTS_PER_READ):
            which = [f"{each}:{attempt}" for each in part]
            if attempt is None:
                which = [f"{rollout.id}:{rollout.attempt}" for rollout in await self._by_id(part)]
            for rows in await self._query(*[("HVALS", f"c:{each}") for each in which]):
                found += [codec.unpacked(CALLS, row) for row in rows]
        return sorted(found, key=lambda call: (call.rollout_id, call.finished_ns, call.id))

    async def spans(self, rollout_ids: Sequence[str]) -> list[Span]:
        found: list[Span] = []
        for part in chunks(rollout_ids, MAX_RECORD_ROLLOUTS_PER_READ):
            for rows in await self._query(*[("HVALS", f"sp:{each}") for each in await self._attempts_of(part)]):
                found += [codec.unpacked(SPANS, row) for row in rows]
        return sorted(found, key=lambda span: (span.rollout_id, span.started_ns, span.id))

    async def rewards(self, rollout_ids: Sequence[str]) -> list[Reward]:
        found: list[Reward] = []
        for part in chunks(rollout_ids, MAX_RECORD_ROLLOUTS_PER_READ):
            for row in await self._query(*[("GET", f"rw:{each}") for each in await self._attempts_of(part)]):
                found += read(list[Reward], row or b"[]")
        return sorted(found, key=lambda reward: (reward.rollout_id, reward.created_ns, reward.attempt))

    async def credit(self, rollout_ids: Sequence[str], call_ids: Sequence[str] | None = None) -> list[CallCredit]:
        if call_ids is not None and not call_ids:
            return []
        command, *names = ("HVALS",) if call_ids is None else ("HMGET", *sorted(set(call_ids)))
        found = [
            codec.unpacked(CREDIT, row)
            for part in chunks(rollout_ids, MAX_RECORD_ROLLOUTS_PER_READ)
            for kept in await self._query(*[(command, f"cr:{rollout_id}", *names) for rollout_id in part])
            for row in kept
            if row is not None
        ]
        return sorted(found, key=lambda each: (each.rollout_id, each.call_id))

    # --- what belongs to a run ----------------------------------------------------------------------------------------

    async def resources(
        self, run_id: str, name: str | None = None, latest: bool = True, version: int | None = None
    ) -> list[Resource]:
        if latest and version is None:
            return [each for each in await self._newest_resources(run_id, {}) if name in (None, each.name)]
        key = f"resources:{run_id}"
        if version is not None and name is not None:
            rows = await self._query(("HGET", key, f"{version} {name}"))
        else:
            [rows] = await self._query(("HVALS", key))
        found = [read(Resource, row) for row in rows if row is not None]
        chosen = [each for each in found if name in (None, each.name) and version in (None, each.version)]
        return sorted(chosen, key=lambda each: (each.name, each.version))

    async def _later_resources(self, run_id: str, after: Mapping[str, int]) -> list[Resource]:
        await self._last_finished(run_id)
        return await self._newest_resources(run_id, after)

    async def _newest_resources(self, run_id: str, after: Mapping[str, int]) -> list[Resource]:
        [flat] = await self._query(("HGETALL", f"versions:{run_id}"))
        wanted = [(name, int(version)) for name, version in codec.pairs(flat) if int(version) > after.get(name, 0)]
        key = f"resources:{run_id}"
        rows = await self._query(*[("HGET", key, f"{version} {name}") for name, version in sorted(wanted)])
        return [read(Resource, row) for row in rows if row is not None]

    async def metrics(self, run_id: str, name: str | None = None) -> list[Metric]:
        found = [metric for metric in await self._all_metrics(run_id) if name in (None, metric.name)]
        return sorted(found, key=lambda metric: (metric.step, metric.name, metric.created_ns, metric.seq))

    async def _series(
        self, run_id: str, names: Sequence[str] | None, max_points: int, after_step: int | None
    ) -> dict[str, list[SeriesPoint]]:
        await self._last_finished(run_id)
        chosen = [
            metric
            for metric in await self._all_metrics(run_id)
            if (names is None or metric.name in names) and (after_step is None or metric.step > after_step)
        ]
        return downsampled(chosen, max_points)

    async def _all_metrics(self, run_id: str) -> list[Metric]:
        found: list[Metric] = []
        while portion := await self._metrics_after(run_id, len(found), MAX_METRICS_PER_READ):
            found += portion
        return found

    async def _metrics_after(self, run_id: str, after: int, limit: int) -> list[Metric]:
        wanted = ("LRANGE", f"metrics:{run_id}", after, after + limit - 1)
        rows, undone = await self._query_at_once(wanted, ("LRANGE", f"undone:{run_id}", 0, -1))
        return codec.read_metrics(after + 1, rows, undone)

    async def _later_metrics(self, run_id: str, after: int, limit: int) -> list[Metric]:
        await self._last_finished(run_id)
        return await self._metrics_after(run_id, after, limit)

    async def steps(self, run_id: str, after: int | None = None, limit: int | None = None) -> list[Step]:
        [numbers] = await self._query(("HKEYS", f"steps:{run_id}"))
        wanted = sorted(number for number in map(int, numbers) if after is None or number > after)[:limit]
        rows = await self._query(*[("HGET", f"steps:{run_id}", number) for number in wanted])
        return [read(Step, row) for row in rows if row is not None]

    async def checkpoints(self, run_id: str) -> list[Checkpoint]:
        [rows] = await self._query(("HVALS", f"checkpoints:{run_id}"))
        return sorted([read(Checkpoint, row) for row in rows], key=lambda checkpoint: checkpoint.step)

    # --- access and models --------------------------------------------------------------------------------------------

    async def tokens(self, run_id: str | None = None) -> list[Token]:
        [rows] = await self._query(("HVALS", "tokens"))
        found = [token for row in rows if run_id in (None, (token := read(Token, row)).run_id)]
        return sorted(found, key=lambda token: (token.created_ns, token.id))

    async def find_token(self, secret_hash: str) -> Token | None:
        [token_id] = await self._query(("HGET", "token_hashes", secret_hash))
        [row] = [None] if token_id is None else await self._query(("HGET", "tokens", token_id))
        return None if row is None else read(Token, row)

    async def models(self, name: str | None = None, run_id: str | None = None) -> list[ModelVersion]:
        [rows] = await self._query(("HVALS", "models"))
        found = [read(ModelVersion, row) for row in rows]
        chosen = [each for each in found if name in (None, each.name) and run_id in (None, each.run_id)]
        return sorted(chosen, key=lambda version: (version.name, version.number))

    async def aliases(self, name: str | None = None) -> list[ModelAlias]:
        [rows] = await self._query(("HVALS", "aliases"))
        found = [alias for row in rows if name in (None, (alias := read(ModelAlias, row)).name)]
        return sorted(found, key=lambda one: (one.name, one.alias))

    # --- numbers ------------------------------------------------------------------------------------------------------

    async def statistics(self, run_id: str | None = None) -> list[RunStatistics]:
        now, (active,) = await self._opened().query_at([("SMEMBERS", "active")], self._now_ns)
        [soon] = await self._query(("ZRANGEBYSCORE", "leases", "-inf", now // 1000 + EXPIRING_S * 10**6))
        expiring = Counter(each.run_id for each in await self._by_id([each.decode() for each in soon]))
        run_ids = sorted(each.decode() for each in active if run_id in (None, each.decode()))
        return [await self._load(each, now, expiring[each]) for each in run_ids]

    async def _load(self, run_id: str, now: int, expiring: int) -> RunStatistics:
        sets = [f"s:{run_id}:{mode}:{state}" for state in ("queued", "running") for mode in MODES]
        asked: list[Command] = [("ZCARD", key) for key in sets]
        asked += [("ZRANGE", key, 0, 0) for key in sets[: len(MODES)]]
        *counts, train, held_out, rows = await self._query_at_once(*asked, ("HVALS", f"workers:{run_id}"))
        first = await self._by_id(sorted(each.decode() for each in (*train, *held_out))[:1])
        return RunStatistics(
            run_id=run_id,
            queued=counts[0] + counts[1],
            oldest_queued_s=max(0.0, (now - first[0].created_ns) / 1e9) if first else 0.0,
            running=counts[2] + counts[3],
            expiring=expiring,
            workers=sum(read(WorkerStatus, row).seen_ns > now - SEEN_S * 10**9 for row in rows),
        )


def _matches(rollout: Rollout, query: RolloutQuery) -> bool:
    return (
        query.run_id in (None, rollout.run_id)
        and query.mode in (None, rollout.mode)
        and (query.states is None or rollout.state in query.states)
        and query.step in (None, rollout.step)
        and not (query.unconsumed and rollout.outcome is not None)
        and (query.group_ids is None or rollout.group_id in query.group_ids)
    )
