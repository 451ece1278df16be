"""Connections that one client holds keep nobody else out: real sockets, a lowered limit."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from gateway_house import House

from agentlightning.gateway.server_settings import ServerSettings
from agentlightning.gateway.uvicorn_server import UvicornServer
from agentlightning.runtime.children import listen

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
WAIT_S = 20.0


@asynccontextmanager
async def listening(app: Any, **settings: Any) -> AsyncIterator[tuple[str, int]]:
    listener, started = listen("127.0.0.1", 0), asyncio.Event()
    server = UvicornServer(app, started=started.set, **settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await started.wait()
    try:
        yield "127.0.0.1", listener.getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def healthy(place: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which a request was answered."""
    reader, writer = await asyncio.open_connection(*place)
    await again(reader, writer)
    return reader, writer


async def again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEALTH)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
    assert head.startswith(b"HTTP/1.1 200"), head
    await reader.readexactly(15)


async def open_many(place: tuple[str, int], count: int, begun: bytes) -> list[socket.socket]:
    held = []
    for _ in range(count):
        one = socket.create_connection(place)
        one.sendall(begun)
        held.append(one)
        await asyncio.sleep(0)
    return held


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nx-slow: ", HEALTH])
async def test_idle_connections_keep_nobody_out_and_one_in_use_outlives_a_flood_of_them(
    house: House, begun: bytes
) -> None:
    async with listening(house.gateway(), settings=ServerSettings(max_connections=20)) as place:
        reader, writer = await healthy(place)
        held: list[socket.socket] = []
        for _ in range(8):
            held += await open_many(place, 12, begun)
            _, one = await healthy(place)  # the server has taken in all of them
            one.close()
            await again(reader, writer)
        writer.close()
        for one_held in held:
            one_held.close()


class Blocked:
    """An application whose requests are answered, with many bytes, once they are released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.asked = asyncio.Semaphore(0)
        self.ended = asyncio.Semaphore(0)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        self.asked.release()
        await self.released.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        self.ended.release()

    def stop(self) -> None:
        """Nothing is to be refused."""

    async def finished(self) -> None:
        """Nothing is waited for."""


async def test_where_all_connections_are_in_use_a_further_one_is_told_when_to_come_back() -> None:
    app = Blocked()
    async with listening(app, settings=ServerSettings(max_connections=3)) as place:
        busy = [await asyncio.open_connection(*place) for _ in range(3)]
        for _, writer in busy:
            writer.write(HEALTH)
            await asyncio.wait_for(app.asked.acquire(), WAIT_S)
        for _ in range(2):
            reader, writer = await asyncio.open_connection(*place)
            said = await asyncio.wait_for(reader.read(), WAIT_S)
            assert said.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1\r\n" in said
            writer.close()
        app.released.set()
        for reader, writer in busy:
            assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)).startswith(b"HTTP/1.1 200")
            writer.close()


async def test_a_client_that_never_reads_its_response_loses_its_connection() -> None:
    app = Blocked()
    app.released.set()
    async with listening(app, settings=ServerSettings(max_connections=3), write_timeout_s=0.2) as place:
        deaf = socket.create_connection(place)
        deaf.sendall(HEALTH)
        await asyncio.wait_for(
            app.ended.acquire(), WAIT_S
        )  # what is sent to a connection that was lost, is sent nowhere
        deaf.close()


# --- trailers ---------------------------------------------------------------------------------------------------------

CHUNKED = b"POST /healthz HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


class Listing(Blocked):
    """An application that answers with the names of a request's headers, once it has its body."""

    scope: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await super().__call__(scope, receive, send)
            return
        self.scope = scope
        while (await receive()).get("more_body"):
            pass
        names = b",".join(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(names))]})
        await send({"type": "http.response.body", "body": names})


@pytest.mark.parametrize("apart", [False, True])
async def test_a_trailer_is_no_header(apart: bool) -> None:
    async with listening(Listing()) as place:
        reader, writer = await asyncio.open_connection(*place)
        for _ in range(2):  # the connection goes on
            writer.write(CHUNKED + b"2\r\n{}\r\n0\r\n")
            if apart:
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(b"authorization: Bearer sk\r\nexpect: 100-continue\r\n\r\n")
            assert b"content-length: 22\r\n" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
            assert await reader.readexactly(22) == b"host,transfer-encoding"
        writer.close()


@pytest.mark.parametrize(
    ("begun", "more"),
    [
        (b"2\r\n{}\r\n0\r\n", b"x: y\r\n" * 2000),
        (b"0\r\nx: ", b"y" * 10_000),
        (b"0\r\n", b"x" * 10_000),
        (b"2;", b"x" * 10_000),
    ],
    ids=["trailers", "value", "name", "chunk extension"],
)
async def test_what_is_none_of_the_body_has_a_bound(begun: bytes, more: bytes) -> None:
    app = Listing()
    async with listening(app) as place:
        reader, writer = await asyncio.open_connection(*place)
        writer.write(CHUNKED + begun)
        said = asyncio.ensure_future(reader.read())
        sent = 0
        with suppress(ConnectionError):  # closed with unread bytes in it
            while not said.done() and sent < 20_000_000:
                writer.write(more)
                sent += len(more)
                await writer.drain()
        with suppress(ConnectionError):
            assert (await asyncio.wait_for(said, WAIT_S)).startswith(b"HTTP/1.1 400")
        assert sent < 20_000_000
        assert [name for name, _ in app.scope["headers"]] == [b"host", b"transfer-encoding"]
        writer.close()
