"""LightningStoreClient: the store over HTTP, for everybody who does not own it.

Driven by workers and trainers; the other side is gateway/store_rpc.py. One request per method, its response decoded, errors
raised again as the classes they were. Knows nothing of what the methods mean, loads no database and no web server.

What coroutines append or finish at the same time travels as one request (coalescer.py). A server that is away is waited for,
and a request whose connection broke is sent again under the same key (http_transport.py): a server that executed it answers
as it did then. A server that was killed between executing and answering has forgotten that. Then appends, enqueue, finish,
the methods for steps and checkpoints, and create_run with an id still do nothing twice. What a lost `claim` took comes back
when its lease runs out, without an attempt having begun; `put_resources` takes another version and leaves one unused,
create_run without an id leaves an empty run, log_metrics may log twice, and methods that count may return 0.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
import orjson
import uuid_utils

from agentlightning.errors import ConfigError, ConflictError, StoreError
from agentlightning.store import codec, wire
from agentlightning.store.base import LEASE_S, LightningStore, RolloutQuery, reward_number
from agentlightning.store.coalescer import Coalescer
from agentlightning.store.http_transport import RETRY_TIMEOUT_S, HttpTransport, StoreResponse
from agentlightning.types import (
    JSON,
    Attempt,
    Call,
    Checkpoint,
    Claim,
    Consumed,
    Finish,
    Lease,
    Metric,
    Mode,
    NewRollout,
    Resource,
    Reward,
    Rollout,
    RolloutState,
    Run,
    RunSize,
    RunState,
    RunStatistics,
    Span,
    Step,
    WorkerStatus,
)

R = TypeVar("R")

READING = frozenset(
    {"attempts", "calls", "checkpoints", "count", "follow_metrics", "metrics", "resources", "rewards", "rollouts"}
    | {"runs", "signing_secret", "sizes", "spans", "statistics", "steps", "wait", "wait_resources", "workers"}
)
"""Methods that change nothing: sent again without further ado."""
LONG_WORK_S = 3600.0
"""Seconds beyond a usual response's for methods that go through all data of a run."""

MAX_COALESCED_BYTES = 64 * 1024
"""Bytes of a request that travels with others; larger ones go alone, so that nobody waits for them."""
MAX_COALESCED_WRITES = 1000
MAX_BATCH_BYTES = 4 * 1024 * 1024
"""Bytes of writes that travel together; a single append may be larger."""


