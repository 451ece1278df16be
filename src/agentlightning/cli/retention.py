"""``agl runs export`` and ``agl runs delete``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentlightning.cli.options import RunId, Store, with_store
from agentlightning.cli.quantities import bytes_of, days_of, shown_bytes
from agentlightning.errors import ConfigError, ConflictError

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.store.retention import Keep

Force = Annotated[bool, typer.Option("--force", help="Also a run that is running.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def export(
    run: RunId,
    to: Annotated[Path, typer.Option("--to", help="New folder for the files.")],
    format: Annotated[Literal["jsonl", "parquet"], typer.Option("--format", help="jsonl or parquet.")] = "jsonl",
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the run from the store once the files are complete.")
    ] = False,
    store: Store = None,
    force: Force = False,
    yes: Yes = False,
) -> None:
    """Write a run to files, one per kind of record. To export its model: agl models export."""
    from agentlightning.store.retention import archive_run, export_run

    async def work(opened: LightningStore) -> dict[str, int]:
        if not delete:
            return await export_run(opened, run, to, format, on_progress)
        await _refuse_running(opened, run, force)
        _ask(f"write {run} to {to} and delete it from the store?", yes)
        return await archive_run(opened, run, to, format, on_progress)

    with _progress(run) as on_progress:
        counts = with_store(store, work)
    deleted = f"; {run} is deleted from the store" if delete else ""
    typer.echo(f"{_counted(counts)}: {to}{deleted}")


def delete(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]…", help="Ids of runs.")] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Delete runs unchanged for this long: 30d, 12h, 8w.")
    ] = None,
    keep_size: Annotated[
        str | None, typer.Option("--keep-size", help="Delete the oldest runs until the rest fit: 10GB, 500MB.")
    ] = None,
    keep_records: Annotated[
        str | None, typer.Option("--keep-records", help="Delete calls and spans trained on this long ago: 7d.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    store: Store = None,
    force: Force = False,
    yes: Yes = False,
) -> None:
    """Delete runs and all their records, by id or by age and size. Checkpoint folders stay on disk.

    By age and size, the longest unchanged runs go first and running ones never. Deleting a prompt search also deletes the
    run RUN-optimizer, which records its optimizer model's calls.
    """
    from agentlightning.store.retention import Keep

    keep = Keep(
        days=days_of(older_than, "--older-than"),
        bytes=bytes_of(keep_size, "--keep-size"),
        record_days=days_of(keep_records, "--keep-records"),
    )
    if bool(runs) == (keep != Keep()) or (runs and dry_run):
        raise ConfigError(
            "agl runs delete: give ids of runs, or --older-than, --keep-size or --keep-records (these with --dry-run)"
        )
    with_store(store, lambda opened: _delete(opened, runs, force, yes) if runs else _prune(opened, keep, dry_run, yes))


async def _delete(store: LightningStore, runs: Sequence[str], force: bool, yes: bool) -> None:
    for run in dict.fromkeys(runs):
        await _refuse_running(store, run, force)
    optimizer_runs = await _optimizer_runs(store, runs)
    _ask(f"delete {', '.join(dict.fromkeys([*runs, *optimizer_runs]))} permanently?", yes)
    deleted = await store.delete_runs(runs)  # first: where this is refused, the optimizer's runs stay, too
    typer.echo(f"{deleted + await store.delete_runs(optimizer_runs)} deleted")


async def _prune(store: LightningStore, keep: Keep, dry_run: bool, yes: bool) -> None:
    import time

    from agentlightning.store.retention import delete_doomed, drop_old_records, find_doomed

    now_ns = time.time_ns()
    doomed = await find_doomed(store, keep, now_ns)
    for one in doomed:
        size = "" if one.bytes is None else f" ({shown_bytes(one.bytes)})"
        typer.echo(f"{one.run.id}  {one.run.name}  {one.run.state}: {one.reason}{size}")
    if doomed and not dry_run:
        _ask(f"delete these {len(doomed)} runs permanently?", yes)
        doomed = await delete_doomed(store, doomed)
    gone = {one.run.id for one in doomed}
    calls = await drop_old_records(store, keep, now_ns, without=gone, dry=dry_run)
    would = "would be " if dry_run else ""
    typer.echo(f"{len(doomed)} runs {would}deleted, and {calls} calls of runs that stay")


async def _optimizer_runs(store: LightningStore, searches: Sequence[str]) -> list[str]:
    """Ids of the runs that keep what the optimizer models of these runs were asked."""
    from agentlightning.trainer.prompts.optimizer_model import OPTIMIZER_RUN

    names = {OPTIMIZER_RUN.format(run_id=run): f"optimizer {run}" for run in searches}
    found = await store.runs(list(names))
    return [run.id for run in found if run.name == names[run.id]]


async def _refuse_running(store: LightningStore, run: str, force: bool) -> None:
    from agentlightning.store.scan import find_run

    if (await find_run(store, run)).state == "running" and not force:
        raise ConflictError(f"{run}: is running; end it first (or, where its trainer has ended for good, add --force)")


def _ask(question: str, yes: bool) -> None:
    """On a terminal; a program that calls this has decided already."""
    import sys

    if not yes and sys.stdin.isatty():
        typer.confirm(question, abort=True)


@contextmanager
def _progress(run: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(f"{run} rollouts", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in counts.items() if number) or "nothing but the run"
