"""Failures of disks, files and locks: one sentence with the path each, nothing acknowledged lost, and the store lives on."""

from __future__ import annotations

import os
import resource
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from invariants import violations
from store_samples import Clock, a_call, a_run, a_worker, claimed, some, sql_store

from agentlightning.errors import StoreError
from agentlightning.records import Call
from agentlightning.store.base import LightningStore
from agentlightning.store.sql.store import database_at


def store_at(path: object, options: str = "") -> LightningStore:
    return sql_store(f"sqlite:///{path}{options}", Clock())


async def refusal(store: LightningStore) -> str:
    with pytest.raises(StoreError) as caught:
        await store.open()
    await store.close()
    return str(caught.value)


async def test_a_path_in_a_missing_folder_says_which(tmp_path: Path) -> None:
    said = await refusal(store_at(tmp_path / "missing" / "agl.db"))
    assert f"the folder {tmp_path / 'missing'} does not exist" in said


async def test_a_path_that_is_a_folder_is_named_as_such(tmp_path: Path) -> None:
    assert f"{tmp_path}: is a folder" in await refusal(store_at(tmp_path))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder where even root cannot write")
async def test_a_folder_that_cannot_be_written_is_named() -> None:
    assert "check the permissions of the file and of /proc/self" in await refusal(store_at("/proc/self/agl.db"))


async def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n" * 100)
    assert f"{path}: is not an SQLite database" in await refusal(store_at(path))
    assert path.read_text().startswith("dear diary")


async def test_a_read_only_file_can_be_opened_by_nobody_who_writes(tmp_path: Path) -> None:
    path = tmp_path / "agl.db"
    async with store_at(path):
        pass
    said = await refusal(store_at(f"file:{path}", "?mode=ro&uri=true"))
    assert "read-only" in said
    assert str(path) in said


async def test_a_locked_database_is_named_and_serves_again_when_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "agl.db"
    async with store_at(path, "?timeout=0.01") as store:
        run_id = await a_run(store)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process holds the database"):
            await store.enqueue(some(run_id, 1))
        assert await store.count(run_id) == {}  # who only reads is not in its way
        other.execute("ROLLBACK")
        other.close()
        assert len(await store.enqueue(some(run_id, 1))) == 1
        assert await violations(store) == []


@pytest.fixture
def files_of_at_most_a_megabyte() -> Iterator[None]:
    """The kernel refuses longer files, as a full quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("files_of_at_most_a_megabyte")
async def test_a_full_disk_loses_nothing_acknowledged_and_the_store_lives_on(tmp_path: Path) -> None:
    async with store_at(tmp_path / "agl.db") as store:
        [claim] = await claimed(store)
        kept: list[Call] = []

        async def append_for_ever() -> None:
            while True:
                call = a_call(claim, messages=[{"role": "user", "content": "x" * 100_000}], finished_ns=len(kept))
                await store.append_calls([call])
                kept.append(call)

        with pytest.raises(StoreError, match=r"agl\.db: the disk"):
            await append_for_ever()
        assert kept
        assert await store.calls([claim.rollout.id]) == kept
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        await store.append_calls([a_call(claim, finished_ns=10**9)])
        assert len(await store.calls([claim.rollout.id])) == len(kept) + 1
        assert await violations(store) == []


def test_sqlites_own_word_for_a_full_disk_is_understood() -> None:
    from sqlalchemy import create_engine
    from sqlalchemy.exc import DBAPIError

    with create_engine("sqlite://").connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1")
        with pytest.raises(DBAPIError) as caught:
            connection.exec_driver_sql("CREATE TABLE t (x)")
    error = database_at("sqlite:////some/agl.db").explain(caught.value)
    assert str(error).startswith("/some/agl.db: the disk is full; free some space")


async def test_a_file_is_there_again_with_its_secret_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "agl.db"
    async with store_at(path) as store:
        secret = await store.signing_secret()
        claims = await claimed(store, 2)
    async with store_at(path) as store:
        assert await store.signing_secret() == secret
        assert len(secret) == 32
        assert await store.heartbeat(a_worker(claims[0].rollout.run_id), [claims[0].lease]) == [True]


async def test_evaluation_rollouts_cannot_be_consumed_even_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "agl.db"
    async with store_at(path) as store:
        run_id = await a_run(store)
        [rollout] = await store.enqueue(some(run_id, 1, mode="eval"))
        await store.open_step(run_id, 1, [])
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA foreign_keys = ON")
    insert = "INSERT INTO consumption VALUES (?, ?, ?, 1, 0, 'trained', NULL)"
    for mode in ("eval", "train"):
        with pytest.raises(sqlite3.IntegrityError):
            connection.execute(insert, (rollout.id, run_id, mode))
    connection.close()
