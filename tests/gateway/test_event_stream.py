"""The event stream of a run and the views of summaries and series, over a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.types import Message

from agentlightning.gateway.event_stream import RunEvents
from agentlightning.gateway.server import AgentLightningServer
from agentlightning.records import Finish, Metric, NewRollout, WorkerStatus
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.sql.store import InMemoryLightningStore

KEY = "sk-agl-server-of-this-test"
DEADLINE_S = 30.0


@pytest.fixture
async def server() -> AsyncIterator[AgentLightningServer]:
    with AgentLightningServer("memory://", server_key=KEY) as running:
        yield running


@pytest.fixture
async def store(server: AgentLightningServer) -> AsyncIterator[LightningStoreClient]:
    async with LightningStoreClient(server.url, KEY) as client:
        yield client


@asynccontextmanager
async def http(server: AgentLightningServer, key: str = KEY) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=f"{server.url}/api", headers=headers, timeout=DEADLINE_S) as client:
        yield client


async def finish_rollouts(store: LightningStore, run_id: str, count: int, step: int = 1) -> list[str]:
    """Ids of new rollouts, which failed."""
    new = [NewRollout(run_id=run_id, task={}, group_id=f"{step}", replica=n, step=step) for n in range(count)]
    await store.enqueue(new)
    worker = WorkerStatus(id="w", run_id=run_id, host="h", pid=1, running=0, seen_ns=0)
    claims = await store.claim(worker, limit=count)
    await store.finish([Finish(lease=claim.lease, state="failed") for claim in claims])
    return [claim.rollout.id for claim in claims]


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, comments left out."""
    event: dict[str, Any] = {}
    async with asyncio.timeout(DEADLINE_S):
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if line == "" and event:
                yield event
                event = {}
            elif name:
                event[name] = json.loads(value) if name == "data" else value


async def take(stream: AsyncIterator[dict[str, Any]], wanted: int) -> list[tuple[str, Any]]:
    """The records of the next events, until there are so many: (event, record)."""
    found: list[tuple[str, Any]] = []
    while len(found) < wanted:
        event = await anext(stream)
        found += [(event["event"], record) for record in event["data"]]
    return found


async def test_metrics_and_finished_rollouts_are_pushed_as_they_come(
    server: AgentLightningServer, store: LightningStoreClient
) -> None:
    run_id = (await store.create_run("watched", {})).id
    await store.log_metrics([Metric(run_id=run_id, step=1, name="loss", value=0.5)])
    async with http(server) as client, client.stream("GET", f"/events?run_id={run_id}") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = events(response)
        [(event, metric)] = await take(stream, 1)
        assert (event, metric["name"], metric["value"], metric["step"]) == ("metrics", "loss", 0.5, 1)
        ids = await finish_rollouts(store, run_id, 2)
        rollouts = await take(stream, 2)
        assert [(event, row["id"], row["state"]) for event, row in rollouts] == [
            ("rollouts", each, "failed") for each in ids
        ]
        await store.log_metrics([Metric(run_id=run_id, step=2, name="loss", value=0.25)])
        [(_, later)] = await take(stream, 1)
        assert later["value"] == 0.25


async def test_a_client_that_reconnects_misses_nothing_and_gets_nothing_twice(
    server: AgentLightningServer, store: LightningStoreClient
) -> None:
    run_id = (await store.create_run("watched", {})).id
    await store.log_metrics([Metric(run_id=run_id, step=1, name="loss", value=1.0)])
    async with http(server) as client:
        async with client.stream("GET", f"/events?run_id={run_id}") as response:
            last = (await anext(events(response)))["id"]
        await store.log_metrics([Metric(run_id=run_id, step=2, name="loss", value=2.0)])
        await finish_rollouts(store, run_id, 1)
        async with client.stream("GET", f"/events?run_id={run_id}", headers={"last-event-id": last}) as response:
            found = await take(events(response), 2)
    assert {event: record["step"] for event, record in found} == {"metrics": 2, "rollouts": 1}


async def test_a_stream_ends_with_its_server(store: LightningStoreClient, server: AgentLightningServer) -> None:
    run_id = (await store.create_run("watched", {})).id
    async with http(server) as client, client.stream("GET", f"/events?run_id={run_id}") as response:
        stopping = asyncio.get_running_loop().run_in_executor(None, server.stop)
        async with asyncio.timeout(DEADLINE_S):
            assert [event async for event in events(response)] == []
            await stopping


async def test_a_stream_in_which_nothing_happens_has_heartbeats() -> None:
    sent: asyncio.Queue[Message] = asyncio.Queue()
    async with InMemoryLightningStore() as store, asyncio.timeout(DEADLINE_S):
        run_id = (await store.create_run("quiet", {})).id
        gone = asyncio.Event()

        async def receive() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        stream = RunEvents(store, run_id, (0, 0), asyncio.Event(), heartbeat_s=0.01)
        serving = asyncio.create_task(stream({"type": "http"}, receive, sent.put))
        assert (await sent.get())["status"] == 200
        assert [(await sent.get())["body"] for _ in range(2)] == [b": heartbeat\n\n"] * 2
        gone.set()
        await serving


@pytest.mark.parametrize(
    ("query", "status", "said"),
    [
        ("", 422, "run_id: is required"),
        ("run_id=nowhere", 404, "no such run: nowhere"),
        ("run_id=r&after=now", 422, "after: expected the id of an event (0.0 for the beginning), got 'now'"),
    ],
)
async def test_a_stream_of_nothing_is_refused(server: AgentLightningServer, query: str, status: int, said: str) -> None:
    async with http(server) as client:
        reply = await client.get(f"/events?{query}")
    assert (reply.status_code, reply.json()["error"]["message"]) == (status, said)


async def test_a_readers_token_opens_the_views_of_its_run_alone(
    server: AgentLightningServer, store: LightningStoreClient
) -> None:
    mine, other = [(await store.create_run(name, {})).id for name in ("mine", "other")]
    [rollout_id] = await finish_rollouts(store, mine, 1, step=4)
    await finish_rollouts(store, other, 1)
    await store.log_metrics([Metric(run_id=mine, step=step, name="a/b", value=step) for step in range(8)])
    made = await store.create_token("reader", "reader", mine)
    async with http(server, made.secret) as client:
        page = (await client.get("/summaries", params={"where": "step > 2 and state = 'failed'"})).json()
        assert [row["id"] for row in page["rows"]] == [rollout_id]
        assert page["next"] is None
        series = (await client.get(f"/runs/{mine}/series", params={"name": ["a/b"], "max_points": 4})).json()
        assert [point["value"] for point in series["a/b"]] == [1.0, 3.0, 5.0, 7.0]
        for path in (f"/summaries?run_id={other}", f"/runs/{other}/series", f"/events?run_id={other}"):
            assert (await client.get(path)).status_code == 403, path
        wrong = await client.get("/summaries", params={"where": "rewrad < 1"})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (422, "InputError")
