"""Backup and restore: a store with its runs' folders as one folder, which knows whether it is as it was written.

    backup.json       of what it is: kind of store, folder of the runs
    store.*           the store of one moment
    runs/<id>/        the run's folder: configuration, tasks, numbers, checkpoints
    manifest.json     size and hash of every file

Driven by `agl store backup` and `restore`, while runs go on. Checkpoints are copied before the store: what it says of later
ones is passed over when a run is resumed from the copy, and steps after the last copied one are repeated from their lists.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from agentlightning.engines.saved_folders import MANIFEST, damage, seal
from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreError
from agentlightning.records import JSON
from agentlightning.runtime.disk import close_to_others, make_private_folder, open_private, sync
from agentlightning.store import snapshot
from agentlightning.store.base import LightningStore
from agentlightning.store.doctor import examine
from agentlightning.store.open import open_store
from agentlightning.store.server_lock import ServerLock
from agentlightning.trainer.checkpoint import RunFolder, checkpoint_damage
from agentlightning.trainer.checkpoint_files import local_folder
from agentlightning.trainer.run_lease import LEASE

ABOUT = "backup.json"
FORMAT = 1
PARTIAL = ".partial"
MAX_TRIES = 5
"""Looks at a run whose checkpoints are replaced while they are copied."""
LEFT_OUT = shutil.ignore_patterns("lock", ".*", "checkpoints")

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BackedUp:
    """Numbers of what a backup holds."""

    runs: int
    checkpoints: int


async def backup(url: str, runs: Path, to: Path, tell: Tell) -> BackedUp:
    """Write the new folder `to`. ConfigError where it exists, StoreError where something cannot be read or written."""
    kind = snapshot.kind_of(url)
    partial = to.with_name(to.name + PARTIAL)
    try:
        await asyncio.to_thread(_make, to, partial)
        async with open_store(url) as store:
            ids = [run.id for run in await store.runs()]
            copied = 0
            for run_id in ids:
                copied += await _copy_checkpoints(store, RunFolder(runs, run_id), partial / "runs" / run_id, tell)
        await asyncio.to_thread(snapshot.save, url, partial / snapshot.FILES[kind])
        about = {"format": FORMAT, "kind": kind, **snapshot.keys_of(url)}
        await asyncio.to_thread(_complete, partial, to, runs, ids, about, tell)
    except (OSError, shutil.Error) as cause:
        raise StoreError(f"{to}: cannot be written: {cause}") from cause
    return BackedUp(len(ids), copied)


async def restore(source: Path, url: str, runs: Path) -> BackedUp:
    """Make the store and the runs' folders of a backup, and check them. ConflictError where there is something already."""
    about = await asyncio.to_thread(_about, source)
    if snapshot.kind_of(url) != about["kind"]:
        raise ConfigError(f"store: the backup is of a store of kind {about['kind']}; name one of that kind")
    folders = sorted(path for path in (source / "runs").glob("*") if path.is_dir())
    for folder in folders:
        if (runs / folder.name).exists():
            raise ConflictError(f"{runs / folder.name}: exists already; name another --runs folder, or move it away")
    with ServerLock(url):
        await asyncio.to_thread(snapshot.check_empty, url)
        try:
            for folder in folders:
                await asyncio.to_thread(_restore_folder, folder, runs, Path(about["runs"]), url)
        except (OSError, shutil.Error) as cause:
            raise StoreError(f"{runs}: cannot be written: {cause}") from cause
        # The store goes last: with it a restore is complete, and without it nothing looks at the folders.
        file = source / snapshot.FILES[snapshot.kind_of(url)]
        await asyncio.to_thread(snapshot.load, file, url, about)
        async with open_store(url) as store:
            ids = [run.id for run in await store.runs()]
            for run_id in ids:
                await _move_models(store, run_id, Path(about["runs"]), runs)
            copied = sum([await _move_checkpoints(store, run_id, Path(about["runs"]), runs) for run_id in ids])
            for run in await store.runs():
                if run.summary.get(LEASE):  # who holds it trains over the store that this is a copy of
                    await store.update_run(run.id, summary={LEASE: None})
            if wrong := [finding.sentence async for finding in examine(store) if finding.kind == "wrong"]:
                raise StoreError(f"the restored store is not right, {len(wrong)} invariants are violated: {wrong[0]}")
    return BackedUp(len(ids), copied)


def _make(to: Path, partial: Path) -> None:
    if to.exists():
        raise ConfigError(f"{to}: exists already; name a new folder")
    shutil.rmtree(partial, ignore_errors=True)  # of a backup that was interrupted
    partial.mkdir(parents=True, mode=0o700)


def _complete(partial: Path, to: Path, runs: Path, ids: Sequence[str], about: JSON, tell: Tell) -> None:
    """Copy the rest of the runs' folders, and give the backup its name once all of it is on the disk."""
    for run_id in ids:
        if (folder := runs / run_id).is_dir():
            shutil.copytree(folder, partial / "runs" / run_id, ignore=LEFT_OUT, dirs_exist_ok=True)
        else:
            tell(f"{run_id}: has no folder in {runs}; only its records are kept")
    text = orjson.dumps({**about, "runs": str(runs.resolve())}, option=orjson.OPT_INDENT_2)
    with open_private(partial / ABOUT, "wb") as file:
        file.write(text + b"\n")
    seal(partial)
    partial.rename(to)
    sync(to.parent)


