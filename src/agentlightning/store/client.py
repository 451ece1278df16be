"""LightningStoreClient: the verbs over HTTP, for everybody who does not own the store.

Driven by workers and trainers; the other side is gateway/api.py. Knows nothing of what the verbs mean: one request each, the
answer decoded, errors raised again as the classes they were. Loads no database and no web server.

A request that could not be connected is sent again until `patience_s` has passed, since a server that is restarted comes
back on the same port. One whose connection broke on the way may have been executed; it is sent again too, except for
`create_run`, which would make another run. Of the others some may answer differently then, without harm: `finish` and
`cancel` say False and 0 for what they had already done, `put_resources` takes another version and leaves one unused; what a
lost `claim` took comes back by its lease.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import math
import time
from collections.abc import Hashable, Sequence
from types import NoneType
from typing import Any, TypeVar, cast

import aiohttp
import orjson
from pydantic import TypeAdapter, ValidationError

from agentlightning import errors
from agentlightning.errors import AgentLightningError, ConfigError, StoreError
from agentlightning.store import rows
from agentlightning.store.base import LEASE_S, LightningStore, RolloutQuery, reward_number
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
    RunState,
    Span,
    Step,
    Worker,
)

R = TypeVar("R")

BOOT_HEADER = "x-agl-boot"
ANSWER_S = 60.0
"""Seconds a server may take for an answer, beyond what a verb is asked to wait."""


class LightningStoreClient(LightningStore):
    """The store of the server at `url` (``http://host:port``), which wants its key unless it serves loopback only."""

    def __init__(self, url: str, server_key: str | None = None, *, patience_s: float = 30.0) -> None:
        self._url = url.rstrip("/")
        self._key = server_key
        self._patience_s = patience_s
        self._session: aiohttp.ClientSession | None = None
        self._boot: str | None = None

    @property
    def boot(self) -> str | None:
        """Id of the server's start, as of the last answer: a different one than before means that it was restarted."""
        return self._boot

    async def open(self) -> None:
        if self._session is None:
            headers = {"content-type": "application/json"}
            if self._key:
                headers["authorization"] = f"Bearer {self._key}"
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers=headers, auto_decompress=False
            )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def signing_secret(self) -> bytes:
        answer = await self._call("signing_secret", dict[str, str])
        return base64.b64decode(answer["secret"])

    # --- runs -----------------------------------------------------------------------------------------------------

    async def create_run(self, name: str, config: JSON, run_id: str | None = None) -> Run:
        return await self._call("create_run", Run, repeatable=False, name=name, config=config, run_id=run_id)

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
        return await self._call("finish", list[bool], finishes=[_sendable_finish(finish) for finish in finishes])

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
        await self._call("append_calls", NoneType, calls=calls)

    async def append_spans(self, spans: Sequence[Span]) -> None:
        await self._call("append_spans", NoneType, spans=spans)

    async def calls(self, rollout_ids: Sequence[str], attempt: int | None = None) -> list[Call]:
        return await self._call("calls", list[Call], rollout_ids=rollout_ids, attempt=attempt)

    async def spans(self, rollout_ids: Sequence[str]) -> list[Span]:
        return await self._call("spans", list[Span], rollout_ids=rollout_ids)

    async def record_rewards(self, rewards: Sequence[Reward]) -> None:
        for reward in rewards:
            reward_number(reward.value, reward.name)
        await self._call("record_rewards", NoneType, rewards=rewards)

    async def rewards(self, rollout_ids: Sequence[str]) -> list[Reward]:
        return await self._call("rewards", list[Reward], rollout_ids=rollout_ids)

    async def put_resources(self, resources: Sequence[Resource]) -> list[Resource]:
        return await self._call("put_resources", list[Resource], resources=resources)

    async def resources(self, run_id: str, name: str | None = None, latest: bool = True) -> list[Resource]:
        return await self._call("resources", list[Resource], run_id=run_id, name=name, latest=latest)

    async def log_metrics(self, metrics: Sequence[Metric]) -> None:
        await self._call("log_metrics", NoneType, metrics=[_sendable(metric) for metric in metrics])

    async def metrics(self, run_id: str, name: str | None = None) -> list[Metric]:
        return await self._call("metrics", list[Metric], run_id=run_id, name=name)

    # --- steps and checkpoints ------------------------------------------------------------------------------------

    async def open_step(self, run_id: str, step: int, consumed: Sequence[Consumed]) -> Step:
        return await self._call("open_step", Step, run_id=run_id, step=step, consumed=consumed)

    async def close_step(self, run_id: str, step: int, version: int) -> Step:
        return await self._call("close_step", Step, run_id=run_id, step=step, version=version)

    async def steps(self, run_id: str) -> list[Step]:
        return await self._call("steps", list[Step], run_id=run_id)

    async def reopen_steps(self, run_id: str, after: int) -> list[Step]:
        return await self._call("reopen_steps", list[Step], run_id=run_id, after=after)

    async def release_steps(self, run_id: str, after: int) -> int:
        return await self._call("release_steps", int, run_id=run_id, after=after)

    async def put_checkpoint(self, checkpoint: Checkpoint) -> None:
        await self._call("put_checkpoint", NoneType, checkpoint=checkpoint)

    async def checkpoints(self, run_id: str) -> list[Checkpoint]:
        return await self._call("checkpoints", list[Checkpoint], run_id=run_id)

    # --- how ------------------------------------------------------------------------------------------------------

    async def _call(self, verb: str, answer: type[R], *, repeatable: bool = True, wait: float = 0.0, **given: Any) -> R:
        """Send the verb; the answer as `answer`, a type. `wait` is how long the server was asked to wait."""
        body = rows.dump({key: list(value) if _is_list(value) else value for key, value in given.items()}, verb)
        deadline: float | None = None
        pause_s = 0.05
        while True:
            try:
                status, content = await self._send(verb, body, wait)
                break
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                unsent = isinstance(error, aiohttp.ClientConnectorError)
                deadline = deadline or time.monotonic() + self._patience_s  # from the first failure: waiting is none
                if time.monotonic() + pause_s > deadline or not (repeatable or unsent):
                    reason = str(error) or type(error).__name__
                    raise StoreError(
                        f"the server at {self._url} cannot be reached ({reason}); is it running?"
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 2.0)
        if status != 200:
            raise _error(f"{self._url}/api/{verb}", status, content)
        try:
            return cast(R, _adapter(cast(Hashable, answer)).validate_json(content))
        except ValidationError as error:
            raise StoreError(f"{self._url}/api/{verb}: the answer is not what was expected: {error}") from None

    async def _send(self, verb: str, body: str, wait: float) -> tuple[int, bytes]:
        if self._session is None:
            raise StoreError(f"the store at {self._url} is not open: use `async with store`, or await store.open()")
        timeout = aiohttp.ClientTimeout(total=ANSWER_S + wait, sock_connect=10.0)
        async with self._session.post(f"{self._url}/api/{verb}", data=body, timeout=timeout) as response:
            content = await response.read()
            self._boot = response.headers.get(BOOT_HEADER, self._boot)
            return response.status, content


@functools.cache
def _adapter(answer: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(Any, answer))


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


def _error(where: str, status: int, content: bytes) -> AgentLightningError:
    """The error that the server raised, as the class it was."""
    try:
        said = orjson.loads(content)["error"]
        kind, message = getattr(errors, said["type"], None), str(said["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return StoreError(f"{where}: expected an answer of an Agent Lightning server, got status {status}")
    if not isinstance(kind, type) or not issubclass(kind, AgentLightningError) or kind is errors.MissingExtraError:
        kind = StoreError
    if status == 401:
        kind = ConfigError
    return kind(message)
