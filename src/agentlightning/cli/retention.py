"""``agl runs delete|archive|export|prune``: the end of data."""

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

To = Annotated[Path, typer.Option("--to", help="New folder for the files.")]
Format = Annotated[Literal["jsonl", "parquet"], typer.Option("--format", help="jsonl or parquet.")]
Force = Annotated[bool, typer.Option("--force", help="Also a run that is running.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def delete(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Ids of runs.")],
    store: Store = None,
    force: Force = False,
    yes: Yes = False,
) -> None:
    """Delete runs with everything that the store holds of them. Checkpoints are files, and stay.

    With a search over prompts goes the run of what its optimizer model was asked, RUN-optimizer.
    """

    async def work(opened: LightningStore) -> None:
        for run in dict.fromkeys(runs):
            await _refuse_running(opened, run, force)
        beside = await _optimizer_runs(opened, runs)
        _ask(f"delete {', '.join(dict.fromkeys([*runs, *beside]))} for ever?", yes)
        deleted = await opened.delete_runs(runs)  # first, since it may be refused: then the answers stay, too
        typer.echo(f"{deleted + await opened.delete_runs(beside)} deleted")

    with_store(store, work)


def archive(
    run: RunId, to: To, format: Format = "jsonl", store: Store = None, force: Force = False, yes: Yes = False
) -> None:
    """Write a run to files as `export` does, and delete it from the store once they are complete."""
    from agentlightning.store.export import archive_run

    async def work(opened: LightningStore) -> None:
        await _refuse_running(opened, run, force)
        _ask(f"write {run} to {to} and delete it from the store?", yes)
        with _progress(run) as on_progress:
            counts = await archive_run(opened, run, to, format, on_progress)
        typer.echo(f"{_said(counts)}: {to}; the store holds {run} no longer")

    with_store(store, work)


def export(run: RunId, to: To, format: Format = "jsonl", store: Store = None) -> None:
    """Write a run to files, one for each kind of record, for other programs; its model: agl export."""
    from agentlightning.store.export import export_run

    with _progress(run) as on_progress:
        counts = with_store(store, lambda opened: export_run(opened, run, to, format, on_progress))
    typer.echo(f"{_said(counts)}: {to}")


def prune(
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Delete runs that did not change for so long: 30d, 12h, 8w.")
    ] = None,
    keep_size: Annotated[
        str | None, typer.Option("--keep-size", help="Delete runs until the others hold so much: 10GB, 500MB.")
    ] = None,
    keep_records: Annotated[
        str | None,
        typer.Option("--keep-records", help="Delete calls and spans of rollouts learned from so long ago: 7d."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")
    ] = False,
    store: Store = None,
    yes: Yes = False,
) -> None:
    """Delete what is old: whole runs, the longest unchanged first, and never one that is running."""
    import time

    from agentlightning.store.pruning import Keep, delete_doomed, drop_old_records, find_doomed

    keep = Keep(
        days=days_of(older_than, "--older-than"),
        bytes=bytes_of(keep_size, "--keep-size"),
        record_days=days_of(keep_records, "--keep-records"),
    )
    if keep == Keep():
        raise ConfigError("agl runs prune: say what to keep, with --older-than, --keep-size or --keep-records")

    async def work(opened: LightningStore) -> None:
        now_ns = time.time_ns()
        doomed = await find_doomed(opened, keep, now_ns)
        for one in doomed:
            size = "" if one.bytes is None else f" ({shown_bytes(one.bytes)})"
            typer.echo(f"{one.run.id}  {one.run.name}  {one.run.state}: {one.reason}{size}")
        if doomed and not dry_run:
            _ask(f"delete these {len(doomed)} runs for ever?", yes)
            doomed = await delete_doomed(opened, doomed)
        gone = {one.run.id for one in doomed}
        calls = await drop_old_records(opened, keep, now_ns, without=gone, dry=dry_run)
        would = "would be " if dry_run else ""
        typer.echo(f"{len(doomed)} runs {would}deleted, and {calls} calls of runs that stay")

    with_store(store, work)


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


def _said(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in counts.items() if number) or "nothing but the run"
