"""PostgreSQL: what its failures say, and what several gateways do to one database."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest
from invariants import violations
from postgres_server import PostgresServer
from store_samples import a_call, a_run, a_worker, claimed, some

from agentlightning.errors import ConfigError, ConflictError, InputError, StoreError
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


async def test_what_does_not_pass_by_itself_is_said_at_once(postgres: PostgresServer, postgres_url: str) -> None:
    name = name_of(postgres_url)
    said = await refusal(postgres.url_of(name, password="wrong"))
    assert said.startswith(f"postgresql://127.0.0.1:{postgres.port}/{name}: wrong user or password")
    assert "no such database or user; create it" in await refusal(postgres.url_of("nowhere"))
    assert "no machine of this name is known" in await refusal("postgresql://agl:secret@no-such-host.invalid/agl")


async def test_a_server_that_cannot_be_reached_is_said_when_patience_ends() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        said = await refusal(f"postgresql://agl:secret@127.0.0.1:{port}/agl?patience=0.1")
    assert "cannot be reached; start the server, or check host, port and network" in said


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
