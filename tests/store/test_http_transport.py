"""Requests are executed once though connections break, and travel together or compressed where that pays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from store_samples import Clock, Server, a_call, a_run, a_span, a_worker, claimed, ending, some, sql_store

from agentlightning.errors import InputError, NotFoundError, StoreError
from agentlightning.records import Metric, Resource
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.client import LightningStoreClient


class Relay:
    """Between client and server: passes requests on, and hangs up instead of passing on some of the answers."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.requests: list[bytes] = []
        self.answers: list[bytes] = []
        self.loses = 0
        """So many of the next answers."""
        self.loses_at = -1
        """The answer to the request of this number."""

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, away = await asyncio.open_connection("127.0.0.1", self._to)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                request = await message(reader)
                lost = len(self.requests) == self.loses_at
                self.requests.append(request)
                away.write(request)
                self.answers.append(await message(there))
                if lost or self.loses:
                    self.loses -= not lost
                    break
                writer.write(self.answers[-1])
        away.close()
        writer.close()

    def verbs(self) -> list[str]:
        """Of the requests, in their order."""
        return [request.split(b" ", 2)[1].decode().rpartition("/")[2] for request in self.requests]


async def message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
    return head + await reader.readexactly(int(fields.get(b"content-length", 0)))


@pytest.fixture
async def store() -> LightningStore:
    return sql_store("memory://", Clock())


@pytest.fixture
async def relay(store: LightningStore) -> AsyncIterator[Relay]:
    async with Server(store) as server, Relay(server.port) as between:
        yield between


@pytest.fixture
async def client(relay: Relay) -> AsyncIterator[LightningStoreClient]:
    async with LightningStoreClient(relay.url) as client:
        yield client


async def a_record(client: LightningStoreClient) -> int:
    [claim] = await claimed(client)
    await asyncio.gather(client.append_calls([a_call(claim)]), client.append_spans([a_span(claim)]))
    ids = [claim.rollout.id]
    return len(await client.calls(ids)) + len(await client.spans(ids))


async def a_metric(client: LightningStoreClient) -> int:
    run_id = await a_run(client)
    await client.log_metrics([Metric(run_id=run_id, name="loss", step=1, value=0.5)])
    return 1 + len(await client.metrics(run_id))


async def a_version(client: LightningStoreClient) -> int:
    [resource] = await client.put_resources([Resource(run_id=await a_run(client), name="p", kind="policy", value={})])
    return 1 + resource.version


async def a_rollout(client: LightningStoreClient) -> int:
    [claim] = await claimed(client)
    assert await client.finish([ending(claim)]) == [True]
    assert await client.finish([ending(claim)]) == [False]  # a request of its own, and no longer held
    return sum((await client.count(claim.rollout.run_id)).values()) + claim.lease.attempt


@pytest.mark.parametrize("write", [a_record, a_metric, a_version, a_rollout])
async def test_nothing_is_written_twice_whichever_answer_is_lost(
    relay: Relay, client: LightningStoreClient, write: Callable[[LightningStoreClient], Awaitable[int]]
) -> None:
    expected = await write(client)
    asked = len(relay.requests)
    for lost in range(asked):
        relay.requests.clear()
        relay.loses_at = lost
        assert await write(client) == expected
        assert len(relay.requests) == asked + 1


async def test_small_requests_of_one_turn_travel_together_with_an_answer_each(
    relay: Relay, client: LightningStoreClient
) -> None:
    run_id = await a_run(client)
    await client.enqueue(some(run_id, 3))
    relay.requests.clear()
    said: list[Any] = await asyncio.gather(
        client.claim(a_worker(run_id, "w1")),
        client.claim(a_worker("nowhere")),
        client.claim(a_worker(run_id, "w2"), limit=2),
        return_exceptions=True,
    )
    assert relay.verbs() == ["batch"]
    assert [len(said[0]), len(said[2])] == [1, 2]
    assert isinstance(said[1], NotFoundError)


async def test_requests_that_travelled_together_are_executed_once(relay: Relay, client: LightningStoreClient) -> None:
    run_id = await a_run(client)
    relay.loses = 1
    await asyncio.gather(*[client.enqueue(some(run_id, 1, group_id=str(number))) for number in range(5)])
    assert relay.verbs()[1:] == ["batch", "batch"]
    assert len(await client.rollouts(RolloutQuery(run_id=run_id))) == 5


async def test_a_caller_that_is_cancelled_takes_nobody_along(client: LightningStoreClient) -> None:
    run_id = await a_run(client)
    asked = [asyncio.ensure_future(client.enqueue(some(run_id, 1, group_id=str(number)))) for number in range(3)]
    await asyncio.sleep(0)  # each has asked, and nothing is sent yet
    asked[0].cancel()
    assert [len(await one) for one in asked[1:]] == [1, 1]
    assert len(await client.enqueue(some(run_id, 1))) == 1


async def test_a_request_that_waits_travels_alone(relay: Relay, client: LightningStoreClient) -> None:
    run_id = await a_run(client)
    await client.enqueue(some(run_id, 2))
    relay.requests.clear()
    await asyncio.gather(*[client.claim(a_worker(run_id, f"w{number}"), wait_s=5) for number in range(2)])
    assert relay.verbs() == ["claim", "claim"]


async def test_requests_that_travel_together_may_not_wait_and_must_be_methods(client: LightningStoreClient) -> None:
    for entries, error in (
        ([("nothing", "", {})], NotFoundError),
        ([("wait", "", {"run_id": "r", "timeout_s": 5})], InputError),
        ([("wait", "")], InputError),
    ):
        with pytest.raises(error):
            await client._send("batch", msgspec.msgpack.encode(entries))


async def test_only_the_appends_that_are_at_fault_fail(relay: Relay, client: LightningStoreClient) -> None:
    [claim] = await claimed(client)
    relay.requests.clear()
    good = [a_span(claim) for _ in range(4)]
    bad = replace(a_span(claim), attempt=7)
    outcomes = await asyncio.gather(
        *[client.append_spans([span]) for span in (*good[:2], bad, *good[2:])], return_exceptions=True
    )
    assert [type(one) for one in outcomes] == [type(None), type(None), NotFoundError, type(None), type(None)]
    assert relay.verbs()[0] == "append_spans"
    assert len(await client.spans([claim.rollout.id])) == 4


async def test_an_error_that_is_nobodys_in_particular_is_everybodys(
    relay: Relay, client: LightningStoreClient, store: LightningStore
) -> None:
    [claim] = await claimed(client)
    await store.close()
    relay.requests.clear()
    outcomes = await asyncio.gather(*[client.append_spans([a_span(claim)]) for _ in range(4)], return_exceptions=True)
    assert all(type(one) is StoreError for one in outcomes)
    assert relay.verbs() == ["append_spans"]
