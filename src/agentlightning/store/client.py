"""LightningStoreClient: the verbs over HTTP, for everybody who does not own the store.

Driven by workers and trainers; the other side is gateway/api.py. Knows nothing of what the verbs mean: one request each, the
answer decoded, errors raised again as the classes they were. Loads no database and no web server.

What coroutines append or finish at the same time travels as one request (batches.py). A server that is away is waited for,
and a request whose connection broke is sent again under the same key (channel.py): a server that executed it answers as it
did then. A server that was killed between executing and answering has forgotten that. Then appends, enqueue, finish, the
verbs of steps and checkpoints, and create_run with an id still do nothing twice. What a lost `claim` took comes back when
its lease runs out, without an attempt having begun; `put_resources` takes another version and leaves one unused, create_run
without an id leaves an empty run, log_metrics may log twice, and verbs that count may answer 0.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar, cast

import orjson
from pydantic import TypeAdapter, ValidationError

from agentlightning.errors import ConflictError, InputError, StoreError
from agentlightning.store import rows
from agentlightning.store.base import LEASE_S, LightningStore, RolloutQuery, reward_number
from agentlightning.store.batches import Batches
from agentlightning.store.channel import PATIENCE_S, Answer, Channel
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
    Worker,
)

R = TypeVar("R")

READING = frozenset(
    {"attempts", "calls", "checkpoints", "count", "follow_metrics", "metrics", "resources", "rewards", "rollouts"}
    | {"runs", "signing_secret", "sizes", "spans", "statistics", "steps", "wait", "wait_resources", "workers"}
)
"""Verbs that change nothing: sent again without further ado."""
LONG_WORK_S = 3600.0
"""Seconds beyond a usual answer's for verbs that go through all data of a run."""


