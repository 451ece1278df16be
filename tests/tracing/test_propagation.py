"""Requests to the gateway carry their context, whatever library sends them; no others do."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import httpx
import httpx2
import pytest
import requests
from calls_noted import CallsNoted, serve
from opentelemetry import baggage, context
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.gateway.asgi_response import baggage_agent, parent_span
from agentlightning.tracing.frameworks import use_agent
from agentlightning.tracing.propagation import ContextPropagator, context_headers


@pytest.fixture
async def noted() -> AsyncIterator[CallsNoted]:
    async with serve() as calls:
        within = ContextPropagator(calls.url)
        within.install()
        yield calls
        within.remove()


async def by_httpx(url: str, headers: dict[str, str]) -> None:
    async with httpx.AsyncClient(timeout=60) as client:
        await client.post(url, json={}, headers=headers)


async def by_httpx2_streamed(url: str, headers: dict[str, str]) -> None:
    async with httpx2.AsyncClient() as client, client.stream("POST", url, json={}, headers=headers) as reply:
        await reply.aread()


async def by_aiohttp_with_a_base(url: str, headers: dict[str, str]) -> None:
    base, _, path = url.partition("/v1/")
    async with aiohttp.ClientSession(base) as session, session.post(f"/v1/{path}", json={}, headers=headers) as reply:
        await reply.read()


def by_synchronous_httpx(url: str, headers: dict[str, str]) -> None:
    with httpx.Client(timeout=60) as client:
        client.post(url, json={}, headers=headers)


def by_requests(url: str, headers: dict[str, str]) -> None:
    with requests.Session() as session:
        session.post(url, json={}, headers=headers)


def by_urllib(url: str, headers: dict[str, str]) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, data=b"{}", headers=headers)) as reply:
        reply.read()


PATH = "/v1/chat/completions"


@pytest.mark.parametrize(
    "library", [by_httpx, by_httpx2_streamed, by_aiohttp_with_a_base, by_synchronous_httpx, by_requests, by_urllib]
)
async def test_every_library_names_the_agent_and_the_span_to_the_gateway_alone(
    noted: CallsNoted, library: Callable[..., Any]
) -> None:
    async def send(url: str, headers: dict[str, str]) -> None:
        await (
            library(url, headers) if inspect.iscoroutinefunction(library) else asyncio.to_thread(library, url, headers)
        )

    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("agent")
    async with serve() as other:
        with use_agent("writer"), tracer.start_as_current_span("step") as span:
            await send(noted.url + PATH, {})
            await send(noted.url + PATH, {"X-AGL-Agent": "judge"})  # what an agent says of itself stays
            await send(other.url + PATH, {})
    first, second = noted.headers
    assert (first["x-agl-agent"], second.getall("x-agl-agent")) == ("writer", ["judge"])  # type: ignore[attr-defined]
    span_id = f"{span.get_span_context().span_id:016x}"
    assert parent_span(first["traceparent"].encode(), "r", 1) == f"r.1.{span_id}"
    assert "x-agl-agent" not in other.headers[0]


async def test_what_a_session_of_aiohttp_says_of_the_agent_stays_and_so_do_headers_that_come_twice(
    noted: CallsNoted,
) -> None:
    twice = [("x-tag", "a"), ("x-tag", "b")]
    async with aiohttp.ClientSession(headers={"X-AGL-Agent": "judge"}) as session:
        with use_agent("writer"):
            async with session.post(noted.url + PATH, json={}, headers=twice) as reply:
                await reply.read()
    [headers] = noted.headers
    assert headers.getall("x-agl-agent") == ["judge"]  # type: ignore[attr-defined]
    assert headers.getall("x-tag") == ["a", "b"]  # type: ignore[attr-defined]


async def test_a_name_that_no_header_can_carry_travels_in_baggage(noted: CallsNoted) -> None:
    with use_agent("Prüfer, 检查员"):
        await by_httpx(noted.url + PATH, {})
    assert "x-agl-agent" not in noted.headers[0]
    assert baggage_agent(noted.headers[0]["baggage"].encode()) == "Prüfer, 检查员"
    token = context.attach(baggage.set_baggage("user", "Zoë"))  # the agent's own goes along
    try:
        with use_agent("é"):
            assert context_headers() == {"baggage": "agl.agent=%C3%A9,user=Zo%C3%AB"}
    finally:
        context.detach(token)


async def test_nothing_is_left_behind_once_it_is_removed() -> None:
    before = [httpx.AsyncClient.send, httpx2.Client.send, aiohttp.ClientSession._request, list(sys.meta_path)]
    within = ContextPropagator("http://127.0.0.1:1")
    within.install()
    assert httpx.AsyncClient.send is not before[0]
    within.remove()
    assert before == [httpx.AsyncClient.send, httpx2.Client.send, aiohttp.ClientSession._request, list(sys.meta_path)]


LATER = """
import importlib.util, sys
from agentlightning.tracing.propagation import ContextPropagator
from agentlightning.tracing.frameworks import use_agent

assert not {"httpx", "requests", "opentelemetry"} & set(sys.modules), "it is light"
ContextPropagator("http://127.0.0.1:1").install()
assert importlib.util.find_spec("httpx") is not None  # asking whether it is there does not use the hook up
assert "httpx" not in sys.modules
import httpx

def answer(request):
    print(request.headers.get("x-agl-agent"))
    return httpx.Response(200)

with use_agent("writer"):
    httpx.Client(transport=httpx.MockTransport(answer)).get("http://127.0.0.1:1/v1/models")
"""


def test_a_library_that_is_imported_later_is_reached_and_none_is_imported_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("writer\n", 0), done.stderr
