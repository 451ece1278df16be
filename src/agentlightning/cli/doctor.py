"""``agl store doctor`` and ``agl store status``: is everything right, and what goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.options import Store, with_store

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.store.doctor import DoctorProgress

MAX_SHOWN = 100
"""Findings that are printed; the rest are counted."""


def doctor(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN…]", help="Only these runs.")] = None,
    store: Store = None,
) -> None:
    """Check the store's invariants; exits with 1 if one is violated.

    Reads everything and changes nothing; the store may be in use meanwhile.
    """
    from rich.console import Console
    from rich.progress import Progress

    from agentlightning.store import doctor as doctors

    console = Console(stderr=True)
    checked = doctors.DoctorProgress()
    wrong = 0

    async def work(opened: LightningStore) -> None:
        nonlocal wrong

        def on_progress(now: DoctorProgress) -> None:
            nonlocal checked
            checked = now
            bar.update(task, description=_said(now))

        async for finding in doctors.examine(opened, runs, on_progress):
            wrong += finding.kind == "wrong"
            if finding.kind == "note" or wrong <= MAX_SHOWN:
                typer.echo(f"{finding.kind}: {finding.run_id and f'run {finding.run_id}: '}{finding.sentence}")

    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("looking", total=None)
        with_store(store, work)
    if wrong > MAX_SHOWN:
        typer.echo(f"and {wrong - MAX_SHOWN} more")
    if wrong:
        typer.echo(f"{wrong} invariants are violated in {_said(checked)}")
        raise typer.Exit(1)
    typer.echo(f"nothing is wrong in {_said(checked)}")


def status(store: Store = None) -> None:
    """Prints the state of each running run."""
    from rich.table import Table

    from agentlightning.trainer.display import screen

    numbers = with_store(store, lambda opened: opened.statistics())
    table = Table(box=None)
    table.add_column("run", no_wrap=True)
    for column in ("queued", "oldest queued", "running", "leases expiring", "workers"):
        table.add_column(column, justify="right")
    for one in numbers:
        oldest = f"{one.oldest_queued_s:.0f} s" if one.queued else ""
        counts = (one.queued, oldest, one.running, one.expiring, one.workers)
        table.add_row(one.run_id, *map(str, counts))
    screen().print(table if numbers else "no run is running")


def _said(checked: DoctorProgress) -> str:
    return f"{checked.runs} runs, {checked.rollouts} rollouts, {checked.calls} calls, {checked.steps} steps"
