"""Redis that cannot serve now: a server that becomes a replica, is busy or fails over is waited for, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from redis import Redis
from redis_failover import RedisFailover
from redis_server import RedisServer, missing
from store_samples import a_run, appending, claimed, faults, new_id, some

from agentlightning.errors import ConfigError, StoreError
from agentlightning.store.notifier import Notifier
from agentlightning.store.redis.address import Address
from agentlightning.store.redis.connection import Command, RedisConnection
from agentlightning.store.redis.store import RedisLightningStore

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

DEADLINE_S = 60.0


@pytest.fixture
def failover() -> Iterator[RedisFailover]:
    with RedisFailover() as servers:
        yield servers


async def tell(server: RedisServer, *command: str | int) -> object:
    """What a server answers to somebody else's command."""
    connection = RedisConnection(Address.at(server.url()), {}, Notifier())
    words: Command = command
    [reply] = await connection.ask([words])
    await connection.close()
    return reply


async def test_what_was_acknowledged_survives_a_failover_and_work_goes_on(failover: RedisFailover) -> None:
    url = failover.url(prefix=new_id(), replicas="1")
    async with RedisLightningStore(url) as store, asyncio.timeout(DEADLINE_S):
        [claim] = await claimed(store)
        acknowledged, writers = await appending(store, claim)
        failover.first.kill()
        known = {call.id for call in acknowledged}
        assert len(known) < 240
        # Only the second has the data now: what was acknowledged is there.
        found = {call.id for call in await store.calls([claim.rollout.id])}
        assert known <= found
        await asyncio.to_thread(failover.first.start)  # the sentinel makes it a replica, which writes wait for
        await asyncio.gather(*writers)
        assert sorted(call.id for call in await store.calls([claim.rollout.id])) == sorted(
            call.id for call in acknowledged
        )
        assert b"role:master" in bytes(await tell(failover.second, "INFO", "replication"))  # type: ignore[call-overload]
        assert await faults(store) == []


async def test_a_server_that_refuses_to_wait_for_replicas_is_an_error_that_says_so(own_redis: RedisServer) -> None:
    with Redis(host="127.0.0.1", port=own_redis.port, password="secret") as admin:
        admin.execute_command("ACL", "SETUSER", "strict", "on", ">secret", "~*", "&*", "+@all", "-wait")
    url = own_redis.url("strict", replicas="1").replace("redis://:", "redis://strict:")
    with pytest.raises(StoreError, match=r"the user of the URL may not do what a store does; allow it: .*wait"):
        async with RedisLightningStore(url):
            pass


async def test_a_write_is_not_acknowledged_before_replicas_have_it(own_redis: RedisServer) -> None:
    async with RedisLightningStore(own_redis.url(appendonly="off")) as store:
        run_id = await a_run(store)
    del run_id
    url = own_redis.url("strict", replicas="1", patience="0.1")
    with pytest.raises(StoreError, match=r"too few replicas have the last write.*\?replicas="):
        async with RedisLightningStore(url):
            pass


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
        assert await faults(store) == []


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
    connection = RedisConnection(Address.at(server.url(patience="0")), {}, Notifier())
    try:
        [reply] = await connection.ask([command or ("GET", "x")])
        return reply
    except StoreError as error:
        return f"BUSY {error}" if "busy with a script" in str(error) else str(error)
    finally:
        await connection.close()


async def test_sentinels_that_know_no_such_service_or_are_away_are_one_sentence(failover: RedisFailover) -> None:
    url = failover.url(prefix=new_id(), patience="0.1")
    for wrong, said in ((url.replace("/agl/", "/other/"), "no sentinel knows a primary of this name"),):
        with pytest.raises(StoreError, match=said):
            await RedisLightningStore(wrong).open()


def test_addresses_of_sentinels_are_read() -> None:
    address = Address.at("rediss+sentinel://u:p%40ss@one,two:1,[::1]:2/agl/3?replicas=2")
    assert address.hosts == (("one", 26379), ("two", 1), ("::1", 2))
    assert (address.service, address.database, address.password, address.replicas) == ("agl", 3, "p@ss", 2)
    assert address.certificates == {}
    assert address.name == "rediss+sentinel://one:26379,two:1,::1:2/agl/3 (default)"
    assert Address.at("redis://[::1]:7/1").hosts == (("::1", 7),)
    for wrong, said in (
        ("redis+sentinel://one", "SERVICE"),
        ("redis://one,two/0", "one host"),
        ("redis://one?replicas=x", "replicas: expected a number"),
        ("redis://one?replicas=101", "replicas: expected at most 100"),
    ):
        with pytest.raises(ConfigError, match=said):
            Address.at(wrong)
