"""PostgreSQL that goes away: outages are waited out, nothing acknowledged is lost, nothing is executed twice."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from invariants import violations
from postgres_server import PostgresServer, missing
from sqlalchemy.exc import DBAPIError
from store_samples import Clock, a_call, a_run, a_worker, claimed, ending, finished, some, sql_store

from agentlightning.errors import StoreError
from agentlightning.records import Metric, Resource
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.open import open_store
from agentlightning.store.sql.store import database_at


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[LightningStore]:
    """A store with the server's own clock."""
    async with open_store(postgres_url) as opened:
        yield opened


@pytest.fixture
async def other(store: LightningStore, postgres_url: str) -> AsyncIterator[LightningStore]:
    """A second one on the same database, as another gateway has it."""
    async with open_store(postgres_url) as opened:
        yield opened


@pytest.fixture
def mortal() -> Iterator[PostgresServer]:
    """A server that may be killed."""
    if reason := missing():
        pytest.skip(reason)
    with PostgresServer() as server:
        yield server


async def test_a_killed_server_is_waited_for_and_nothing_acknowledged_is_lost_or_done_twice(
    mortal: PostgresServer,
) -> None:
    url = mortal.url("agl")
    async with open_store(url) as store, open_store(url) as other:
        [claim] = await claimed(store)
        run_id = claim.rollout.run_id
        logged: list[float] = []
        appended: list[str] = []
        going = True

        async def log(gateway: LightningStore, first: int) -> None:
            number = first
            while going:
                await gateway.log_metrics([Metric(run_id=run_id, step=1, name="n", value=number)])
                logged.append(number)
                number += 10

        async def append() -> None:
            while going:
                call = a_call(claim)
                await store.append_calls([call])
                appended.append(call.id)

        working = [asyncio.create_task(log(gateway, n)) for n, gateway in enumerate([store, other, store, other])]
        working += [asyncio.create_task(append()) for _ in range(4)]
        for _ in range(3):
            goal = len(logged) + 20, len(appended) + 20
            while len(logged) < goal[0] or len(appended) < goal[1]:
                await store.runs()
            await asyncio.to_thread(mortal.kill)
            await asyncio.to_thread(mortal.start)
        going = False
        await asyncio.gather(*working)
        assert sorted(metric.value for metric in await store.metrics(run_id)) == sorted(logged)
        assert {call.id for call in await other.calls([claim.rollout.id])} == set(appended)
        assert await violations(store) == []


async def test_verbs_during_an_outage_wait_for_its_end(mortal: PostgresServer) -> None:
    async with open_store(mortal.url("agl")) as store, open_store(mortal.url_of("agl")) as other:
        [claim] = await claimed(store)
        run_id = claim.rollout.run_id
        waiting = asyncio.create_task(other.wait(run_id, timeout_s=100))
        await asyncio.to_thread(mortal.kill)
        verbs = [
            asyncio.create_task(store.enqueue(some(run_id, 1, group_id="later"))),
            asyncio.create_task(store.append_calls([a_call(claim)])),
            asyncio.create_task(store.rollouts(RolloutQuery(run_id=run_id))),
            asyncio.create_task(store.finish([ending(claim)])),
        ]
        await asyncio.to_thread(mortal.start)
        await asyncio.gather(*verbs)
        assert verbs[3].result() == [True]
        assert [rollout.id for rollout in await waiting] == [claim.rollout.id]
        claiming = asyncio.create_task(other.claim(a_worker(run_id, "w9"), wait_s=100, limit=2))
        assert [found.rollout.group_id for found in await claiming] == ["later"]


async def test_an_outage_longer_than_patience_is_said_and_passes(mortal: PostgresServer) -> None:
    async with open_store(mortal.url("agl") + "?patience=0.3") as store:
        claims = await finished(store, 1)
        run_id = claims[0].rollout.run_id
        await asyncio.to_thread(mortal.kill)
        for verb in (
            store.enqueue(some(run_id, 1, group_id="h")),
            store.runs(),
            store.append_calls([a_call(claims[0])]),
        ):
            with pytest.raises(StoreError, match="cannot be reached; start the server"):
                await verb
        await asyncio.to_thread(mortal.start)
        await store.enqueue(some(run_id, 1, group_id="h"))
        await store.append_calls([a_call(claims[0])])
        assert len(await store.calls([claims[0].rollout.id])) == 1
        assert await violations(store) == []


