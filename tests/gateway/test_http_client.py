"""Servers that answer with something else than one response, and what the client makes of it."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress

import pytest

from agentlightning.errors import EngineError
from agentlightning.gateway.http_client import (
    MAX_BODY_BYTES,
    MAX_DECOMPRESSED,
    MAX_HEAD_BYTES,
    MAX_IDLE_CLOSE_S,
    HttpClient,
    HttpResponse,
    _Origin,
)

OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def server(respond: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """A server that responds so to every request without a body; yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                await respond(writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    serving: set[asyncio.Task[None] | None] = set()
    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with asyncio.timeout(30):
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/"
        listening.close()
        await asyncio.gather(*(task for task in serving if task is not None))


def saying(data: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    async def respond(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return respond


@asynccontextmanager
async def a_client() -> AsyncIterator[HttpClient]:
    client = HttpClient(5)
    yield client
    await client.close()


async def ask(client: HttpClient, url: str) -> tuple[int, bytes]:
    async with await client.post(url, {}, b"") as response:
        return response.status, await response.read()


def sized(body: bytes, headers: bytes = b"") -> bytes:
    return OK + headers + b"content-length: %d\r\n\r\n" % len(body) + body


async def test_a_second_response_in_the_same_packet_is_no_part_of_the_first() -> None:
    answer = sized(b"hi") + b"HTTP/1.1 500 No\r\ncontent-length: 3\r\n\r\nbad"
    async with server(saying(answer)) as url, a_client() as client:
        assert [await ask(client, url) for _ in range(3)] == [(200, b"hi")] * 3


async def test_what_comes_without_a_request_is_not_the_response_to_the_next() -> None:
    said = asyncio.Event()

    async def respond(writer: asyncio.StreamWriter) -> None:
        writer.write(sized(b"hi"))
        await writer.drain()
        await said.wait()
        writer.write(sized(b"another's"))

    async with server(respond) as url, a_client() as client:
        assert await ask(client, url) == (200, b"hi")
        [idle] = client._idle.values()
        said.set()
        while not idle[0].transport.is_closing():
            await asyncio.to_thread(int)
        assert await ask(client, url) == (200, b"hi")


GZIP = b"content-encoding: gzip\r\n"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: h2\r\n\r\nx", "not HTTP"),
        (b"no\r\n\r\n", "not HTTP"),
        (sized(gzip.compress(b"hello " * 100)[:-9], GZIP), "ends early"),
        (OK + b"x-filler: aaaaaaaaaaaaaaaaaaa\r\n" * MAX_HEAD_BYTES, "bytes of headers"),
    ],
    ids=["101", "no", "half", "head"],
)
async def test_what_is_no_response_is_an_oserror(answer: bytes, said: str) -> None:
    async with server(saying(answer)) as url, a_client() as client:
        with pytest.raises(OSError, match=said):
            await ask(client, url)


async def test_a_url_that_leads_nowhere_is_an_oserror() -> None:
    async with a_client() as client:
        for url in ("http://a..b/", "http://" + "a" * 64 + "/", "http://[::1/", "ftp://a/", "http://a:x/"):
            with pytest.raises(OSError, match="URL"):
                await ask(client, url)


async def test_a_compressed_body_is_handed_on_in_parts_of_a_bounded_size() -> None:
    plain = bytes(range(256)) * 40_000 + b"\0" * 5_000_001
    packed = gzip.compress(plain) + gzip.compress(b"two, ") + b"\0\0\0"  # several members
    async with (
        server(saying(sized(packed, GZIP))) as url,
        a_client() as client,
        await client.post(url, {}, b"") as response,
    ):
        parts = [part async for part in response.chunks()]
    assert b"".join(parts) == plain + b"two, "
    assert max(map(len, parts)) <= MAX_DECOMPRESSED


async def test_a_body_that_is_too_large_to_be_read_as_a_whole_is_an_engine_error() -> None:
    packed = gzip.compress(bytes(MAX_BODY_BYTES + 1))
    async with server(saying(sized(packed, GZIP))) as url, a_client() as client:
        with pytest.raises(EngineError, match=f"larger than {MAX_BODY_BYTES} bytes"):
            await ask(client, url)


OK_BODY = sized(b"hi")


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ([OK_BODY, "abort", OK_BODY], 3),  # as if it had been idle too long: sent once more on a new connection
        ([OK_BODY, "abort later"], 2),  # the server may have worked on it
        (["abort"], 1),
        ([OK_BODY, OK_BODY[:10]], 2),  # closed within a response
    ],
)
async def test_a_request_is_sent_once_more_only_where_its_connection_was_just_closed(
    answers: list[bytes | str], asked: int
) -> None:
    seen: list[bytes | str] = []

    async def respond(writer: asyncio.StreamWriter) -> None:
        seen.append(answer := answers[len(seen)])
        if answer == "abort":
            writer.transport.abort()
        elif answer == "abort later":
            asyncio.get_running_loop().call_later(2 * MAX_IDLE_CLOSE_S, writer.transport.abort)
        elif isinstance(answer, bytes):
            await saying(answer)(writer)
            if answer != OK_BODY:
                writer.transport.close()

    async with server(respond) as url, a_client() as client:
        with nullcontext() if answers[-1] == OK_BODY else pytest.raises(ConnectionError):
            assert [await ask(client, url) for _ in range(2)] == [(200, b"hi")] * 2
        assert len(seen) == asked


async def test_a_connection_that_is_lost_before_there_is_a_request_is_an_oserror() -> None:
    async with a_client() as client:
        connection = HttpResponse(client, _Origin("127.0.0.1", 1, False), asyncio.get_running_loop())
        connection.connection_lost(None)
        with pytest.raises(OSError, match="closed"):
            await connection.wait()
