"""Backups taken while a store is written to, and restored: nothing acknowledged before is missing, nothing is replaced."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import orjson
import pytest
import redis_server
from store_samples import a_call, a_worker, claimed, faults

from agentlightning.engines.saved_folders import MANIFEST, seal
from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreError
from agentlightning.records import Call, Checkpoint, Claim
from agentlightning.store import snapshot
from agentlightning.store.base import LightningStore
from agentlightning.store.open import open_store
from agentlightning.store.server_lock import ServerLock
from agentlightning.trainer.backup import backup, restore
from agentlightning.trainer.checkpoint import RunFolder
from agentlightning.trainer.checkpoint_files import last_checkpoint

NEEDS = {"sqlite": (), "postgres": ("pg_dump", "pg_restore"), "redis": ("redis-cli",)}


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """A store's URL, and one of an empty place for the same."""
    kind = request.param
    if missing := [program for program in NEEDS[kind] if shutil.which(program) is None]:
        pytest.skip(f"{missing[0]} is not installed")
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path}/agl.db", f"sqlite:///{tmp_path}/restored.db?timeout=20"
    elif kind == "postgres":
        server = request.getfixturevalue("postgres")
        urls = server.url(), f"{server.url()}?timeout=20"
        yield urls
        for url in urls:
            server.drop(url.partition("?")[0])
    else:
        server = request.getfixturevalue("redis")
        with redis_server.RedisServer() as elsewhere:
            yield server.url("backed.up-1"), elsewhere.url("backed.up-1").replace("/0?", "/3?")


async def test_a_copy_of_redis_in_which_the_stores_keys_are_not_found_is_an_error(
    redis: redis_server.RedisServer, tmp_path: Path
) -> None:
    url, file = redis.url("saved"), tmp_path / "store.rdb"
    async with open_store(url):
        await asyncio.to_thread(snapshot.save, url, file)
    with redis_server.RedisServer() as elsewhere:
        to = elsewhere.url("saved").replace("/0?", "/3?")
        with pytest.raises(
            StoreError, match=r"has no key of \?prefix=saved in database 3; a backup of an earlier version"
        ):
            await asyncio.to_thread(snapshot.load, file, to, {"prefix": "saved"})
        await asyncio.to_thread(snapshot.load, file, elsewhere.url("saved"), {"prefix": "saved"})


def quiet(_: str) -> None: ...


def a_checkpoint(runs: Path, run_id: str, step: int) -> Checkpoint:
    folder = runs / run_id / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "learner.pt").write_bytes(bytes(range(256)) * 100)
    seal(folder)
    return Checkpoint(run_id=run_id, step=step, path=str(folder.resolve()), version=step)


async def a_trained_run(store: LightningStore, runs: Path) -> Claim:
    """A run at work that has a folder with a checkpoint of before its first step."""
    [claim] = await claimed(store)
    await store.put_checkpoint(a_checkpoint(runs, claim.rollout.run_id, 0))
    folder = runs / claim.rollout.run_id
    config = {"store": {"url": "postgresql://user:secret@former/place"}, "data": {"train": f"{folder}/train.jsonl"}}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    (folder / "train.jsonl").write_text("{}\n")
    (folder / "lock").touch()
    return claim


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


async def test_a_backup_of_a_store_in_use_is_restored_elsewhere_and_right(
    places: tuple[str, str], tmp_path: Path
) -> None:
    url, empty = places
    runs, moved, to = tmp_path / "runs", tmp_path / "moved", tmp_path / "backups" / "monday"
    async with open_store(url) as store:
        claim = await a_trained_run(store, runs)
        run_id = claim.rollout.run_id
        async with writing(store, claim) as acknowledged:
            while len(acknowledged) < 20:
                await store.runs()
            before = {call.id for call in acknowledged}
            assert (await backup(url, runs, to, quiet)).checkpoints == 1
            goal = len(acknowledged) + 20
            while len(acknowledged) < goal:  # the store is not in its way afterwards either
                await store.runs()
        secret = await store.signing_secret()
        written = {call.id for call in await store.calls([claim.rollout.id])}
    assert to.stat().st_mode & 0o077 == 0
    assert not (to / "runs" / run_id / "lock").exists()

    moved.mkdir()
    done = await restore(to, empty, moved)
    assert (done.runs, done.checkpoints) == (1, 1)
    async with open_store(empty) as restored:
        found = {call.id for call in await restored.calls([claim.rollout.id])}
        assert before <= found <= written
        assert await restored.signing_secret() == secret
        assert await faults(restored) == []
        last = await last_checkpoint(restored, RunFolder(moved, run_id))
        assert last is not None
        assert last.path == str(moved.resolve() / run_id / "checkpoints" / "step-000000")
        assert await restored.heartbeat(a_worker(run_id), [claim.lease]) == [True]
    assert (moved / run_id / "lock").exists()  # by it `agl runs list` knows that the run was killed
    config = orjson.loads((moved / run_id / "config.json").read_bytes())
    assert config["store"]["url"] == empty
    assert config["data"]["train"] == str(moved / run_id / "train.jsonl")

    with pytest.raises(ConflictError, match="exists already; name another --runs folder"):
        await restore(to, empty, moved)
    (tmp_path / "third").mkdir()
    with pytest.raises(ConflictError, match="there is a store already, which a restore does not replace"):
        await restore(to, empty, tmp_path / "third")
    with pytest.raises(ConfigError, match="exists already; name a new folder"):
        await backup(url, runs, to, quiet)