async def _copy_checkpoints(store: LightningStore, folder: RunFolder, to: Path, tell: Tell) -> int:
    """Copies those that are there; at least one, where there is one at all. A run that goes on deletes old ones."""
    for _ in range(MAX_TRIES):
        found = [
            path for one in await store.checkpoints(folder.run_id) if _own(path := local_folder(one, folder), folder)
        ]
        copied = [path for path in found if await asyncio.to_thread(_copied, path, to)]
        if copied or not found:
            return len(copied)
    tell(f"{folder.run_id}: none of its checkpoints is whole; resumed from this backup, it begins again")
    return 0


def _own(path: Path, folder: RunFolder) -> bool:
    """A checkpoint in the run's own folder: who may write to the store must not choose what is copied."""
    return path.is_dir() and path.resolve().parent == (folder.path / "checkpoints").resolve()


def _copied(checkpoint: Path, to: Path) -> bool:
    """Copy a checkpoint that is as it was written; False where it is not, or where any of it is deleted meanwhile.

    One of an earlier version has no manifest: it is whole where nothing was deleted of it until it was copied.
    """
    copy = to / "checkpoints" / checkpoint.name
    shutil.rmtree(copy, ignore_errors=True)
    names = _names(checkpoint)
    try:
        shutil.copytree(checkpoint, copy)
        if names == _names(checkpoint) and checkpoint_damage(copy) is None:
            return True
    except (FileNotFoundError, shutil.Error):
        if names == _names(checkpoint):  # nothing was deleted: the disk is full, or a file may not be read
            raise
    shutil.rmtree(copy, ignore_errors=True)
    return False


def _names(folder: Path) -> list[str]:
    """Lists all files and folders in it; those that are deleted at this moment may be missing."""
    return sorted(os.path.join(at, name) for at, folders, files in os.walk(folder) for name in (*folders, *files))


def _about(source: Path) -> JSON:
    """Says what a whole backup is of. NotFoundError where there is none, StoreError where it is damaged."""
    if not (source / ABOUT).is_file() or not (source / MANIFEST).is_file():
        raise NotFoundError(f"{source}: is no backup; name a folder that agl store backup has written")
    if found := damage(source):
        raise StoreError(f"{source}: is not as it was written: {found}; use another backup")
    about: JSON = orjson.loads((source / ABOUT).read_bytes())
    if about["format"] != FORMAT:
        raise StoreError(f"{source}: is of a newer version of agentlightning; upgrade, then restore it")
    return about


def _restore_folder(folder: Path, runs: Path, former: Path, url: str) -> None:
    """Copy a run's folder whole; its configuration names the places where things are now."""
    half = runs / f".{folder.name}.restoring"
    shutil.rmtree(half, ignore_errors=True)
    make_private_folder(runs)
    make_private_folder(half)
    shutil.copytree(folder, half, dirs_exist_ok=True)
    close_to_others(half)  # a folder of an earlier version brings its mode with it
    (half / "checkpoints").mkdir(exist_ok=True)
    open_private(half / "lock", "ab").close()  # by it a run's state is known, which no process holds here
    if (config := half / "config.json").exists():
        table = _moved(
            orjson.loads(config.read_bytes()), str(former / folder.name), str((runs / folder.name).resolve())
        )
        table["store"]["url"] = url
        with config.open("wb") as file:
            file.write(orjson.dumps(table, option=orjson.OPT_INDENT_2) + b"\n")
    for path in (*half.rglob("*"), half):
        sync(path)
    half.rename(runs / folder.name)
    sync(runs)


def _moved(value: object, former: str, now: str) -> JSON:
    """The value with every path in the former folder as one in the present folder."""
    if isinstance(value, dict):
        return {name: _moved(each, former, now) for name, each in value.items()}
    if isinstance(value, list):
        return [_moved(each, former, now) for each in value]  # type: ignore[return-value]
    if isinstance(value, str) and (value == former or value.startswith(f"{former}{os.sep}")):
        return now + value.removeprefix(former)  # type: ignore[return-value]
    return value  # type: ignore[return-value]


async def _move_checkpoints(store: LightningStore, run_id: str, former: Path, runs: Path) -> int:
    """Tell the store where the checkpoints are now; returns how many are there."""
    here = (runs / run_id / "checkpoints").resolve()
    found = await store.checkpoints(run_id)
    for one in found:
        if Path(one.path).parent == former / run_id / "checkpoints" != here:
            await store.put_checkpoint(replace(one, path=str(here / Path(one.path).name)))
    return sum((here / local_folder(one, RunFolder(runs, run_id)).name).is_dir() for one in found)


async def _move_models(store: LightningStore, run_id: str, former: Path, runs: Path) -> None:
    """Tell the store where the weights of the run's model versions are now."""
    was, here = f"file://{former / run_id}/", f"file://{(runs / run_id).resolve()}/"
    for version in await store.models(run_id=run_id):
        url = str(version.weights["url"])
        if url.startswith(was) and not version.deleted:
            await store.register_model(
                replace(version, weights={**version.weights, "url": here + url.removeprefix(was)})
            )


def described(done: BackedUp) -> str:
    """Says it for people."""
    return f"{done.runs} runs, {done.checkpoints} checkpoints"
