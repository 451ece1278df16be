"""PostgreSQL: what its failures say, and what several gateways do to one database."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
from invariants import violations
from postgres_server import PostgresServer, missing
from store_samples import a_call, a_run, a_worker, claimed, ending, some

from agentlightning.errors import ConfigError, ConflictError, InputError, StoreError
from agentlightning.records import Metric, Resource
from agentlightning.store.base import LightningStore
from agentlightning.store.open import open_store


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


async def refusal(url: str) -> str:
    with pytest.raises(StoreError) as caught:
        await open_store(url).open()
    assert "secret" not in str(caught.value)
    return str(caught.value)


def name_of(url: str) -> str:
    return url.rpartition("/")[2]


# --- sentences ------------------------------------------------------------------------------------------------------------


async def test_a_wrong_password_is_said_at_once(postgres: PostgresServer, postgres_url: str) -> None:
    wrong = postgres.url_of(name_of(postgres_url), password="wrong")
    said = await refusal(wrong)
    assert said.startswith(f"postgresql://127.0.0.1:{postgres.port}/{name_of(postgres_url)}: wrong user or password")


async def test_a_missing_database_is_said_at_once(postgres: PostgresServer) -> None:
    assert "no such database or user; create it" in await refusal(postgres.url_of("nowhere"))


async def test_a_server_that_cannot_be_reached_is_said_when_patience_ends() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        said = await refusal(f"postgresql://agl:secret@127.0.0.1:{port}/agl?patience=0.1")
    assert "cannot be reached; start the server, or check host, port and network" in said


async def test_a_host_that_is_unknown_is_said_at_once() -> None:
    assert "no machine of this name is known" in await refusal("postgresql://agl:secret@no-such-host.invalid/agl")


async def test_a_user_without_rights_is_told_which(postgres: PostgresServer, postgres_url: str) -> None:
    with postgres.connect(name_of(postgres_url)) as connection:
        connection.execute("DROP ROLE IF EXISTS guest")
        connection.execute("CREATE ROLE guest LOGIN PASSWORD 'secret'")
    assert "GRANT it the rights" in await refusal(postgres.url_of(name_of(postgres_url), user="guest"))


async def test_a_read_only_server_is_named_as_such_and_serves_readers(
    postgres: PostgresServer, postgres_url: str
) -> None:
    async with open_store(postgres_url) as store:
        run_id = await a_run(store)
    with postgres.connect() as connection:
        connection.execute(f"ALTER DATABASE {name_of(postgres_url)} SET default_transaction_read_only = on")
    assert "the server is read-only, as a standby is; name the primary" in await refusal(postgres_url)
    with postgres.connect() as connection:
        connection.execute(f"ALTER DATABASE {name_of(postgres_url)} RESET default_transaction_read_only")
    async with open_store(postgres_url) as store:
        assert [run.id for run in await store.runs()] == [run_id]


async def test_a_lock_that_another_holds_is_named_and_waited_for(postgres: PostgresServer, postgres_url: str) -> None:
    async with open_store(f"{postgres_url}?timeout=0.2") as store:
        [claim] = await claimed(store)
        with postgres.connect(name_of(postgres_url)) as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(6383468)")
            with pytest.raises(StoreError, match="another process holds the store's lock"):
                await a_run(store)
            await store.append_calls([a_call(claim)])  # appends are not in its way
            assert len(await store.calls([claim.rollout.id])) == 1
        await a_run(store)
        assert await violations(store) == []


async def test_a_full_disk_is_said_loses_nothing_and_passes(postgres: PostgresServer, postgres_url: str) -> None:
    """The server's own word for it, said by a trigger; its other errors come the same way."""
    async with open_store(postgres_url) as store:
        claims = await claimed(store, 2)
        await store.append_calls([a_call(claims[0])])
        with postgres.connect(name_of(postgres_url)) as connection:
            connection.execute(
                "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " RAISE EXCEPTION 'could not extend file: No space left on device' USING ERRCODE = 'disk_full'; END $$"
            )
            connection.execute("CREATE TRIGGER t BEFORE INSERT ON calls FOR EACH ROW EXECUTE FUNCTION full_disk()")
            with pytest.raises(StoreError, match="the disk of the server is full; free some space"):
                await store.append_calls([a_call(claims[1])])
            connection.execute("DROP TRIGGER t ON calls")
        await store.append_calls([a_call(claims[1])])
        assert len(await store.calls([claim.rollout.id for claim in claims])) == 2
        assert await violations(store) == []


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 2 MB; `grow` makes it larger."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a disk")
    place = Path(tempfile.mkdtemp(prefix="agl-small-disk-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=777", "tmpfs", place]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        place.rmdir()
        pytest.skip("no disk can be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)
    place.rmdir()


def grow(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)


@pytest.fixture
def server_with_table_space(small_disk: Path) -> Iterator[PostgresServer]:
    """A server with the table space `small` on the small disk."""
    if reason := missing():
        pytest.skip(reason)
    with PostgresServer() as server:
        folder = small_disk / "data"
        folder.mkdir()
        shutil.chown(folder, psutil.Process(server.pid).uids().real)
        with server.connect() as connection:
            connection.execute(f"CREATE TABLESPACE small LOCATION '{folder}'")
        yield server


async def test_a_disk_that_is_really_full_too(small_disk: Path, server_with_table_space: PostgresServer) -> None:
    url = server_with_table_space.url("full")
    async with open_store(url) as store:
        with server_with_table_space.connect("full") as connection:
            connection.execute("ALTER TABLE calls SET TABLESPACE small")
        [claim] = await claimed(store)
        kept: list[str] = []

        async def append_for_ever() -> None:
            while True:
                long = random.Random(len(kept)).randbytes(20_000).hex()
                call = a_call(claim, messages=[{"role": "user", "content": long}], finished_ns=len(kept))
                await store.append_calls([call])
                kept.append(call.id)

        with pytest.raises(StoreError, match="the disk of the server is full; free some space"):
            await append_for_ever()
        assert kept
        assert [call.id for call in await store.calls([claim.rollout.id])] == kept
        grow(small_disk)
        await store.append_calls([a_call(claim, finished_ns=10**9)])
        assert len(await store.calls([claim.rollout.id])) == len(kept) + 1
        assert await violations(store) == []


async def test_text_and_numbers_that_the_server_cannot_keep_are_bad_input(store: LightningStore) -> None:
    with pytest.raises(InputError, match="NUL"):
        await store.create_run("a\0b", {})
    run_id = await a_run(store)
    with pytest.raises(InputError, match="64 bits"):
        await store.enqueue(some(run_id, 1, priority=2**70))
    with pytest.raises(InputError, match="whole characters"):
        await store.create_run("\ud800", {})
    await store.enqueue(some(run_id, 1, priority=2**40))


@pytest.mark.parametrize(
    "url",
    ["postgresql://", "postgresql://host", "postgresql://host/db?patience=long", "postgresql://u:secret@h:port/db"],
)
def test_a_url_that_names_no_database_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


async def test_one_that_is_wrong_fails_alone(store: LightningStore) -> None:
    run_id = await a_run(store)
    outcomes = await asyncio.gather(
        *[store.create_run("again", {}, run_id=run_id) for _ in range(3)],
        *[store.enqueue(some(run_id, 1, group_id=str(number))) for number in range(5)],
        return_exceptions=True,
    )
    assert [type(outcome) for outcome in outcomes] == [ConflictError] * 3 + [list] * 5


# --- several at once ------------------------------------------------------------------------------------------------------


async def test_a_claim_is_woken_by_another_gateway(store: LightningStore, other: LightningStore) -> None:
    run_id = await a_run(store)
    waiting = asyncio.create_task(other.claim(a_worker(run_id), wait_s=100))
    await other.workers(run_id)
    await store.enqueue(some(run_id, 1))
    assert len(await waiting) == 1


async def test_whoever_waits_for_rollouts_is_woken_by_another_gateway(
    store: LightningStore, other: LightningStore
) -> None:
    claims = await claimed(store, 2)
    waiting = asyncio.create_task(other.wait(claims[0].rollout.run_id, at_least=2, timeout_s=100))
    for claim in claims:
        await store.finish([ending(claim)])
    assert len(await waiting) == 2


async def test_new_resources_and_metrics_wake_those_who_follow_at_another_gateway(
    store: LightningStore, other: LightningStore
) -> None:
    run_id = await a_run(store)
    resources = asyncio.create_task(other.wait_resources(run_id, {}, timeout_s=100))
    metrics = asyncio.create_task(other.follow_metrics(run_id, timeout_s=100))
    await other.runs()
    await store.put_resources([Resource(run_id=run_id, name="policy", kind="weights", value={"n": 1})])
    await store.log_metrics([Metric(run_id=run_id, step=1, name="loss", value=1.0)])
    assert [resource.version for resource in await resources] == [1]
    assert [metric.value for metric in await metrics] == [1.0]


async def test_gateways_never_claim_a_rollout_twice(store: LightningStore, other: LightningStore) -> None:
    run_id = await a_run(store)
    await store.enqueue(some(run_id, 200))

    async def claim_all(gateway: LightningStore, name: str) -> list[str]:
        taken: list[str] = []
        while claims := await gateway.claim(a_worker(run_id, name), limit=3):
            taken += [claim.rollout.id for claim in claims]
        return taken

    lists = await asyncio.gather(*[claim_all(gateway, f"w{n}") for n in range(4) for gateway in (store, other)])
    taken = [rollout_id for one in lists for rollout_id in one]
    assert len(taken) == len(set(taken)) == 200


async def test_gateways_that_open_an_empty_database_at_once_agree(postgres_url: str) -> None:
    stores = [open_store(postgres_url) for _ in range(4)]
    await asyncio.gather(*[store.open() for store in stores])
    assert len({await store.signing_secret() for store in stores}) == 1
    await asyncio.gather(*[store.close() for store in stores])


async def test_a_waiting_claim_costs_the_server_nothing(
    postgres: PostgresServer, postgres_url: str, store: LightningStore
) -> None:
    run_id = await a_run(store)
    waiting = asyncio.create_task(store.claim(a_worker(run_id), wait_s=100))
    while not await store.workers(run_id):
        pass
    with postgres.connect(name_of(postgres_url)) as connection:
        number = "SELECT count(*) FROM requests"
        before = connection.execute(number).fetchone()
        await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 1.5)
        assert connection.execute(number).fetchone() == before
    await store.enqueue(some(run_id, 1))
    assert len(await waiting) == 1


async def test_the_clock_of_leases_is_the_servers(postgres: PostgresServer, postgres_url: str) -> None:
    """A server whose clock is an hour ahead: every gateway lives by it."""
    with postgres.connect(name_of(postgres_url)) as connection:
        connection.execute("CREATE SCHEMA ahead")
        connection.execute(
            "CREATE FUNCTION ahead.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS"
            " $$ SELECT pg_catalog.clock_timestamp() + interval '1 hour' $$"
        )
    async with open_store(postgres_url + "?options=-csearch_path%3Dahead,pg_catalog,public") as store:
        [claim] = await claimed(store)
        [attempt] = await store.attempts([claim.rollout.id])
        for there_ns in (attempt.started_ns, claim.rollout.created_ns):
            assert 3500 < (there_ns - time.time_ns()) / 1e9 < 3700
        assert await store.expire_leases() == 0
