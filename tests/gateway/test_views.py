"""The views of summaries and series, over a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from agentlightning.gateway.server import AgentLightningServer
from agentlightning.records import Finish, Metric, NewRollout, WorkerStatus
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient

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
        for path in (f"/summaries?run_id={other}", f"/runs/{other}/series"):
            assert (await client.get(path)).status_code == 403, path
        wrong = await client.get("/summaries", params={"where": "rewrad < 1"})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (422, "InputError")
