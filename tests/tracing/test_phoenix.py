"""Traces of a run in a real Phoenix, as its own interface tells of them; `make test-phoenix` installs it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from test_exporters import FIRST, ROLLOUT, a_call, a_span

import build
from agentlightning.tracing.exporters import OtlpHttpExporter, resource_of, trace_of

PHOENIX = Path(__file__).parents[2] / ".venv-phoenix" / "bin" / "phoenix"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PHOENIX.exists(), reason="needs .venv-phoenix: make test-phoenix installs it"),
]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
async def phoenix(tmp_path: Path) -> AsyncIterator[str]:
    web, grpc = free_ports(2)
    settings = {"PHOENIX_PORT": str(web), "PHOENIX_GRPC_PORT": str(grpc), "PHOENIX_WORKING_DIR": str(tmp_path)}
    environment = os.environ | settings | {"PHOENIX_TELEMETRY_ENABLED": "false"}
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(PHOENIX, "serve", env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{web}"
    await until(lambda: get(f"{url}/v1/projects"))
    yield url
    process.terminate()
    await process.wait()


async def get(url: str) -> Any:
    """The answer; None where there is none yet."""
    async with aiohttp.ClientSession() as session:
        try:
            async with session.get(url) as response:
                return (await response.json())["data"] if response.status == 200 else None
        except aiohttp.ClientError:
            return None


async def until(look: Any) -> Any:
    async with asyncio.timeout(120):
        while not (found := await look()):  # noqa: ASYNC110  # another program's doing, which tells nobody
            await asyncio.sleep(0.2)
    return found


async def test_a_rollout_is_one_trace_however_often_it_is_sent(phoenix: str) -> None:
    trace = trace_of(
        ROLLOUT,
        [a_call("c1"), a_call("c2", parent_id="c1", span_id=f"0189.2.{FIRST}", agent="writer")],
        [a_span(FIRST, attributes={"openinference.span.kind": "TOOL", "deep": {"list": [1, None]}})],
        [build.reward(ROLLOUT, 0.5)],
    )
    async with OtlpHttpExporter(f"{phoenix}/v1/traces", {}) as exporter:
        await exporter.send(trace, resource_of("my run"))
        await exporter.send(trace, resource_of("my run"))
    where = f"{phoenix}/v1/projects/my%20run/spans?limit=50"
    await until(lambda: has(where, len(trace)))
    spans = {span["name"] + span["attributes"].get("agl.call_id", ""): span for span in await get(where)}
    assert set(spans) == {"rollout", "chat tinyc1", "chat tinyc2", "tool"}
    assert len({span["context"]["trace_id"] for span in spans.values()}) == 1
    assert [spans[name]["span_kind"] for name in ("rollout", "chat tinyc1", "tool")] == ["AGENT", "LLM", "TOOL"]
    assert spans["chat tinyc2"]["parent_id"] == spans["tool"]["context"]["span_id"]
    assert spans["rollout"]["attributes"]["agl.reward"] == 0.5
    assert spans["chat tinyc1"]["attributes"]["llm.token_count.total"] == 3


async def has(where: str, count: int) -> bool:
    return len(await get(where) or ()) >= count