@contextmanager
def changed(file: Path, data: bytes) -> Iterator[None]:
    before = file.read_bytes()
    file.write_bytes(data)
    yield
    file.write_bytes(before)


async def test_what_is_damaged_of_another_kind_or_served_is_not_restored(tmp_path: Path) -> None:
    url, runs, to = f"sqlite:///{tmp_path}/agl.db", tmp_path / "runs", tmp_path / "backup"
    async with open_store(url) as store:
        claim = await a_trained_run(store, runs)
        await backup(url, runs, to, quiet)
    empty, moved = f"sqlite:///{tmp_path}/new.db", tmp_path / "moved"
    moved.mkdir()
    weights = to / "runs" / claim.rollout.run_id / "checkpoints" / "step-000000" / "learner.pt"
    for file in (weights, to / "store.db"):
        with changed(file, file.read_bytes()[:-1] + b"?"), pytest.raises(StoreError, match="is not as it was written"):
            await restore(to, empty, moved)
    with pytest.raises(ConfigError, match="the backup is of a store of kind sqlite"):
        await restore(to, "redis://127.0.0.1:1/0", moved)
    with pytest.raises(NotFoundError, match="is no backup"):
        await restore(runs, empty, moved)
    for elsewhere in ("memory://", "http://127.0.0.1:1"):
        with pytest.raises(ConfigError, match="a server's store is backed up where it is"):
            await backup(elsewhere, runs, tmp_path / "other", quiet)
    with ServerLock(empty), pytest.raises(ConflictError, match="serves it already"):
        await restore(to, empty, moved)
    assert list(moved.iterdir()) == []
    assert not (tmp_path / "new.db").exists()


@pytest.mark.parametrize("end", ["-wal", "-shm", "-journal"])
async def test_nothing_is_restored_beside_the_log_of_a_former_store(tmp_path: Path, end: str) -> None:
    url, to, moved = f"sqlite:///{tmp_path}/agl.db", tmp_path / "backup", tmp_path / "moved"
    async with open_store(url):
        await backup(url, tmp_path / "runs", to, quiet)
    moved.mkdir()
    (tmp_path / f"new.db{end}").write_bytes(b"of a store that was here")
    with pytest.raises(ConflictError, match=rf"new\.db{end}: there is a store already"):
        await restore(to, f"sqlite:///{tmp_path}/new.db", moved)
    assert not (tmp_path / "new.db").exists()


async def test_a_checkpoint_that_is_damaged_or_elsewhere_is_not_copied(tmp_path: Path) -> None:
    url, runs, to = f"sqlite:///{tmp_path}/agl.db", tmp_path / "runs", tmp_path / "backup"
    async with open_store(url) as store:
        claim = await a_trained_run(store, runs)
        run_id = claim.rollout.run_id
        damaged = a_checkpoint(runs, run_id, 1)
        (Path(damaged.path) / "learner.pt").write_bytes(b"half")
        (tmp_path / "secrets").mkdir()
        (tmp_path / "secrets" / "learner.pt").write_text("not of this run")
        await store.put_checkpoint(damaged)
        await store.put_checkpoint(Checkpoint(run_id=run_id, step=2, path=str(tmp_path / "secrets"), version=2))
        assert (await backup(url, runs, to, quiet)).checkpoints == 1
    copied = [path.name for path in (to / "runs" / run_id / "checkpoints").iterdir()]
    assert copied == ["step-000000"]


async def test_a_checkpoint_that_is_being_deleted_while_it_is_copied_is_passed_over(tmp_path: Path) -> None:
    url, runs, to = f"sqlite:///{tmp_path}/agl.db", tmp_path / "runs", tmp_path / "backup"
    async with open_store(url) as store:
        claim = await a_trained_run(store, runs)
        run_id = claim.rollout.run_id
        (old,) = await store.checkpoints(run_id)
        files = [Path(old.path) / f"part-{number}" for number in range(2000)]
        for file in files:
            file.write_bytes(bytes(100))
        await store.put_checkpoint(a_checkpoint(runs, run_id, 1))
        copy = to.with_name("backup.partial") / "runs" / run_id / "checkpoints" / Path(old.path).name

        def delete() -> None:
            """Delete some of what is about to be copied; the folder stays, as it does while a trainer is at it."""
            while not any(copy.glob("part-*")):
                pass
            for file in files:
                if not (copy / file.name).exists():
                    file.unlink()

        deleting = asyncio.create_task(asyncio.to_thread(delete))
        assert (await backup(url, runs, to, quiet)).checkpoints == 1
        await deleting
    assert [path.name for path in (to / "runs" / run_id / "checkpoints").iterdir()] == ["step-000001"]


async def test_a_checkpoint_of_an_earlier_version_has_no_manifest_and_is_copied(tmp_path: Path) -> None:
    url, runs, to = f"sqlite:///{tmp_path}/agl.db", tmp_path / "runs", tmp_path / "backup"
    async with open_store(url) as store:
        claim = await a_trained_run(store, runs)
        (checkpoint,) = await store.checkpoints(claim.rollout.run_id)
        (Path(checkpoint.path) / MANIFEST).unlink()
        assert (await backup(url, runs, to, quiet)).checkpoints == 1
    copy = to / "runs" / claim.rollout.run_id / "checkpoints" / "step-000000" / "learner.pt"
    assert copy.read_bytes() == bytes(range(256)) * 100