class LightningStoreClient(LightningStore):
    """The store of the server at `url` (``http://host:port``), which wants its key unless it serves loopback only."""

    def __init__(
        self, url: str, server_key: str | None = None, *, patience_s: float = PATIENCE_S, compress: bool | None = None
    ) -> None:
        """`patience_s`: how long the server may be away (half a minute at most before its first answer). `compress`: bodies
        beyond some size; None leaves it to where the server seems to be."""
        self._url = url.rstrip("/")
        self._channel = Channel(self._url, server_key, patience_s, compress)
        self._batches: dict[str, Batches] = {}

    @property
    def boot(self) -> str | None:
        """Id of the server's start, as of the last answer: a different one than before means that it was restarted."""
        return self._channel.boot

    async def open(self) -> None:
        await self._channel.open()

    async def close(self) -> None:
        for batches in self._batches.values():
            await batches.close()
        await self._channel.close()

    async def signing_secret(self) -> bytes:
        answer = await self._call("signing_secret", dict[str, str])
        return base64.b64decode(answer["secret"])

    # --- runs -----------------------------------------------------------------------------------------------------

    async def create_run(self, name: str, config: JSON, run_id: str | None = None) -> Run:
        body = _json({"name": name, "config": config, "run_id": run_id}, "create_run")
        said = await self._channel.ask("create_run", body, writes=True)
        if said.repeated and run_id is not None and isinstance(said.error, ConflictError):
            for run in await self.runs([run_id]):
                if run.name == name and _json(run.config, "config") == _json(config, "config"):
                    return run  # this very request made it, before the server was restarted
        return self._read("create_run", Run, said)

    async def update_run(self, run_id: str, state: RunState | None = None, summary: JSON | None = None) -> Run:
        return await self._call("update_run", Run, run_id=run_id, state=state, summary=summary)

    async def runs(self, ids: Sequence[str] | None = None, limit: int | None = None) -> list[Run]:
        return await self._call("runs", list[Run], ids=ids, limit=limit)

    # --- rollouts and attempts ------------------------------------------------------------------------------------

    async def enqueue(self, rollouts: Sequence[NewRollout]) -> list[Rollout]:
        return await self._call("enqueue", list[Rollout], rollouts=rollouts)

    async def claim(
        self,
        worker: Worker,
        limit: int = 1,
        lease_s: float = LEASE_S,
        wait_s: float = 0.0,
    ) -> list[Claim]:
        return await self._call(
            "claim", list[Claim], wait=wait_s, worker=worker, limit=limit, lease_s=lease_s, wait_s=wait_s
        )

    async def heartbeat(self, worker: Worker, leases: Sequence[Lease], lease_s: float = LEASE_S) -> list[bool]:
        return await self._call("heartbeat", list[bool], worker=worker, leases=leases, lease_s=lease_s)

    async def finish(self, finishes: Sequence[Finish]) -> list[bool]:
        held = await self._append("finish", "finishes", [_sendable_finish(finish) for finish in finishes])
        return list(held or ())

    async def cancel(self, rollout_ids: Sequence[str]) -> int:
        return await self._call("cancel", int, rollout_ids=rollout_ids)

    async def expire_leases(self) -> int:
        return await self._call("expire_leases", int)

    async def rollouts(self, query: RolloutQuery) -> list[Rollout]:
        return await self._call("rollouts", list[Rollout], query=query)

    async def count(self, run_id: str) -> dict[tuple[Mode, RolloutState], int]:
        by_mode = await self._call("count", dict[Mode, dict[RolloutState, int]], run_id=run_id)
        return {(mode, state): number for mode, states in by_mode.items() for state, number in states.items()}

    async def attempts(self, rollout_ids: Sequence[str]) -> list[Attempt]:
        return await self._call("attempts", list[Attempt], rollout_ids=rollout_ids)

    async def wait(self, run_id: str, after: int = 0, at_least: int = 1, timeout_s: float = 30.0) -> list[Rollout]:
        return await self._call(
            "wait",
            list[Rollout],
            wait=timeout_s,
            run_id=run_id,
            after=after,
            at_least=at_least,
            timeout_s=timeout_s,
        )

    async def workers(self, run_id: str | None = None) -> list[Worker]:
        return await self._call("workers", list[Worker], run_id=run_id)

    # --- the record -----------------------------------------------------------------------------------------------

    async def append_calls(self, calls: Sequence[Call]) -> None:
        await self._append("append_calls", "calls", calls)

    async def append_spans(self, spans: Sequence[Span]) -> None:
        await self._append("append_spans", "spans", spans)

    async def calls(self, rollout_ids: Sequence[str], attempt: int | None = None) -> list[Call]:
        return await self._call("calls", list[Call], rollout_ids=rollout_ids, attempt=attempt)

    async def spans(self, rollout_ids: Sequence[str]) -> list[Span]:
        return await self._call("spans", list[Span], rollout_ids=rollout_ids)

    async def record_rewards(self, rewards: Sequence[Reward]) -> None:
        for reward in rewards:
            reward_number(reward.value, reward.name)
        await self._append("record_rewards", "rewards", rewards)

    async def rewards(self, rollout_ids: Sequence[str]) -> list[Reward]:
        return await self._call("rewards", list[Reward], rollout_ids=rollout_ids)

    async def put_resources(self, resources: Sequence[Resource]) -> list[Resource]:
        return await self._call("put_resources", list[Resource], resources=resources)

    async def resources(self, run_id: str, name: str | None = None, latest: bool = True) -> list[Resource]:
        return await self._call("resources", list[Resource], run_id=run_id, name=name, latest=latest)

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        await self._append("log_metrics", "metrics", [_sendable(metric) for metric in metrics])

    async def metrics(self, run_id: str, name: str | None = None) -> list[Metric]:
        return await self._call("metrics", list[Metric], run_id=run_id, name=name)

    # --- news and numbers --------------------------------------------------------------------------------------------

    async def wait_resources(self, run_id: str, after: Mapping[str, int], timeout_s: float = 30.0) -> list[Resource]:
        return await self._call(
            "wait_resources", list[Resource], wait=timeout_s, run_id=run_id, after=dict(after), timeout_s=timeout_s
        )

    async def follow_metrics(
        self, run_id: str, after: int = 0, timeout_s: float = 30.0, limit: int = 10_000
    ) -> list[Metric]:
        return await self._call(
            "follow_metrics",
            list[Metric],
            wait=timeout_s,
            run_id=run_id,
            after=after,
            timeout_s=timeout_s,
            limit=limit,
        )

    async def statistics(self) -> list[RunStatistics]:
        return await self._call("statistics", list[RunStatistics])

    async def sizes(self, run_ids: Sequence[str] | None = None) -> list[RunSize]:
        return await self._call("sizes", list[RunSize], wait=LONG_WORK_S, run_ids=run_ids)

    # --- the end of data ----------------------------------------------------------------------------------------------

    async def drop_records(self, rollout_ids: Sequence[str]) -> int:
        return await self._call("drop_records", int, wait=LONG_WORK_S, rollout_ids=rollout_ids)

    async def delete_runs(self, run_ids: Sequence[str]) -> int:
        return await self._call("delete_runs", int, wait=LONG_WORK_S, run_ids=run_ids)

    # --- steps and checkpoints ------------------------------------------------------------------------------------

    async def open_step(self, run_id: str, step: int, consumed: Sequence[Consumed]) -> Step:
        return await self._call("open_step", Step, run_id=run_id, step=step, consumed=consumed)

    async def close_step(self, run_id: str, step: int, version: int) -> Step:
        return await self._call("close_step", Step, run_id=run_id, step=step, version=version)

    async def steps(self, run_id: str, after: int | None = None, limit: int | None = None) -> list[Step]:
        return await self._call("steps", list[Step], run_id=run_id, after=after, limit=limit)

    async def reopen_steps(self, run_id: str, after: int) -> list[Step]:
        return await self._call("reopen_steps", list[Step], run_id=run_id, after=after)

    async def release_steps(self, run_id: str, after: int) -> int:
        return await self._call("release_steps", int, run_id=run_id, after=after)

    async def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        await self._call("put_checkpoint", NoneType, checkpoint=checkpoint)

    async def checkpoints(self, run_id: str) -> list[Checkpoint]:
        return await self._call("checkpoints", list[Checkpoint], run_id=run_id)

    # --- how ------------------------------------------------------------------------------------------------------

    async def _call(self, verb: str, answer: type[R], *, wait: float = 0.0, **given: Any) -> R:
        """Send the verb; the answer as `answer`, a type. `wait` is how long the server was asked to wait."""
        body = _json({key: list(value) if _is_list(value) else value for key, value in given.items()}, verb)
        said = await self._channel.ask(verb, body, writes=verb not in READING, wait_s=wait)
        return self._read(verb, answer, said)

    async def _append(self, verb: str, name: str, records: Sequence[Any]) -> Sequence[bool] | None:
        """Send records, in the argument of this name, together with those of whoever sends at the same time."""
        if not records:
            return []
        elements = _json(list(records), name)
        batches = self._batches.get(verb)
        if batches is None:
            batches = self._batches[verb] = Batches(functools.partial(self._send_batch, verb, name))
        return await batches.append(elements, len(records))

    async def _send_batch(self, verb: str, name: str, elements: bytes, count: int) -> Sequence[bool] | None:
        said = await self._channel.ask(verb, b'{"%s":%s}' % (name.encode(), elements), writes=True)
        if verb != "finish":
            return self._read(verb, NoneType, said)
        held = self._read(verb, list[bool], said)
        if len(held) != count:
            raise StoreError(f"{self._url}/api/{verb}: expected {count} answers, got {len(held)}")
        return held if all(held) or not said.repeated else await self._held_before(elements, held)

    async def _held_before(self, finishes: bytes, held: Sequence[bool]) -> Sequence[bool]:
        """True also for the finishes that a server executed before it was restarted: only their lease's holder could."""
        given = [(finish["lease"], finish["state"]) for finish in orjson.loads(finishes)]
        known = await self.attempts([lease["rollout_id"] for lease, _ in given])
        states = {(attempt.rollout_id, attempt.attempt): attempt.state for attempt in known}
        return [
            holds or (state != "lost" and states.get((lease["rollout_id"], lease["attempt"])) == state)
            for holds, (lease, state) in zip(held, given, strict=True)
        ]

    def _read(self, verb: str, answer: type[R], said: Answer) -> R:
        if said.error is not None:
            raise said.error
        try:
            return cast(R, _adapter(cast(Hashable, answer)).validate_json(said.content))
        except ValidationError as error:
            raise StoreError(f"{self._url}/api/{verb}: the answer is not what was expected: {error}") from None


@functools.cache
def _adapter(answer: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(Any, answer))


def _json(value: Any, name: str) -> bytes:
    """InputError that names the field where the value is not JSON."""
    try:
        return orjson.dumps(value)
    except TypeError as error:
        raise InputError(f"{name}: expected JSON: {error}") from None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _sendable_finish(finish: Finish) -> JSON:
    """What a program printed may hold halves of characters, and its reward may be no number: both must arrive."""
    return {
        "lease": finish.lease,
        "state": finish.state,
        "rewards": [_sendable(reward) for reward in finish.rewards],
        "error": rows.text(finish.error),
        "output": rows.text(finish.output),
        "diagnosis": rows.text(finish.diagnosis),
    }


def _sendable(record: Reward | Metric) -> Reward | Metric | JSON:
    """JSON has no NaN and no infinity; their names are understood at the other end."""
    if isinstance(record.value, float) and not math.isfinite(record.value):
        return {**dataclasses.asdict(record), "value": str(record.value)}
    return record
