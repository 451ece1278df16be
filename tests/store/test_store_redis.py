"""What is Redis' own: several stores on a server, servers that cannot be trusted, failures."""

from __future__ import annotations

import asyncio
import resource
import threading
from typing import Any

import pytest
from invariants import violations
from redis import Redis
from redis_server import RedisServer, missing
from store_samples import a_call, a_run, a_worker, claimed, ending, new_id, some

from agentlightning.errors import ConfigError, NotFoundError, StoreError
from agentlightning.store.base import RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.store.redis.connection import Address
from agentlightning.store.redis.store import RedisLightningStore

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

DEADLINE_S = 20.0
"""For waits that are expected to end much sooner, by a push."""


def admin(server: RedisServer) -> Redis:
    return Redis(host="127.0.0.1", port=server.port, password="secret", protocol=2)


async def refusal(url: str) -> str:
    store = RedisLightningStore(url)
    with pytest.raises(StoreError) as caught:
        await store.open()
    await store.close()
    assert "secret" not in str(caught.value)
    return str(caught.value)


async def test_long_lists_go_in_portions_and_come_back_whole(redis: RedisServer) -> None:
    async with RedisLightningStore(redis.url()) as store:
        run_id = await a_run(store)
        with pytest.raises(NotFoundError, match="nowhere"):
            await store.enqueue([*some(run_id, 1200), *some("nowhere", 1)])
        assert await store.count(run_id) == {}
        rollouts = await store.enqueue(some(run_id, 1200))
        assert [rollout.replica for rollout in rollouts] == list(range(1200))
        claims = await store.claim(a_worker(run_id), limit=1200)
        calls = [a_call(claim, finished_ns=number) for number, claim in enumerate(claims)]
        await store.append_calls(calls)
        assert await store.calls([claim.rollout.id for claim in claims]) == calls
        assert await store.finish([ending(claim) for claim in claims]) == [True] * 1200
        assert len(await store.wait(run_id)) == 1000
        assert [rollout.finished_seq for rollout in await store.wait(run_id, after=1000)] == list(range(1001, 1201))
        found = await store.rollouts(RolloutQuery(run_id=run_id, newest_first=True))
        assert [rollout.id for rollout in found] == [rollout.id for rollout in reversed(rollouts)]


# --- several stores ---------------------------------------------------------------------------------------------------


async def test_a_store_serves_callers_in_other_event_loops(redis: RedisServer) -> None:
    async with RedisLightningStore(redis.url()) as store:
        run_id = await a_run(store)
        made: list[Any] = []

        async def work() -> None:
            made.append(await store.enqueue(some(run_id, 1)))
            made.append(await store.claim(a_worker(run_id), wait_s=60))
            made.append(await store.rollouts(RolloutQuery(run_id=run_id)))

        thread = threading.Thread(target=lambda: asyncio.run(work()))
        thread.start()
        await asyncio.to_thread(thread.join)
        assert [len(each) for each in made] == [1, 1, 1]


async def test_prefixes_are_stores_of_their_own_and_every_key_begins_with_the_hash_tag(own_redis: RedisServer) -> None:
    async with RedisLightningStore(own_redis.url("one")) as one, open_store(own_redis.url("other")) as other:
        [claim] = await claimed(one)
        await one.append_calls([a_call(claim)])
        await one.finish([ending(claim)])
        assert await other.runs() == []
        await one.delete_runs([claim.rollout.run_id])
    with admin(own_redis) as server:
        left = sorted(key.decode() for key in server.scan_iter())
    assert {key.partition(":")[0] + ":" + key.split(":")[1] for key in left} <= {"{agl:one}", "{agl:other}"}
    assert {key.split(":")[2] for key in left} == {"meta", "request"}


# --- failures in a sentence -------------------------------------------------------------------------------------------


async def test_a_wrong_password_is_named(redis: RedisServer) -> None:
    said = await refusal(f"redis://:wrong@127.0.0.1:{redis.port}/0")
    assert said == (
        f"redis://127.0.0.1:{redis.port}/0 (default): the server refuses this user and password; "
        "correct them in the URL: redis://USER:PASSWORD@HOST"
    )
    assert "refuses this user" in await refusal(f"redis://127.0.0.1:{redis.port}/0")
    assert "refuses this user" in await refusal(f"redis://nobody:wrong@127.0.0.1:{redis.port}/0")


async def test_a_server_that_is_not_there_is_named() -> None:
    assert "127.0.0.1:1/0 (default): the server cannot be reached" in await refusal("redis://127.0.0.1:1?patience=0")


async def test_a_database_that_the_server_lacks_is_named(redis: RedisServer) -> None:
    said = await refusal(f"redis://:secret@127.0.0.1:{redis.port}/99")
    assert "no database of this number" in said


async def test_a_server_that_keeps_no_file_is_refused_unless_that_is_accepted(own_redis: RedisServer) -> None:
    with admin(own_redis) as server:
        server.config_set("appendonly", "no")
    assert "set appendonly yes" in await refusal(own_redis.url())
    async with RedisLightningStore(own_redis.url(appendonly="off")) as store:
        await a_run(store)