class Cutter:
    """A proxy before the server that cuts one connection at its COMMIT: before the server sees it, or after it did."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cut: str | None = None
        self.cuts = 0
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._begin(self._accept)

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._port))
                dropped = threading.Event()
                for one, another, outgoing in ((client, server, True), (server, client, False)):
                    self._begin(self._pass, one, another, outgoing, dropped)
                self._ends += [client, server]

    def _pass(self, source: socket.socket, target: socket.socket, outgoing: bool, dropped: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if outgoing and self.cut is not None and b"COMMIT\0" in data:
                    when, self.cut = self.cut, None
                    self.cuts += 1
                    if when == "before":
                        break
                    dropped.set()
                    target.sendall(data)
                    continue
                if not outgoing and dropped.is_set():  # the answer to that COMMIT
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_commit_that_is_cut_off_is_executed_once(
    postgres: PostgresServer, postgres_url: str, when: str
) -> None:
    cutter = Cutter(postgres.port)
    through = postgres_url.replace(f":{postgres.port}/", f":{cutter.port}/")
    async with sql_store(through, Clock()) as store, open_store(postgres_url) as other:
        run_id = await a_run(store)
        await store.enqueue(some(run_id, 10))
        hearing = asyncio.create_task(other.follow_metrics(run_id, timeout_s=100))
        for count in (1, 2, 3):
            cutter.cut = when
            await store.log_metrics([Metric(run_id=run_id, step=count, name="n", value=1.0)])
            cutter.cut = when
            [claim] = await store.claim(a_worker(run_id))
            assert claim.rollout.attempt == 1
            cutter.cut = when
            assert await store.finish([ending(claim)]) == [True]
            assert len(await store.metrics(run_id)) == count
        assert cutter.cuts == 9
        assert len(await hearing) >= 1
        assert {state: n for (_, state), n in (await other.count(run_id)).items()} == {"queued": 7, "succeeded": 3}
        assert await violations(store) == []
    cutter.close()


async def test_a_gateway_that_hangs_in_a_transaction_holds_the_lock_no_longer_than_others_wait(
    postgres_url: str, store: LightningStore
) -> None:
    names = ("idle_in_transaction_session_timeout", "lock_timeout")
    database = database_at(postgres_url)
    engine = database.writer("hanging")
    with engine.connect() as hanging:
        with hanging.begin():
            said = "SELECT name, setting::int FROM pg_settings WHERE name IN ('{}', '{}')".format(*names)
            waits_ms = {row[0]: row[1] for row in hanging.exec_driver_sql(said)}
        assert 0 < waits_ms[names[0]] < waits_ms[names[1]]
        hanging.begin()
        database.enter_schema(hanging)
        hanging.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 50")  # now that it has the lock
        await a_run(store)
        with pytest.raises(DBAPIError):
            hanging.exec_driver_sql("SELECT 1")
        hanging.invalidate()
    engine.dispose()


async def test_what_others_say_on_the_channel_does_not_end_the_listening(
    store: LightningStore, other: LightningStore, postgres: PostgresServer, postgres_url: str
) -> None:
    assert store.background is not None
    run_id = await a_run(store)
    with postgres.connect(postgres_url.rpartition("/")[2]) as stranger:
        stranger.execute("NOTIFY agl, 'good morning'")
    async with asyncio.timeout(20):
        while not store.background.failures["postgresql listener"] or store.background.down:
            await store.runs(limit=1)
        waiting = asyncio.create_task(store.wait_resources(run_id, {}, 600))
        while not waiting.done():
            await other.put_resources([Resource(run_id=run_id, name="default", kind="policy", value={})])
    assert (await waiting)[0].name == "default"
