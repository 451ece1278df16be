"""``agl store doctor`` and ``agl store status``: is everything right, and what goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.options import Store, open_store, store_url

if TYPE_CHECKING:
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
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from agentlightning.store import doctor as doctors

    console = Console(stderr=True)
    checked = doctors.DoctorProgress()
    wrong = 0

    async def work(bar: Progress) -> None:
        nonlocal wrong
        task = bar.add_task("looking", total=None)

        def on_progress(now: DoctorProgress) -> None:
            nonlocal checked
            checked = now
            bar.update(task, description=_said(now))

        async with open_store(store_url(store)) as opened:
            async for finding in doctors.examine(opened, runs, on_progress):
                wrong += finding.kind == "wrong"
                if finding.kind == "note":
                    typer.echo(f"note: run {finding.run_id}: {finding.sentence}")
                elif wrong <= MAX_SHOWN:
                    typer.echo(f"wrong: run {finding.run_id}: {finding.sentence}")

    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        asyncio.run(work(bar))
    if wrong > MAX_SHOWN:
        typer.echo(f"and {wrong - MAX_SHOWN} more")
    if wrong:
        typer.echo(f"{wrong} invariants are violated in {_said(checked)}")
        raise typer.Exit(1)
    typer.echo(f"nothing is wrong in {_said(checked)}")


def status(store: Store = None) -> None:
    """Prints the state of each running run."""
    import asyncio

    from rich.table import Table

    from agentlightning.trainer.display import screen

    async def work() -> None:
        async with open_store(store_url(store)) as opened:
            numbers = await opened.statistics()
        table = Table(box=None)
        table.add_column("run", no_wrap=True)
        for column in ("queued", "oldest queued", "running", "leases expiring", "workers"):
            table.add_column(column, justify="right")
        for one in numbers:
            oldest = f"{one.oldest_queued_s:.0f} s" if one.queued else ""
            counts = (one.queued, oldest, one.running, one.expiring, one.workers)
            table.add_row(one.run_id, *map(str, counts))
        screen().print(table if numbers else "no run is running")

    asyncio.run(work())


def _said(checked: DoctorProgress) -> str:
    return f"{checked.runs} runs, {checked.rollouts} rollouts, {checked.calls} calls, {checked.steps} steps"
