"""Redis that cannot serve now: a server that becomes a replica or is busy is waited for, and nothing is lost."""

from __future__ import annotations

import asyncio

import pytest
from invariants import violations
from redis_server import RedisServer, missing
from store_samples import a_run, some

from agentlightning.errors import StoreError
from agentlightning.store.notifier import Notifier
from agentlightning.store.redis.address import Address
from agentlightning.store.redis.connection import Command, RedisConnection
from agentlightning.store.redis.store import RedisLightningStore

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

DEADLINE_S = 60.0


async def tell(server: RedisServer, *command: str | int) -> object:
    """What a server answers to somebody else's command."""
    connection = RedisConnection(Address.at(server.url()), Notifier())
    words: Command = command
    [reply] = await connection.ask([words])
    await connection.close()
    return reply


async def test_a_server_that_becomes_a_replica_is_waited_for(own_redis: RedisServer, redis: RedisServer) -> None:
    async with RedisLightningStore(own_redis.url()) as store, asyncio.timeout(DEADLINE_S):
        run_id = await a_run(store)
        await tell(own_redis, "CONFIG", "SET", "replica-serve-stale-data", "no")
        await tell(own_redis, "REPLICAOF", "127.0.0.1", 1)  # nobody is there: reads get MASTERDOWN, too
        reading = asyncio.create_task(store.count(run_id))
        writing = asyncio.create_task(store.enqueue(some(run_id, 3)))
        assert not (await asyncio.wait({reading, writing}, timeout=0.5))[0]
        await tell(own_redis, "REPLICAOF", "NO", "ONE")
        assert len(await writing) == 3
        await reading
        await tell(own_redis, "CONFIG", "SET", "replica-serve-stale-data", "yes")
        await tell(own_redis, "REPLICAOF", "127.0.0.1", 1)  # and now writes READONLY
        writing = asyncio.create_task(store.enqueue(some(run_id, 2, group_id="later")))
        assert not (await asyncio.wait({writing}, timeout=0.5))[0]
        await tell(own_redis, "REPLICAOF", "NO", "ONE")
        assert len(await writing) == 2
        assert await violations(store) == []


async def test_a_server_that_is_busy_with_somebody_elses_script_is_waited_for(own_redis: RedisServer) -> None:
    async with RedisLightningStore(own_redis.url()) as store, asyncio.timeout(DEADLINE_S):
        run_id = await a_run(store)
        await tell(own_redis, "CONFIG", "SET", "busy-reply-threshold", 10)
        stranger = asyncio.create_task(tell(own_redis, "EVAL", "while true do end", 0))
        while "BUSY" not in str(await probe(own_redis)):
            pass
        writing = asyncio.create_task(store.enqueue(some(run_id, 3)))
        assert not (await asyncio.wait({writing}, timeout=0.5))[0]
        assert await probe(own_redis, "SCRIPT", "KILL") == b"OK"
        assert len(await writing) == 3
        await stranger


async def probe(server: RedisServer, *command: str) -> object:
    """What a server answers now, whatever it is."""
    connection = RedisConnection(Address.at(server.url(patience="0")), Notifier())
    try:
        [reply] = await connection.ask([command or ("GET", "x")])
        return reply
    except StoreError as error:
        return f"BUSY {error}" if "busy with a script" in str(error) else str(error)
    finally:
        await connection.close()
