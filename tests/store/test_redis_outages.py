"""Redis that goes away, and callers that do: outages are waited out, what is sent again is not executed twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from invariants import violations
from redis_server import RedisServer, missing
from store_samples import a_run, a_worker, appending, claimed, ending, new_id, some

from agentlightning.errors import StoreError
from agentlightning.records import Resource
from agentlightning.store.redis.connection import MAX_CONNECTIONS, Address, Command, RedisConnection
from agentlightning.store.redis.store import RedisLightningStore
from agentlightning.store.waiting import Notifier

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

DEADLINE_S = 20.0
"""For waits that are expected to end much sooner, by a push."""


async def test_what_was_acknowledged_survives_a_sigkill_of_the_server_and_work_goes_on(own_redis: RedisServer) -> None:
    async with RedisLightningStore(own_redis.url()) as store:
        [claim] = await claimed(store)
        acknowledged, writers = await appending(store, claim)
        own_redis.kill()
        before = len(acknowledged)
        await asyncio.to_thread(own_redis.start)
        assert before < 240
        await asyncio.gather(*writers)
        found = await store.calls([claim.rollout.id])
        assert sorted(call.id for call in found) == sorted(call.id for call in acknowledged)
        assert await store.finish([ending(claim)]) == [True]
        assert await violations(store) == []


async def test_whoever_waits_while_the_server_is_killed_is_still_woken(own_redis: RedisServer) -> None:
    async with RedisLightningStore(own_redis.url()) as store, asyncio.timeout(DEADLINE_S):
        [claim] = await claimed(store)
        run_id = claim.rollout.run_id
        waiting = asyncio.create_task(store.wait(run_id, timeout_s=60))
        claiming = asyncio.create_task(store.claim(a_worker(run_id, "w1"), wait_s=60))
        while len(await store.workers(run_id)) < 2:
            pass
        own_redis.kill()
        await asyncio.to_thread(own_redis.start)
        await store.finish([ending(claim)])
        assert [rollout.id for rollout in await waiting] == [claim.rollout.id]
        [queued] = await store.enqueue(some(run_id, 1, group_id="later"))
        assert [each.rollout.id for each in await claiming] == [queued.id]


async def test_an_outage_beyond_patience_is_one_sentence_and_the_store_lives_on(own_redis: RedisServer) -> None:
    async with RedisLightningStore(own_redis.url(patience="0.1")) as store:
        run_id = await a_run(store)
        own_redis.kill()
        for work in (store.enqueue(some(run_id, 1)), store.count(run_id)):
            with pytest.raises(StoreError, match="cannot be reached; start it, or correct the URL"):
                await work
        own_redis.start()
        assert len(await store.enqueue(some(run_id, 1))) == 1
        assert await violations(store) == []


async def test_closing_waits_for_no_server(own_redis: RedisServer) -> None:
    async with asyncio.timeout(DEADLINE_S):
        store = RedisLightningStore(own_redis.url())
        await store.open()
        run_id = await a_run(store)
        own_redis.kill()
        writing = asyncio.create_task(store.enqueue(some(run_id, 1)))
        reading = asyncio.create_task(store.runs())
        await asyncio.sleep(0)
        await store.close()
        for task in (writing, reading):
            with pytest.raises(StoreError, match="cannot be reached"):
                await task


class Relay:
    """Stands between a store and its server, and can break the connection when an answer comes back."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self.breaking: bytes | None = None
        """The next answer to what contains this is lost."""
        self.broken = 0
        self._serving: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)

        losing = False
        self._serving |= {task for task in (asyncio.current_task(),) if task is not None}

        async def ask() -> None:
            nonlocal losing
            while asked := await reader.read(1 << 16):
                if self.breaking is not None and self.breaking in asked:
                    self.breaking, losing = None, True
                to_server.write(asked)
            to_server.close()

        async def answer() -> None:
            while answered := await from_server.read(1 << 16):
                if losing:  # it was executed
                    self.broken += 1
                    to_server.close()
                    break
                writer.write(answered)
            writer.close()

        await asyncio.gather(ask(), answer(), return_exceptions=True)
        for side in (writer, to_server):
            side.close()
            await asyncio.gather(side.wait_closed(), return_exceptions=True)


async def test_a_request_whose_answer_was_lost_is_not_executed_twice(redis: RedisServer) -> None:
    relay, prefix = Relay(redis.port), new_id()
    async with relay.listening() as port:
        url = f"redis://:secret@127.0.0.1:{port}/0?prefix={prefix}"
        async with RedisLightningStore(url) as store, asyncio.timeout(DEADLINE_S):
            run_id = await a_run(store)
            policy = Resource(run_id=run_id, name="default", kind="policy", value={})
            await store.put_resources([policy])
            relay.breaking = b"EVALSHA"
            assert [each.version for each in await store.put_resources([policy])] == [2]
            assert [each.version for each in await store.put_resources([policy])] == [3]
            await store.enqueue(some(run_id, 2))
            relay.breaking = b"EVALSHA"
            [first] = await store.claim(a_worker(run_id))
            assert [each.attempt for each in await store.attempts([first.rollout.id])] == [1]
            relay.breaking = b"EVALSHA"
            assert await store.finish([ending(first)]) == [True]
            relay.breaking = b"EVALSHA"
            assert (await store.open_step(run_id, 1, [])).state == "open"
            assert relay.broken == 4
            assert await store.count(run_id) == {("train", "queued"): 1, ("train", "succeeded"): 1}


async def test_callers_that_give_up_take_no_connection_with_them(redis: RedisServer) -> None:
    async with RedisLightningStore(redis.url()) as store, asyncio.timeout(DEADLINE_S):
        run_id = await a_run(store)
        for turns in range(2 * MAX_CONNECTIONS):
            asked = [asyncio.create_task(store.runs()) for _ in range(2 * MAX_CONNECTIONS)]
            for _ in range(turns):
                await asyncio.sleep(0)
            for task in asked[:-1]:
                task.cancel()
            assert [run.id for run in await asked[-1]] == [run_id]


async def test_what_others_publish_does_not_end_the_listening(own_redis: RedisServer) -> None:
    url = own_redis.url()
    async with RedisLightningStore(url) as store, RedisLightningStore(url) as other, asyncio.timeout(DEADLINE_S):
        run_id = await a_run(store)
        stranger = RedisConnection(Address.at(url), Notifier())
        await stranger.open()
        await stranger.ask([("PUBLISH", stranger.address.tag, "good morning")])
        await stranger.close()
        while not store.background.failures["redis listener"]:
            await store.runs(limit=1)
        waiting = asyncio.create_task(store.wait_resources(run_id, {}, 600))
        while not waiting.done():
            await other.put_resources([Resource(run_id=run_id, name="default", kind="policy", value={})])
        assert (await waiting)[0].name == "default"
        while store.background.down:  # it is, until the listener's pause is over
            await store.runs(limit=1)


# --- a server that cannot serve now -----------------------------------------------------------------------------------


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
