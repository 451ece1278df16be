"""The conformance suite runs on every kind of store: a new kind adds a parameter here and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import postgres_server
import pytest
import redis_server
from store_samples import Clock, Server, new_id, sql_store

from agentlightning.store.base import LightningStore
from agentlightning.store.open import open_store
from agentlightning.store.redis.store import RedisLightningStore


@pytest.fixture
def clock() -> Clock:
    """The clock of the store under test."""
    return Clock()


@pytest.fixture(scope="session")
def postgres() -> Iterator[postgres_server.PostgresServer]:
    """A PostgreSQL server for all tests that leave it as they find it."""
    if reason := postgres_server.missing():
        pytest.skip(reason)
    with postgres_server.PostgresServer() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: postgres_server.PostgresServer) -> Iterator[str]:
    """A database of this test's own."""
    url = postgres.url()
    yield url
    postgres.drop(url)


@pytest.fixture(scope="session")
def postgres_store(postgres: postgres_server.PostgresServer) -> str:
    """The name of a database with an empty store, to be copied: making its tables takes ten times as long."""
    name = "empty_store"
    with ThreadPoolExecutor(1) as thread:  # the loop of the test that asks first is running
        thread.submit(asyncio.run, _made(postgres.url(name))).result()
    return name


async def _made(url: str) -> None:
    async with open_store(url):
        pass


@pytest.fixture(scope="session")
def redis() -> Iterator[redis_server.RedisServer]:
    """A Redis server for all tests that leave it as they find it."""
    if reason := redis_server.missing():
        pytest.skip(reason)
    with redis_server.RedisServer() as server:
        yield server


@pytest.fixture
def redis_url(redis: redis_server.RedisServer) -> str:
    """A prefix of this test's own."""
    return redis.url(new_id())


@pytest.fixture
def own_redis() -> Iterator[redis_server.RedisServer]:
    """A server that the test may kill, or spoil."""
    if reason := redis_server.missing():
        pytest.skip(reason)
    with redis_server.RedisServer() as server:
        yield server


@pytest.fixture(params=["memory", "sqlite", "postgres", "redis", "http"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[LightningStore]:
    """An open, empty store of each kind."""
    if request.param == "memory":
        async with sql_store("memory://", clock) as memory:
            yield memory
    elif request.param == "sqlite":
        async with sql_store(f"sqlite:///{tmp_path}/agl.db", clock) as file:
            yield file
    elif request.param == "postgres":
        server = request.getfixturevalue("postgres")
        url = server.url(template=request.getfixturevalue("postgres_store"))
        async with sql_store(url, clock) as database:
            yield database
        server.drop(url)
    elif request.param == "redis":
        async with RedisLightningStore(request.getfixturevalue("redis_url"), now_ns=clock) as elsewhere:
            yield elsewhere
    else:
        async with (
            Server(sql_store("memory://", clock), server_key="secret") as server,
            open_store(server.url, "secret") as client,
        ):
            yield client
