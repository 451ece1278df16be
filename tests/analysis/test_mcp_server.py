"""The MCP server as a client in another process sees it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from stored_runs import Earned, add_rollouts, log, record

from agentlightning.analysis.mcp_server import MAX_ANSWER_CHARS, StoreTools, mcp_server
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import InMemoryLightningStore, SqlLightningStore

mcp = pytest.importorskip("mcp")


async def fill(store: LightningStore) -> list[str]:
    await store.create_run("tour", record(algorithm={"group_size": 2}), "run")
    earned = [Earned(group="a", replica=n, reward=float(n), calls=(2, 5000)) for n in range(2)]
    ids = await add_rollouts(store, "run", 1, earned)
    await log(store, "run", {"train/reward_mean": {step: step / 1000 for step in range(1, 901)}})
    return ids


@asynccontextmanager
async def client(store: LightningStore) -> AsyncIterator[Any]:
    async with mcp.Client(mcp_server(store)) as connected:
        yield connected


async def told(connected: Any, tool: str, **arguments: Any) -> Any:
    result = await connected.call_tool(tool, arguments)
    assert not result.is_error, result.content[0].text
    return orjson.loads(result.content[0].text)


@pytest.fixture
async def store() -> AsyncIterator[LightningStore]:
    async with InMemoryLightningStore() as opened:
        yield opened


@pytest.mark.slow
async def test_a_client_starts_it_and_reads_runs_metrics_rollouts_rewards_and_calls(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/agl.db"
    async with SqlLightningStore(url) as opened:
        ids = await fill(opened)
    server = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "agentlightning", "console", "--mcp", "--store", url], cwd=tmp_path
    )
    async with mcp.Client(server, read_timeout_seconds=60) as connected:
        tools = (await connected.list_tools()).tools
        assert {tool.name for tool in tools} == {
            name for name in vars(StoreTools) if name[0] != "_" and name != "store"
        }
        assert all(tool.annotations.read_only_hint and tool.description for tool in tools)
        (run,) = await told(connected, "list_runs")
        assert (run["id"], run["name"], run["state"], run["step"]) == ("run", "tour", "running", 900)
        assert (await told(connected, "get_run", run_id="run"))["rollouts"] == {"train succeeded": 2}
        assert list(await told(connected, "read_metric", run_id="run")) == ["train/reward_mean"]
        assert [one["id"] for one in await told(connected, "list_rollouts", run_id="run")] == ids
        assert (await told(connected, "explain_reward", rollout_id=ids[0]))["lines"][0] == "reward: 0"
        assert (await told(connected, "reward_distribution", run_id="run", step=1))[0]["mean"] == 0.5
        found = await told(connected, "get_rollout", rollout_id=ids[0])
        assert [call["sampled_tokens"] for call in found["calls"]] == [2, 5000]
        assert (await told(connected, "get_call", rollout_id=ids[0], call_id=f"{ids[0]}-0"))["messages"] == (
            '[{"role":"user","content":"question 0"}]'
        )


async def test_metrics_are_thinned(store: LightningStore) -> None:
    await fill(store)
    async with client(store) as connected:
        found = await told(connected, "read_metric", run_id="run", name="train/reward_mean", max_points=10)
    steps = [step for step, _ in found["points"]]
    assert (len(steps), steps[-1]) == (10, 900)
    assert steps == sorted(steps)


async def test_answers_are_bounded_and_a_long_call_is_read_in_parts(store: LightningStore) -> None:
    ids = await fill(store)
    call = f"{ids[0]}-1"
    async with client(store) as connected:
        shown = await told(connected, "get_rollout", rollout_id=ids[0])
        assert shown["calls"][1]["completion"]["content"].endswith("… (25009 characters)")
        text, offset = "", 0
        while offset is not None:
            arguments = {"rollout_id": ids[0], "call_id": call, "part": "completion", "offset": offset}
            result = await connected.call_tool("get_call", arguments)
            assert len(result.content[0].text) <= MAX_ANSWER_CHARS
            part = orjson.loads(result.content[0].text)
            text, offset = text + part["completion"], part["next"]
    assert orjson.loads(text)["content"].count("word") == 5000


async def test_what_is_not_there_is_said_and_what_is_too_much_is_refused(store: LightningStore) -> None:
    await fill(store)
    async with client(store) as connected:
        missing = await connected.call_tool("get_run", {"run_id": "none"})
        assert missing.is_error
        assert missing.content[0].text.endswith("none: no such run; see: agl runs list")
        assert (await connected.call_tool("list_runs", {"limit": 1000})).is_error
