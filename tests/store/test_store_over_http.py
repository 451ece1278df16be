"""The API and its client: errors, keys, restarts, bad input, hooks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from store_samples import Clock, Server, a_run, a_worker, claimed, ending, new_id, some, sql_store

from agentlightning.errors import ConfigError, StoreError
from agentlightning.gateway.store_rpc import ApiHooks
from agentlightning.records import Lease, Resource
from agentlightning.store.base import LightningStore
from agentlightning.store.client import LightningStoreClient
from agentlightning.store.wire import METHODS

StoreResponse = tuple[int, Any]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server(sql_store("memory://", Clock()), server_key="secret") as running:
        yield running


async def ask(server: Server, method: str, path: str, key: str | None = "secret", **body: Any) -> StoreResponse:
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, server.url + path, headers=headers, **body) as response,
    ):
        assert response.headers["x-agl-boot"]
        return response.status, await response.json()


@pytest.mark.parametrize("key", [None, "wrong", "sécret"])
async def test_without_the_server_key_nothing_is_answered(server: Server, key: str | None) -> None:
    status, answer = await ask(server, "GET", "/api/runs", key=key)
    assert (status, answer["error"]["type"]) == (401, "ConfigError")
    assert (await ask(server, "POST", "/api/runs", key=key, json={}))[0] == 401


async def test_the_signing_secret_is_given_to_holders_of_the_server_key_alone(server: Server) -> None:
    async with LightningStoreClient(server.url, "secret") as client, LightningStoreClient(server.url, "wrong") as other:
        assert len(await client.signing_secret()) == 32
        with pytest.raises(ConfigError, match="server key"):
            await other.signing_secret()


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/api/claim", {"json": {}}, "worker: is required"),
        ("/api/claim", {"json": {"worker": {"id": "w"}}}, "worker.run_id: is required"),
        ("/api/wait", {"json": {"run_id": "r", "at_lest": 3}}, "at_lest: there is no such field"),
        ("/api/wait", {"json": {"run_id": "r", "after": "x"}}, "after: expected an integer, got str"),
        ("/api/enqueue", {"json": {"rollouts": [{"run_id": "r", "task": 3, "group_id": "g"}]}}, "rollouts[0].task: "),
        ("/api/runs", {"data": "{", "headers": {}}, ""),
    ],
)
async def test_bad_input_names_the_field(server: Server, path: str, body: dict[str, Any], said: str) -> None:
    body.pop("headers", None)
    status, answer = await ask(server, "POST", path, **body)
    assert (status, answer["error"]["type"]) == (422, "InputError")
    assert answer["error"]["message"].startswith(said)
    assert "\n" not in answer["error"]["message"]


async def test_unknown_routes_and_things_are_404_in_the_same_shape(server: Server) -> None:
    for path in ("/api/nothing", "/api/rollouts/unknown", "/api/rollouts/unknown/calls"):
        status, answer = await ask(server, "GET", path)
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")


async def test_every_verb_is_a_described_route(server: Server) -> None:
    _, description = await ask(server, "GET", "/api/openapi.json")
    for verb in METHODS:
        assert description["paths"][f"/{verb}"]["post"]["description"]
    assert "logprobs" in description["components"]["schemas"]["Call"]["properties"]


class BrokenStore(LightningStoreClient):
    """A real store whose verbs fail as no store should."""

    def __init__(self) -> None:
        super().__init__("http://nowhere")

    async def count(self, run_id: str) -> Any:
        raise ZeroDivisionError("a secret detail")


async def test_a_bug_is_answered_without_a_traceback() -> None:
    async with Server(BrokenStore()) as server:
        status, answer = await ask(server, "POST", "/api/count", key=None, json={"run_id": "r"})
    assert status == 500
    assert answer["error"]["type"] == "AgentLightningError"
    assert "secret detail" not in answer["error"]["message"]


async def test_the_app_hears_of_finishes_and_resources() -> None:
    heard: list[Any] = []
    store = sql_store("memory://", Clock())
    async with (
        Server(store, hooks=ApiHooks(on_end=heard.extend, on_resources=heard.append)) as server,
        LightningStoreClient(server.url) as client,
    ):
        [claim] = await claimed(client)
        run_id = claim.rollout.run_id
        forged = ending(claim)
        await client.finish([ending(claim), forged])
        await client.put_resources([Resource(run_id=run_id, name="p", kind="policy", value={})] * 2)
    assert heard == [claim.rollout.id, run_id]


async def test_a_claim_whose_caller_hung_up_takes_nothing(server: Server) -> None:
    async with LightningStoreClient(server.url, "secret") as client:
        run_id = await a_run(client)
        waiting = asyncio.create_task(client.claim(a_worker(run_id), wait_s=60))
        while not await client.workers(run_id):  # until it has asked once, and waits
            pass
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await client.runs()  # by now the server has read that the connection ended
        [rollout] = await client.enqueue(some(run_id, 1))
        [claim] = await client.claim(a_worker(run_id, "w1"), wait_s=5)
    assert claim.rollout.id == rollout.id


async def test_a_client_goes_on_when_the_server_comes_back_on_its_port_and_sees_another_boot() -> None:
    store: LightningStore = sql_store("memory://", Clock())
    async with Server(store) as first, LightningStoreClient(first.url) as client:
        run_id = await a_run(client)
        boots = client.boots
        assert len(boots) == 1
        assert await client.runs(ids=[run_id])
        assert client.boots == boots
        port = first.port
        await first.__aexit__()
        asked = asyncio.create_task(client.runs())
        async with Server(sql_store("memory://", Clock()), port=port):
            assert await asked == []
        assert len(client.boots) == 2


async def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    answers = [b"\xdc", b"\xdc\0\0"]  # an empty list of three bytes, of which the first answer has one

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\nconnection: close\r\n\r\n" + answers.pop(0))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, LightningStoreClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        assert await client.resources("r") == []
    assert answers == []


async def test_a_server_that_stays_away_is_named(unused_port: int) -> None:
    async with LightningStoreClient(f"http://127.0.0.1:{unused_port}", retry_timeout_s=0.01) as client:
        with pytest.raises(StoreError, match=f"127.0.0.1:{unused_port} cannot be reached"):
            await client.create_run("a", {})


async def test_an_answer_of_something_else_is_no_answer(server: Server) -> None:
    async with LightningStoreClient(server.url + "/elsewhere", "secret") as client:
        with pytest.raises(StoreError, match="expected an answer of an Agent Lightning server, got status 404"):
            await client.heartbeat(a_worker("r"), [Lease(rollout_id=new_id(), attempt=1, token="t")])


async def test_a_verb_of_a_client_that_is_not_open_says_so() -> None:
    with pytest.raises(StoreError, match="not open"):
        await LightningStoreClient("http://127.0.0.1:1").runs()


@pytest.fixture
def unused_port() -> Iterator[int]:
    with socket.socket() as place:  # bound, not listening: nobody else is given the port meanwhile
        place.bind(("127.0.0.1", 0))
        yield place.getsockname()[1]