class LightningStoreClient(LightningStore):
    """The store of the server at `url` (``http://host:port``), which wants its key unless it serves loopback only."""

    def __init__(
        self,
        url: str,
        server_key: str | None = None,
        *,
        retry_timeout_s: float = RETRY_TIMEOUT_S,
        compress: bool | None = None,
    ) -> None:
        """`retry_timeout_s`: how long the server may be away (half a minute at most before its first response). `compress`:
        whether large bodies are compressed; None: where the server does not seem to be on this network."""
        self._url = url.rstrip("/")
        self._transport = HttpTransport(self._url, server_key, retry_timeout_s, compress)
        self._writes: Coalescer[_Write, StoreResponse] = Coalescer(
            self._deliver, max_items=MAX_COALESCED_WRITES, max_size=MAX_BATCH_BYTES, size=len
        )

    @property
    def boot(self) -> str | None:
        """Id of the server's start, as of the last answer: a different one than before means that it was restarted."""
        return self._transport.boot

    async def open(self) -> None:
        await self._transport.open()

    async def close(self) -> None:
        await self._writes.close(StoreError("the store was closed while this was being sent"))
        await self._transport.close()

    async def signing_secret(self) -> bytes:
        response = await self._transport.request("signing_secret", b"")
        if response.error is not None:
            raise response.error
        return base64.b64decode(orjson.loads(response.content)["secret"])

    # --- runs -----------------------------------------------------------------------------------------------------

    async def create_run(self, name: str, config: JSON, run_id: str | None = None) -> Run:
        body = wire.encode({"name": name, "config": config, "run_id": run_id}, "create_run")
        response = await self._writes.submit(_Write("create_run", body))
        if response.retried and run_id is not None and isinstance(response.error, ConflictError):
            for run in await self.runs([run_id]):
                if run.name == name and orjson.dumps(run.config) == orjson.dumps(config):
                    return run  # this very request made it, before the server was restarted
        return cast(Run, self._result("create_run", response))

    async def update_run(self, run_id: str, state: RunState | None = None, summary: JSON | None = None) -> Run:
        return await self._call(LightningStore.update_run, run_id=run_id, state=state, summary=summary)

    async def runs(self, ids: Sequence[str] | None = None, limit: int | None = None) -> list[Run]:
        return await self._call(LightningStore.runs, ids=ids, limit=limit)

    # --- rollouts and attempts ------------------------------------------------------------------------------------

    async def enqueue(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        return await self._call(LightningStore.enqueue, rollouts=rollouts)

    async def claim(
        self,
        worker: WorkerStatus,
        limit: int = 1,
        lease_s: float = LEASE_S,
        wait_s: float = 0.0,
    ) -> list[Claim]:
        return await self._call(
            LightningStore.claim, poll_s=wait_s, worker=worker, limit=limit, lease_s=lease_s, wait_s=wait_s
        )

    async def heartbeat(self, worker: WorkerStatus, leases: Sequence[Lease], lease_s: float = LEASE_S) -> list[bool]:
        return await self._call(LightningStore.heartbeat, worker=worker, leases=leases, lease_s=lease_s)

    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        return list(await self._append("finish", "finishes", [_storable(finish) for finish in finishes]) or ())

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        return await self._call(LightningStore.cancel, rollout_ids=rollout_ids)

    async def expire_leases(self) -> int:
        return await self._call(LightningStore.expire_leases)

    async def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        return await self._call(LightningStore.rollouts, query=query)

    async def count(self, run_id: str) -> dict[tuple[Mode, RolloutState], int]:
        return await self._call(LightningStore.count, run_id=run_id)

    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        return await self._call(LightningStore.attempts, rollout_ids=rollout_ids)

    async def wait(self, run_id: str, after: int = 0, at_least: int = 1, timeout_s: float = 30.0) -> list[Rollout]:
        return await self._call(
            LightningStore.wait,
            poll_s=timeout_s,
            run_id=run_id,
            after=after,
            at_least=at_least,
            timeout_s=timeout_s,
        )

    async def workers(self, run_id: str | None = None) -> list[WorkerStatus]:
        return await self._call(LightningStore.workers, run_id=run_id)

    # --- the record -----------------------------------------------------------------------------------------------

    async def append_calls(self, calls: Sequence[Call]) -> None:
        await self._append("append_calls", "calls", calls)

    async def append_spans(self, spans: Sequence[Span]) -> None:
        await self._append("append_spans", "spans", spans)

    async def calls(self, rollout_ids: Sequence[str], attempt: int | None = None) -> list[Call]:
        return await self._call(LightningStore.calls, rollout_ids=rollout_ids, attempt=attempt)

    async def spans(self, rollout_ids: Sequence[str]) -> list[Span]:
        return await self._call(LightningStore.spans, rollout_ids=rollout_ids)

    async def record_rewards(self, rewards: Sequence[Reward]) -> None:
        for reward in rewards:
            reward_number(reward.value, reward.name)
        await self._append("record_rewards", "rewards", rewards)

    async def rewards(self, rollout_ids: Sequence[str]) -> list[Reward]:
        return await self._call(LightningStore.rewards, rollout_ids=rollout_ids)

    async def put_resources(self, resources: Sequence[Resource]) -> list[Resource]:
        return await self._call(LightningStore.put_resources, resources=resources)

    async def resources(self, run_id: str, name: str | None = None, latest: bool = True) -> list[Resource]:
        return await self._call(LightningStore.resources, run_id=run_id, name=name, latest=latest)

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        await self._append("log_metrics", "metrics", metrics)

    async def metrics(self, run_id: str, name: str | None = None) -> list[Metric]:
        return await self._call(LightningStore.metrics, run_id=run_id, name=name)

    # --- news and numbers --------------------------------------------------------------------------------------------

    async def wait_resources(self, run_id: str, after: Mapping[str, int], timeout_s: float = 30.0) -> list[Resource]:
        return await self._call(
            LightningStore.wait_resources, poll_s=timeout_s, run_id=run_id, after=after, timeout_s=timeout_s
        )

    async def follow_metrics(
        self, run_id: str, after: int = 0, timeout_s: float = 30.0, limit: int = 10_000
    ) -> list[Metric]:
        return await self._call(
            LightningStore.follow_metrics,
            poll_s=timeout_s,
            run_id=run_id,
            after=after,
            timeout_s=timeout_s,
            limit=limit,
        )

    async def statistics(self) -> list[RunStatistics]:
        return await self._call(LightningStore.statistics)

    async def sizes(self, run_ids: Sequence[str] | None = None) -> list[RunSize]:
        return await self._call(LightningStore.sizes, poll_s=LONG_WORK_S, run_ids=run_ids)

    # --- the end of data ----------------------------------------------------------------------------------------------

    async def drop_records(self, rollout_ids: Sequence[str]) -> int:
        return await self._call(LightningStore.drop_records, poll_s=LONG_WORK_S, rollout_ids=rollout_ids)

    async def delete_runs(self, run_ids: Sequence[str]) -> int:
        return await self._call(LightningStore.delete_runs, poll_s=LONG_WORK_S, run_ids=run_ids)

    # --- steps and checkpoints ------------------------------------------------------------------------------------

    async def open_step(self, run_id: str, step: int, consumed: Sequence[Consumed]) -> Step:
        return await self._call(LightningStore.open_step, run_id=run_id, step=step, consumed=consumed)

    async def close_step(self, run_id: str, step: int, version: int) -> Step:
        return await self._call(LightningStore.close_step, run_id=run_id, step=step, version=version)

    async def steps(self, run_id: str, after: int | None = None, limit: int | None = None) -> list[Step]:
        return await self._call(LightningStore.steps, run_id=run_id, after=after, limit=limit)

    async def reopen_steps(self, run_id: str, after: int) -> list[Step]:
        return await self._call(LightningStore.reopen_steps, run_id=run_id, after=after)

    async def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        await self._call(LightningStore.put_checkpoint, checkpoint=checkpoint)

    async def checkpoints(self, run_id: str) -> list[Checkpoint]:
        return await self._call(LightningStore.checkpoints, run_id=run_id)

    # --- how ------------------------------------------------------------------------------------------------------

    async def _call(
        self, method: Callable[..., Coroutine[Any, Any, R]], *, poll_s: float | None = None, **given: Any
    ) -> R:
        """Sends the request and returns its result. `poll_s`: how long the server was asked to wait, or may take."""
        name = method.__name__
        body = wire.encode(given, name)
        if name in READING:
            response = await self._transport.request(name, body, wait_s=poll_s or 0.0)
        elif poll_s or len(body) > MAX_COALESCED_BYTES:
            response = await self._transport.request(name, body, key=str(uuid_utils.uuid7()), wait_s=poll_s or 0.0)
        else:
            response = await self._writes.submit(_Write(name, body))
        return cast(R, self._result(name, response))

    async def _append(self, method: str, name: str, records: Sequence[Any]) -> Sequence[bool] | None:
        """Sends records, in the argument of this name, together with those of whoever sends at the same time."""
        if not records:
            return []
        encoded = [wire.encode_record(record, name) for record in records]
        response = await self._writes.submit(_Write(method, b"", name, records, encoded))
        return cast(Sequence[bool] | None, self._result(method, response))

    async def _deliver(self, writes: list[_Write]) -> Sequence[StoreResponse]:
        """Sends writes as one request; the appends of one method are one of its entries."""
        groups: dict[Any, list[_Write]] = defaultdict(list)
        for write in writes:
            groups[write.method if write.records else write].append(write)
        found: dict[_Write, StoreResponse] = {}
        whole = await self._transport.send([_request(group) for group in groups.values()])
        for group, response in zip(groups.values(), whole, strict=True):
            found.update(zip(group, await self._responses(group, response), strict=True))
        return [found[write] for write in writes]

    async def _responses(self, group: list[_Write], response: StoreResponse) -> Sequence[StoreResponse]:
        """The response to each of a group that was executed as a whole, so that only those that are at fault fail.

        Where the server refuses the whole its halves are sent on their own, one after the other: children follow parents.
        """
        if response.error is not None:
            if len(group) == 1 or type(response.error) in (StoreError, ConfigError):  # nobody's in particular
                return [response._replace(error=copy.copy(response.error)) for _ in group]
            found: list[StoreResponse] = []
            for half in (group[: len(group) // 2], group[len(group) // 2 :]):
                [again] = await self._transport.send([_request(half)])
                found += await self._responses(half, again)
            return found
        if group[0].method != "finish":
            return [response] * len(group)
        finishes = [finish for write in group for finish in write.records]
        held = self._result("finish", response)
        if len(held) != len(finishes):
            raise StoreError(f"{self._url}/api/finish: expected {len(finishes)} answers, got {len(held)}")
        if response.retried and not all(held):
            held = await self._held_before(finishes, held)
        in_order = iter(held)
        return [
            response._replace(content=wire.encode([next(in_order) for _ in write.records], "finish")) for write in group
        ]

    async def _held_before(self, finishes: Sequence[Finish], held: Sequence[bool]) -> Sequence[bool]:
        """True also for the finishes that a server executed before it was restarted: only their lease's holder could."""
        known = await self.attempts([finish.lease.rollout_id for finish in finishes])
        states = {(attempt.rollout_id, attempt.attempt): attempt.state for attempt in known}
        return [
            holds
            or (finish.state != "lost" and states.get((finish.lease.rollout_id, finish.lease.attempt)) == finish.state)
            for holds, finish in zip(held, finishes, strict=True)
        ]

    def _result(self, method: str, response: StoreResponse) -> Any:
        if response.error is not None:
            raise response.error
        try:
            return wire.decode_result(method, response.content)
        except ValueError as error:
            raise StoreError(f"{self._url}/api/{method}: unexpected response: {error}") from None


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """One caller's write: the arguments of its request, or records to append in the argument of some name."""

    method: str
    arguments: bytes
    name: str = ""
    records: Sequence[Any] = ()
    encoded: Sequence[bytes] = ()

    def __len__(self) -> int:
        """Bytes."""
        return len(self.arguments) + sum(map(len, self.encoded))


def _request(group: Sequence[_Write]) -> tuple[str, bytes]:
    first = group[0]
    if not first.records:
        return first.method, first.arguments
    return first.method, wire.encode(
        {first.name: [msgspec.Raw(each) for write in group for each in write.encoded]}, first.name
    )


def _storable(finish: Finish) -> Finish:
    """Encodes a finish: what a program printed may hold halves of characters, which must arrive."""
    error, output, diagnosis = (codec.text(each) for each in (finish.error, finish.output, finish.diagnosis))
    return dataclasses.replace(finish, error=error, output=output, diagnosis=diagnosis)
