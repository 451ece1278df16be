"""The end of stored runs: written to files that other programs read, and deleted when too old or too many.

Driven by `agl runs export`, `archive` and `delete`, and by a server that is configured to prune. Reads in portions, so that
a run of any size passes through a bounded memory. A folder appears under its name once every file is complete and on disk.

    run.json                   the run, its resources, checkpoints and model versions, and how many records the files hold
    rollouts, attempts, calls, spans, rewards, metrics, steps      .jsonl or .parquet, one record per line or row
    images/                    files of images as agents sent them, named by the SHA-256 of their bytes

Fields are those of records.py. A call holds what its parent did not have: its whole prompt is its parent's prompt, the
parent's `sampled_ids`, then its own `suffix_ids` (so for `messages`, with the parent's `completion` between). A parent comes
before its children.

Pruning deletes whole runs, the longest unchanged first, and never one that is running. Of runs that stay it drops the
records of rollouts that no crash can ask for again: a step that a checkpoint covers is not executed again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import orjson

from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreError
from agentlightning.records import FINAL_STATES, Attempt, Call, Metric, Reward, Rollout, Run, RunSize, Span, Step
from agentlightning.runtime.disk import make_private_folder, open_private, sync
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import find_run, read_calls, read_metrics, read_rollouts, read_steps

log = logging.getLogger(__name__)

Format = Literal["jsonl", "parquet"]
KINDS: dict[str, type] = {
    "rollouts": Rollout,
    "attempts": Attempt,
    "calls": Call,
    "spans": Span,
    "rewards": Reward,
    "metrics": Metric,
    "steps": Step,
}
"""File by file, what a record of it is."""

Write = Callable[[Sequence[Any]], None]  # appends records to a file, which is on the disk when its context ends


async def export_run(
    store: LightningStore,
    run_id: str,
    folder: Path,
    format: Format = "jsonl",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, int]:
    """Write the run to the new folder; returns how many records each file holds. `on_progress` gets how many rollouts of
    how many are written. NotFoundError if there is no such run, ConfigError if the folder exists, MissingExtraError where
    Parquet needs a package, StoreError where the disk refuses."""
    run = await find_run(store, run_id)
    counts = dict.fromkeys(KINDS, 0)
    try:
        partial = _new_folder(folder)
        with ExitStack() as stack:
            files = {kind: stack.enter_context(_file(partial / f"{kind}.{format}", kind)) for kind in KINDS}
            async for kind, records in _records(store, run_id, on_progress):
                files[kind](records)
                counts[kind] += len(records)
                if kind == "calls":
                    await _write_images(store, run_id, records, partial / "images")
        about = {
            "run": run,
            "resources": await store.resources(run_id, latest=False),
            "checkpoints": await store.checkpoints(run_id),
            "models": await store.models(run_id=run_id),
            "records": counts,
        }
        with _new_file(partial / "run.json") as file:
            file.write(orjson.dumps(about, option=orjson.OPT_INDENT_2))
        sync(partial)
        partial.rename(folder)
        sync(folder.parent)
    except OSError as error:
        raise StoreError(f"--to: {folder} cannot be written: {error.strerror or error}") from error
    return counts


async def archive_run(
    store: LightningStore,
    run_id: str,
    folder: Path,
    format: Format = "jsonl",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, int]:
    """Export the run, then delete it, once the files are complete and hold every rollout. Raises as `export_run` does."""
    counts = await export_run(store, run_id, folder, format, on_progress)
    stored = sum((await store.count(run_id)).values())
    if stored != counts["rollouts"]:
        raise StoreError(
            f"{run_id}: got rollouts while it was written to {folder} ({stored} now, {counts['rollouts']} there), and is "
            "kept; end what writes to it, and archive it again"
        )
    await store.delete_runs([run_id])
    return counts


async def _records(
    store: LightningStore, run_id: str, on_progress: Callable[[int, int], None]
) -> AsyncIterator[tuple[str, Sequence[Any]]]:
    total, done = sum((await store.count(run_id)).values()), 0
    on_progress(done, total)
    async for rollouts in read_rollouts(store, RolloutQuery(run_id=run_id)):
        ids = [rollout.id for rollout in rollouts]
        yield "rollouts", rollouts
        yield "attempts", await store.attempts(ids)
        # By rollout and attempt, and then by their ends: a parent had ended before its child began.
        yield "calls", sorted(await read_calls(store, rollouts), key=lambda call: (call.rollout_id, call.attempt))
        yield "spans", await store.spans(ids)
        yield "rewards", await store.rewards(ids)
        done += len(rollouts)
        on_progress(done, max(done, total))
    async for metrics in read_metrics(store, run_id):
        yield "metrics", metrics
    async for steps in read_steps(store, run_id):
        yield "steps", steps


async def _write_images(store: LightningStore, run_id: str, calls: Iterable[Call], folder: Path) -> None:
    for name in sorted({image.hash for call in calls for image in call.images}):
        if (folder / name).exists():
            continue
        for data in (await store.files(run_id, [name])).values():  # one at a time: an image may have megabytes
            make_private_folder(folder)
            with _new_file(folder / name) as file:
                file.write(data)


@contextmanager
def _new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that is on the disk when its context ends."""
    with open_private(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _file(path: Path, kind: str) -> AbstractContextManager[Write]:
    if path.suffix == ".jsonl":
        return _json_lines(path)
    from agentlightning.store.parquet import parquet_file

    return parquet_file(path, KINDS[kind])


@contextmanager
def _json_lines(path: Path) -> Iterator[Write]:
    with _new_file(path) as file:
        yield lambda records: file.writelines(
            orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE) for record in records
        )


