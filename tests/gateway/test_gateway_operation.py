"""Operation: numbers and logs, clients that hold connections, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_house import SERVER_KEY, House, path
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess

import build
from agentlightning.gateway import log
from agentlightning.gateway.metrics import MAX_POLICIES, GatewayMetrics
from agentlightning.gateway.uvicorn_server import UvicornServer
from agentlightning.records import ABANDONED, Call
from agentlightning.runtime.children import listen
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.open import open_store

HI = {"messages": [{"role": "user", "content": "hi"}]}

CLOSES_S = 50.0
"""For a connection that the server closes soon; one that it forgot would stay for `uvicorn_server.IDLE_S`."""


# --- metrics ----------------------------------------------------------------------------------------------------------


def a_call(**changes: Any) -> Call:
    given: dict[str, Any] = {"id": "c", "suffix_ids": [1, 2], "sampled_ids": [3, 4, 5], "finish_reason": "stop"}
    return build.call(**{**given, **changes})


def values(text: bytes | str) -> dict[str, float]:
    """Every sample of an exposition by its name and labels."""
    text = text.decode() if isinstance(text, bytes) else text
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket"))
    }


def test_calls_forks_and_failures_are_counted() -> None:
    metrics = GatewayMetrics()
    metrics.record(a_call())
    metrics.record(a_call(id="c.1"))  # a further choice adds its tokens only
    metrics.record(a_call(fork_cause="history_cut", untrained_tokens=40))
    metrics.record(a_call(finish_reason="abandoned"))
    metrics.call("messages", "refused")
    metrics.external("judge", "failed")
    metrics.first_token.observe(0.1)
    seen = values(metrics.text())
    for name, value in {
        "agl_calls_total[('protocol', 'chat'), ('result', 'recorded')]": 2,
        "agl_calls_total[('protocol', 'chat'), ('result', 'abandoned')]": 1,
        "agl_calls_total[('protocol', 'messages'), ('result', 'refused')]": 1,
        "agl_prompt_tokens_total[]": 6,
        "agl_sampled_tokens_total[]": 12,
        "agl_forks_total[('cause', 'history_cut')]": 1,
        "agl_untrained_tokens_total[]": 40,
        "agl_external_calls_total[('model', 'judge'), ('result', 'failed')]": 1,
        "agl_first_token_seconds_count[]": 1,
    }.items():
        assert seen[name] == value, name


def test_versions_of_old_runs_are_shown_no_longer() -> None:
    metrics = GatewayMetrics()
    for number in range(MAX_POLICIES + 5):
        metrics.record(a_call(run_id=f"run-{number}"))
    shown = [name for name in values(metrics.text()) if name.startswith("agl_policy_version")]
    assert len(shown) == MAX_POLICIES
    assert not any("'run-0'" in name for name in shown)


async def test_the_server_shows_what_it_did(house: House) -> None:
    claim, http = await house.claim(), house.http()
    headers = {"authorization": f"Bearer {claim.key}"}
    assert (await http.post("/v1/chat/completions", json=HI, headers=headers)).status_code == 200
    assert (await http.post("/v1/chat/completions", json={"messages": 3}, headers=headers)).status_code == 400
    seen = values(await house.metrics())
    assert seen["agl_calls_total[('protocol', 'chat'), ('result', 'recorded')]"] == 1
    assert seen["agl_calls_total[('protocol', 'chat'), ('result', 'refused')]"] == 1
    assert seen["agl_calls_in_flight[]"] == 0
    assert seen["agl_sampled_tokens_total[]"] > 0


# --- logs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def said() -> Iterator[io.StringIO]:
    """What the process's log says, set up as the server process does it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    out = io.StringIO()
    log.configure("debug", ["the-server-key"], out)
    yield out
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("agentlightning").setLevel(logging.NOTSET)
    logging.getLogger("uvicorn").setLevel(logging.NOTSET)


def lines(said: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said.getvalue().splitlines()]


def test_every_event_is_a_line_of_json(said: io.StringIO) -> None:
    logging.getLogger("agentlightning.gateway").warning("engine %s is\naway", "a")
    logging.getLogger("uvicorn.error").error("broken")
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("agentlightning.store").exception("failed")
    first, second, third = lines(said)
    assert first["event"] == "engine a is\naway"
    assert first["level"] == "warning"
    assert first["logger"] == "agentlightning.gateway"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", first["timestamp"])
    assert second["logger"] == "uvicorn.error"
    assert "ValueError: why" in third["exception"]


async def test_what_a_request_causes_carries_its_rollout_and_attempt(said: io.StringIO, house: House) -> None:
    claim = await house.claim()
    http = house.http()
    house.engine.raw = "nonsense"
    key = {"authorization": f"Bearer {claim.key}"}
    await asyncio.create_task(http.post("/v1/chat/completions", json=HI, headers=key))  # as servers do: a task each
    await asyncio.create_task(http.post(f"{path(claim)}/v1/nothing", json=HI))
    logging.getLogger("agentlightning.gateway").info("nobody's")
    caused, other = lines(said)[:-1], lines(said)[-1]
    assert caused
    assert all((one["rollout"], one["attempt"]) == (claim.rollout.id, 1) for one in caused)
    assert "rollout" not in other


