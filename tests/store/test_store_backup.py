"""Backups of stores that are written to, restored by the databases' tools: nothing acknowledged is missing."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from invariants import violations
from redis_server import RedisServer
from store_samples import a_call, claimed

from agentlightning.errors import ConfigError, StoreError
from agentlightning.records import Call, Claim
from agentlightning.store.backup import backup_store
from agentlightning.store.base import LightningStore
from agentlightning.store.open import open_store

TOOLS = {"sqlite": (), "postgres": ("pg_dump", "pg_restore"), "redis": ("redis-cli", "redis-server")}


@asynccontextmanager
async def writing(store: LightningStore, claim: Claim) -> AsyncIterator[list[Call]]:
    """Calls are appended meanwhile; those that are acknowledged are in the list."""
    acknowledged: list[Call] = []
    going = True

    async def append() -> None:
        while going:
            call = a_call(claim)
            await store.append_calls([call])
            acknowledged.append(call)

    appending = [asyncio.create_task(append()) for _ in range(4)]
    try:
        yield acknowledged
    finally:
        going = False
        await asyncio.gather(*appending)


@pytest.mark.parametrize("kind", ["sqlite", "postgres", "redis"])
async def test_a_backup_of_a_store_in_use_is_restored_by_its_tool_and_right(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if missing := [program for program in TOOLS[kind] if shutil.which(program) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    server = None if kind == "sqlite" else request.getfixturevalue(kind)
    url = f"sqlite:///{tmp_path}/agl.db" if server is None else server.url("backed_up")
    file = tmp_path / "backups" / "store"
    async with open_store(url) as store:
        [claim] = await claimed(store)
        async with writing(store, claim) as acknowledged:
            while len(acknowledged) < 20:
                await store.runs()
            before = {call.id for call in acknowledged}
            await asyncio.to_thread(backup_store, f"{url}?timeout=20" if kind != "redis" else url, file)
        secret = await store.signing_secret()
        written = {call.id for call in await store.calls([claim.rollout.id])}
    assert file.stat().st_mode & 0o077 == 0
    if kind == "sqlite":
        restored = f"sqlite:///{shutil.copy(file, tmp_path / 'restored.db')}"
        await _check(restored, claim, before, written, secret)
    elif kind == "postgres":
        restored = server.url("restored")
        restore = ["pg_restore", "--no-owner", f"--dbname={restored}", str(file)]
        await asyncio.to_thread(subprocess.run, restore, check=True)
        await _check(restored, claim, before, written, secret)
        for each in (url, restored):
            server.drop(each)
    else:
        with RedisServer(dump=file) as elsewhere:
            await _check(elsewhere.url("backed_up"), claim, before, written, secret)


async def _check(url: str, claim: Claim, before: set[str], written: set[str], secret: bytes) -> None:
    async with open_store(url) as restored:
        assert before <= {call.id for call in await restored.calls([claim.rollout.id])} <= written
        assert await restored.signing_secret() == secret
        assert await violations(restored) == []


def test_a_store_without_a_database_of_its_own_and_a_file_that_is_there_are_refused(tmp_path: Path) -> None:
    for url in ("memory://", "http://localhost:8088"):
        with pytest.raises(ConfigError, match="a server's store is backed up where it is"):
            backup_store(url, tmp_path / "store")
    (tmp_path / "there").touch()
    with pytest.raises(StoreError, match="name a new file"):
        backup_store(f"sqlite:///{tmp_path}/agl.db", tmp_path / "there")


def test_a_tool_that_is_missing_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StoreError, match=r"pg_dump is not installed here.*pg_dump --format=custom") as caught:
        backup_store("postgresql://agl:secret@db.example/agl", tmp_path / "store")
    assert "secret" not in str(caught.value)