async def test_a_server_that_acknowledges_too_early_is_refused_unless_that_is_accepted(own_redis: RedisServer) -> None:
    with admin(own_redis) as server:
        server.config_set("appendfsync", "everysec")
    said = await refusal(own_redis.url())
    assert "set appendfsync always" in said
    assert "?appendfsync=everysec" in said
    assert "set appendfsync always" in await refusal(own_redis.url(appendfsync="no"))
    async with RedisLightningStore(own_redis.url(appendfsync="everysec")) as store:
        await a_run(store)


async def test_a_server_that_forgets_when_it_is_full_is_refused(own_redis: RedisServer) -> None:
    with admin(own_redis) as server:
        server.config_set("maxmemory", "100mb")
        server.config_set("maxmemory-policy", "allkeys-lru")
    assert "set maxmemory-policy noeviction" in await refusal(own_redis.url())


async def test_data_of_a_newer_program_are_refused(redis: RedisServer) -> None:
    prefix = new_id()
    async with RedisLightningStore(redis.url(prefix)):
        pass
    with admin(redis) as server:
        server.hset(f"{{agl:{prefix}}}:meta", "schema_version", "99")
    said = await refusal(redis.url(prefix))
    assert "version 99" in said
    assert "install the agentlightning that wrote it" in said


async def test_a_replica_is_named_as_such(redis: RedisServer) -> None:
    with RedisServer("--replicaof", "127.0.0.1", str(redis.port), "--masterauth", "secret") as replica:
        assert "read-only replica; give the URL of its primary" in await refusal(replica.url())


async def test_a_server_without_memory_refuses_and_serves_again_when_runs_are_deleted(own_redis: RedisServer) -> None:
    async with RedisLightningStore(own_redis.url()) as store:
        full, spare = await a_run(store), await a_run(store)
        await store.enqueue(some(full, 100))
        with admin(own_redis) as server:
            server.config_set("maxmemory", 1000)  # far below what it uses, which goes up and down by itself
            with pytest.raises(StoreError, match="memory is full; raise its maxmemory"):
                await store.enqueue(some(spare, 1))
            assert await store.count(spare) == {}
            assert await store.delete_runs([full]) == 1
            server.config_set("maxmemory", 0)
        assert len(await store.enqueue(some(spare, 1))) == 1
        assert await violations(store) == []


async def test_a_full_disk_loses_nothing_acknowledged_whoever_restarts_the_server(own_redis: RedisServer) -> None:
    async with RedisLightningStore(own_redis.url(patience="0.5")) as store:
        [claim] = await claimed(store)
        resource.prlimit(own_redis.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
        kept: list[str] = []

        async def append_for_ever() -> None:
            while True:
                call = a_call(claim, messages=[{"role": "user", "content": "x" * 100_000}])
                await store.append_calls([call])
                kept.append(call.id)

        with pytest.raises(StoreError, match="cannot be reached"):  # it ends itself rather than forget
            await append_for_ever()
        own_redis.kill()
        own_redis.start()
        assert kept
        assert set(kept) <= {call.id for call in await store.calls([claim.rollout.id])}
        await store.append_calls([a_call(claim)])
        assert await violations(store) == []


async def test_a_full_disk_under_a_server_that_goes_on_is_one_sentence(own_redis: RedisServer) -> None:
    with admin(own_redis) as server:
        server.config_set("appendfsync", "everysec")
    async with RedisLightningStore(own_redis.url(appendfsync="everysec")) as store:
        [claim] = await claimed(store)
        resource.prlimit(own_redis.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))

        async def append_for_ever() -> None:
            while True:
                await store.append_calls([a_call(claim, messages=[{"role": "user", "content": "x" * 100_000}])])

        with pytest.raises(StoreError, match="cannot write to its disk; free some space"):
            await append_for_ever()
        resource.prlimit(own_redis.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        async with asyncio.timeout(DEADLINE_S):
            while True:  # the server tries again by itself, once a second
                try:
                    await store.append_calls([a_call(claim)])
                    break
                except StoreError:
                    await asyncio.sleep(0.05)
        assert await violations(store) == []


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://", "expected redis://"),
        ("redis://h/0?prefx=a", "unknown in a Redis URL: prefx; known are prefix"),
        ("redis://h/0?prefix=a{b", "prefix: expected letters"),
        ("redis://h/0?appendonly=no", "appendonly: expected off"),
        ("redis://h/0?appendfsync=sometimes", "appendfsync: expected everysec or no"),
        ("redis://h/0?ssl_ca_certs=/ca.pem", "write rediss://"),
        ("redis://h/0?patience=long", "patience: expected seconds"),
        ("redis://h/first", "the database after the host: expected a number"),
        ("redis://h:first/0", "port: expected a number"),
    ],
)
def test_urls_that_make_no_sense_are_refused_with_what_was_expected(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.at(url)
    assert said in str(caught.value)


def test_a_url_says_where_the_store_is_and_its_name_keeps_the_password() -> None:
    address = Address.at("rediss://me:p%40ss@[::1]:7000/2?prefix=mine&ssl_ca_certs=/ca.pem")
    assert (address.host, address.port, address.database) == ("::1", 7000, 2)
    assert (address.user, address.password, address.tag) == ("me", "p@ss", "{agl:mine}")
    assert address.certificates == {"ssl_ca_certs": "/ca.pem"}
    assert "p@ss" not in address.name
    assert Address.at("redis://h").name == "redis://h:6379/0 (default)"
