"""What the tests of stores are made of: a clock, things to store, and a real server to reach a store through."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from typing import Any

import uuid_utils
import uvicorn
from fastapi import FastAPI

from agentlightning.gateway.rest import create_api
from agentlightning.records import (
    AttemptEnd,
    Call,
    CallCredit,
    Claim,
    Finish,
    NewRollout,
    Reward,
    RewardSource,
    Rollout,
    Sampling,
    Span,
    VersionSpan,
    WorkerStatus,
)
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.sql.store import SqlLightningStore

SECOND = 10**9


class Clock:
    """A clock that goes only when told."""

    def __init__(self) -> None:
        self.now_ns = 1_800_000_000 * SECOND

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)


class Server:
    """A store behind the API on a port of its own, served by uvicorn in a thread."""

    def __init__(self, store: LightningStore, server_key: str | None = None, port: int = 0, **hooks: Any) -> None:
        self._store = store
        self._app = FastAPI()
        self._app.mount("/api", create_api(store, server_key, **hooks))
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            self._app,
            log_config=None,
            log_level="error",
            lifespan="off",
            timeout_keep_alive=600,  # a test that is held up for some seconds finds its connection as it was
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def __aenter__(self) -> Server:
        await self._store.open()
        self._listener.listen()  # connections wait in the backlog until uvicorn accepts them
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await asyncio.to_thread(self._thread.join)
        self._listener.close()
        await self._store.close()

    async def _serve(self) -> None:
        await self._server.serve([self._listener])


def new_id() -> str:
    return str(uuid_utils.uuid7())


def a_worker(run_id: str, worker_id: str = "w0") -> WorkerStatus:
    return WorkerStatus(id=worker_id, run_id=run_id, host="here", pid=1, running=0, seen_ns=0)


def some(run_id: str, count: int, **fields: Any) -> list[NewRollout]:
    """New rollouts of one group."""
    given = {"group_id": "g", **fields}
    return [NewRollout(run_id=run_id, task={"number": replica}, replica=replica, **given) for replica in range(count)]


def a_call(claim: Claim, **fields: Any) -> Call:
    given: dict[str, Any] = {
        "id": new_id(),
        "run_id": claim.rollout.run_id,
        "rollout_id": claim.rollout.id,
        "attempt": claim.lease.attempt,
        "parent_id": None,
        "suffix_ids": [1, 2, 3],
        "sampled_ids": [7, 8],
        "logprobs": [-0.5, -0.25],
        "versions": [VersionSpan(version=1, start=0, end=2)],
        "prompt_tokens": 3,
        "policy": "default",
        "model": "default",
        "protocol": "chat",
        "sampling": Sampling(temperature=0.5, max_tokens=9),
        "history_hash": "h",
        "request_hash": "r",
        "messages": [{"role": "user", "content": "hi"}],
        "completion": {"role": "assistant", "content": "hello"},
        "tools": [{"type": "function", "function": {"name": "add"}}],
        "started_ns": 1,
        "finished_ns": 2,
    }
    return Call(**{**given, **fields})


def a_span(claim: Claim, name: str = "tool", **fields: Any) -> Span:
    given: dict[str, Any] = {"id": new_id(), "started_ns": 1, "finished_ns": 2, "attributes": {}}
    place = {"run_id": claim.rollout.run_id, "rollout_id": claim.rollout.id, "attempt": claim.lease.attempt}
    return Span(**{**given, **place, "name": name, **fields})


def a_reward(claim: Claim, value: Any, source: RewardSource = "return", **fields: Any) -> Reward:
    given: dict[str, Any] = {"id": new_id(), "value": value, "source": source}
    place = {"run_id": claim.rollout.run_id, "rollout_id": claim.rollout.id, "attempt": claim.lease.attempt}
    return Reward(**{**given, **place, **fields})


def a_credit(claim: Claim, call_id: str, **fields: Any) -> CallCredit:
    """By step 1, unless fields say otherwise; its numbers are float32."""
    given: dict[str, Any] = {
        "step": 1,
        "policy": "default",
        "credit": 1.0,
        "advantage": 0.5,
        "return_": None,
        "weight": 0.25,
        "trained_tokens": 2,
        "token_advantages": [0.5, 0.5],
        "token_ratios": [1.0, 1.25],
        "token_entropies": [0.5, 2.0],
        "clip_share": 0.0,
    }
    place = {"run_id": claim.rollout.run_id, "rollout_id": claim.rollout.id, "call_id": call_id}
    return CallCredit(**{**given, **place, **fields})


def ending(claim: Claim, state: AttemptEnd = "succeeded", **fields: Any) -> Finish:
    return Finish(lease=claim.lease, state=state, **fields)


async def a_run(store: LightningStore) -> str:
    return (await store.create_run("a run", {})).id


async def claimed(store: LightningStore, count: int = 1, **fields: Any) -> list[Claim]:
    """Claims of new rollouts in a new run."""
    run_id = await a_run(store)
    await store.enqueue(some(run_id, count, **fields))
    return await store.claim(a_worker(run_id), limit=count)


async def appending(store: LightningStore, claim: Claim) -> tuple[list[Call], list[asyncio.Task[None]]]:
    """240 calls on their way by 8 writers, once 40 of them are acknowledged: the growing list of those, and the writers."""
    acknowledged: list[Call] = []

    async def append() -> None:
        for _ in range(30):
            call = a_call(claim)
            await store.append_calls([call])
            acknowledged.append(call)

    writers = [asyncio.create_task(append()) for _ in range(8)]
    while len(acknowledged) < 40:
        await store.runs()
    return acknowledged, writers


async def finished(store: LightningStore, count: int = 1, **fields: Any) -> list[Claim]:
    """Claims of rollouts that then succeeded with reward 1."""
    claims = await claimed(store, count, **fields)
    rewarded = [ending(claim, rewards=(a_reward(claim, 1.0),)) for claim in claims]
    assert await store.finish(rewarded) == [True] * count
    return claims


async def states(store: LightningStore, claims: Sequence[Claim]) -> list[str]:
    from agentlightning.store.base import RolloutQuery

    return [rollout.state for rollout in await store.rollouts(RolloutQuery(ids=[claim.rollout.id for claim in claims]))]


def sql_store(url: str, clock: Clock) -> LightningStore:
    return SqlLightningStore(url, now_ns=clock)


async def one(store: LightningStore, rollout_id: str) -> Rollout:
    [rollout] = await store.rollouts(RolloutQuery(ids=[rollout_id]))
    return rollout