def test_keys_are_crossed_out_wherever_they_come_from(said: io.StringIO) -> None:
    logger = logging.getLogger("agentlightning.gateway")
    logger.warning("GET /v1/models?key=%s", "sk-agl-AbC123_-xyz")
    logger.warning("the-server-key", extra={"header": "Bearer abc.def-123"})
    try:
        raise ValueError("sk-ant-api03-000000")
    except ValueError:
        logger.exception("failed")
    for secret in ("sk-agl-AbC", "the-server-key", "abc.def", "sk-ant"):
        assert secret not in said.getvalue()
    assert said.getvalue().count("[key]") >= 4


# --- connections ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def listening(house: House, **settings: Any) -> AsyncIterator[tuple[str, int, UvicornServer]]:
    """The house's gateway behind a real socket."""
    listener, started = listen("127.0.0.1", 0), asyncio.Event()
    server = UvicornServer(house.gateway(), started=started.set, **settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await started.wait()
    try:
        yield "127.0.0.1", listener.getsockname()[1], server
    finally:
        server.should_exit = True
        await serving


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /healthz HT",
        b"POST /r/x/1/v1/chat/completions HTTP/1.1\r\nhost: x\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /he",
    ],
)
async def test_a_client_that_does_not_finish_its_head_is_disconnected(house: House, begun: bytes) -> None:
    async with listening(house, head_timeout_s=0.1) as (host, port, _):
        for size in (1, max(1, len(begun))):  # byte for byte, and in one packet
            reader, writer = await asyncio.open_connection(host, port)
            for start in range(0, len(begun), size):
                writer.write(begun[start : start + size])
            await asyncio.wait_for(reader.read(), CLOSES_S)  # to the end: the server closed
            writer.close()


async def test_a_head_without_end_ends_the_connection(house: House) -> None:
    async with listening(house) as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        ended = asyncio.create_task(reader.read())
        writer.write(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            while not ended.done():
                writer.write(b"x-filler: " + b"y" * 8000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
            assert ended.result()[:12] in (b"", b"HTTP/1.1 400")
        writer.close()


async def test_a_refused_body_is_not_read_for_ever(house: House) -> None:
    async with listening(house, head_timeout_s=0.1) as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")

        async def feed() -> None:
            while True:
                writer.write(b"x" * 1000)
                await asyncio.sleep(0.01)

        feeding = asyncio.create_task(feed())
        said = b""
        try:
            while part := await asyncio.wait_for(reader.read(1000), CLOSES_S):
                said += part
        except ConnectionError:
            pass
        feeding.cancel()
        assert said.startswith(b"HTTP/1.1 401")
        writer.close()


# --- the end ----------------------------------------------------------------------------------------------------------


async def begin_stream(http: httpx.AsyncClient, url: str, key: str) -> tuple[httpx.Response, AsyncIterator[str]]:
    request = http.build_request("POST", url, json={**HI, "stream": True}, headers={"authorization": f"Bearer {key}"})
    response = await http.send(request, stream=True)
    events = response.aiter_lines()
    assert (await anext(events)).startswith("data: ")
    return response, events


async def test_a_server_that_is_told_to_end_finishes_its_stream_and_refuses_new_calls(
    tmp_path: Path, house: House
) -> None:
    server = ServerProcess(f"sqlite:///{tmp_path}/agl.db", tmp_path / "log", key=SERVER_KEY).start()
    house.engine.gate = asyncio.Event()
    try:
        async with (
            LightningStoreClient(server.url, SERVER_KEY) as store,
            httpx.AsyncClient(base_url=server.url, timeout=60) as http,
        ):
            remote = House(store, house.engine, house.renderer, house.folder)
            remote.run_id = (await store.create_run("ending", {})).id
            await remote.serve_policy()
            claim = await remote.claim()
            response, events = await begin_stream(http, "/v1/chat/completions", claim.key)
            server.signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                while (refused := await http.post(f"{path(claim)}/v1/messages", json=HI)).status_code != 503:
                    pass
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["type"] == "error"
            assert (await http.get("/readyz")).status_code == 503
            assert [call.id for call in await store.calls([claim.rollout.id])] == []
            house.engine.gate.set()
            rest = [line async for line in events]
            assert rest[-2:] == ["data: [DONE]", ""]
            await response.aclose()
        assert server.end() == 0
    finally:
        house.engine.gate.set()
        server.close()
    async with open_store(f"sqlite:///{tmp_path}/agl.db") as store:
        (call,) = await store.calls([claim.rollout.id])
        assert call.finish_reason == "stop"


async def test_idle_connections_do_not_hold_up_the_end(house: House) -> None:
    async with listening(house) as (host, port, server):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        server.should_exit = True
        await asyncio.wait_for(reader.read(), CLOSES_S)
        writer.close()


async def test_calls_that_take_longer_than_the_grace_period_are_ended(house: House) -> None:
    house.engine.gate = asyncio.Event()
    claim = await house.claim()
    async with listening(house, grace_s=0.2) as (host, port, server), httpx.AsyncClient(timeout=60) as http:
        url = f"http://{host}:{port}/v1/chat/completions"
        _, events = await begin_stream(http, url, claim.key)
        server.should_exit = True
        with pytest.raises(httpx.TransportError):
            _ = [line async for line in events]
        house.engine.gate.set()
    [call] = await house.store.calls([claim.rollout.id])
    assert (call.finish_reason, len(call.sampled_ids)) == (ABANDONED, house.engine.chunk)
