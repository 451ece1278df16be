"""Stored runs written to files that other programs read.

Driven by `agl runs export`. Reads in portions, so that a run of any size passes through a bounded
memory. A folder appears under its name once every file is complete and on disk.

    run.json                   the run, its resources, checkpoints and model versions, and how many records the files hold
    rollouts, attempts, calls, spans, rewards, metrics, steps      .jsonl or .parquet, one record per line or row
    images/                    files of images as agents sent them, named by the SHA-256 of their bytes

Fields are those of records.py. A call holds what its parent did not have: its whole prompt is its parent's prompt, the
parent's `sampled_ids`, then its own `suffix_ids` (so for `messages`, with the parent's `completion` between). A parent comes
before its children.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import orjson

from agentlightning.errors import ConfigError, StoreError
from agentlightning.records import Attempt, Call, Metric, Reward, Rollout, Span, Step
from agentlightning.runtime.disk import make_private_folder, open_private, sync
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.scan import find_run, read_calls, read_metrics, read_rollouts, read_steps

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