def _new_folder(folder: Path) -> Path:
    """Makes the folder in which the files are written until they are complete."""
    if folder.exists():
        raise ConfigError(f"--to: {folder} exists already; name a new folder")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was interrupted
    make_private_folder(partial)
    return partial


# --- pruning ----------------------------------------------------------------------------------------------------------

DAY_NS = 86_400 * 10**9
EVERY_S = 3600.0  # time between two looks of a server
REFUSALS = (ConflictError, NotFoundError)
"""Errors about one run or step; any other is of the store itself, and ends a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Bounds of what is kept. None: everything."""

    days: float | None = None  # runs that changed within so many days
    bytes: int | None = None  # runs until their sizes add up to this
    record_days: float | None = None  # calls and spans of consumed rollouts, for so many days after they finished


KEEP_ALL = Keep()


@dataclass(frozen=True, slots=True)
class Doomed:
    """A run that is to go, and why."""

    run: Run
    reason: str
    bytes: int | None = None


async def find_doomed(store: LightningStore, keep: Keep, now_ns: int) -> list[Doomed]:
    """Runs beyond what is kept, in the order in which they go."""
    runs = sorted(await store.runs(), key=lambda run: (run.updated_ns, run.id))
    sizes = {} if keep.bytes is None else {size.run_id: size for size in await store.sizes()}
    return choose(runs, sizes, keep, now_ns)


def choose(runs: Sequence[Run], sizes: dict[str, RunSize], keep: Keep, now_ns: int) -> list[Doomed]:
    """Chooses as `find_doomed` does, from runs that are given, the longest unchanged first."""
    left = sum(size.bytes for size in sizes.values())
    doomed = []
    for run in runs:
        age_days = (now_ns - run.updated_ns) / DAY_NS
        size = sizes[run.id].bytes if run.id in sizes else None
        old, large = keep.days is not None and age_days > keep.days, keep.bytes is not None and left > keep.bytes
        if run.state != "running" and (old or large):
            reason = f"unchanged for {age_days:.0f} days" if old else "the store is too large"
            doomed.append(Doomed(run, reason, size))
            left -= size or 0
    return doomed


async def prune(store: LightningStore, keep: Keep, now_ns: int) -> tuple[list[Doomed], int]:
    """Delete what is beyond what is kept; the runs that went, and how many calls of runs that stay."""
    gone = await delete_doomed(store, await find_doomed(store, keep, now_ns))
    return gone, await drop_old_records(store, keep, now_ns)


async def delete_doomed(store: LightningStore, doomed: Sequence[Doomed]) -> list[Doomed]:
    """Delete these runs; those that went. One that the store refuses to delete is logged, and keeps no other."""
    gone = []
    for one in doomed:
        try:
            await store.delete_runs([one.run.id])
        except REFUSALS as cause:
            log.warning("run %s was not deleted: %s", one.run.id, cause)
        else:
            gone.append(one)
    return gone


async def drop_old_records(
    store: LightningStore, keep: Keep, now_ns: int, *, without: Collection[str] = (), dry: bool = False
) -> int:
    """Delete calls and spans that are older than what is kept, but for runs `without`; how many calls. `dry`: delete
    nothing, and count what the rollouts say they have."""
    if keep.record_days is None:
        return 0
    before_ns = now_ns - int(keep.record_days * DAY_NS)
    dropped = 0
    for run in await store.runs():
        if run.id in without:
            continue
        checkpoints = await store.checkpoints(run.id)
        covered = max((checkpoint.step for checkpoint in checkpoints), default=0)
        async for steps in read_steps(store, run.id):
            for step in steps:
                if step.state == "closed" and step.step <= covered:
                    dropped += await _drop(store, step, before_ns, dry)
    return dropped


async def _drop(store: LightningStore, step: Step, before_ns: int, dry: bool) -> int:
    ids = [consumed.rollout_id for consumed in step.consumed]
    found = await store.rollouts(RolloutQuery(ids=ids)) if ids else []
    beside = RolloutQuery(run_id=step.run_id, mode="eval", step=step.step)
    forks = [one for one in await store.rollouts(beside) if one.kind == "credit"]
    found += [one for one in forks if one.state in FINAL_STATES]
    old = [rollout for rollout in found if rollout.finished_ns is not None and rollout.finished_ns < before_ns]
    if dry:
        return sum(rollout.calls for rollout in old)
    try:
        return await store.drop_records([rollout.id for rollout in old]) if old else 0
    except REFUSALS as cause:
        log.warning("records of step %d of run %s were not deleted: %s", step.step, step.run_id, cause)
        return 0


async def keep_pruned(store: LightningStore, keep: Keep) -> None:
    """Prune for ever, once an hour. What a store refuses is logged, and tried again."""
    while True:
        try:
            doomed, dropped = await prune(store, keep, time.time_ns())
        except StoreError as cause:
            log.warning("the store was not pruned: %s", cause)
        else:
            for one in doomed:
                log.info("run %s was deleted: %s", one.run.id, one.reason)
            if dropped:
                log.info("%d calls of rollouts that were learned from long ago were deleted", dropped)
        await asyncio.sleep(EVERY_S)
