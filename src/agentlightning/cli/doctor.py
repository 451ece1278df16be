"""``agl store doctor`` and ``agl store status``: is everything right, and what goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.options import Store, open_store, store_url

if TYPE_CHECKING:
    from agentlightning.store.doctor import Checked

MOST_SHOWN = 100
"""Findings that are printed; the rest are counted."""


def doctor(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN…]", help="Only these runs.")] = None,
    store: Store = None,
) -> None:
    """Look through the store for what must never be; exits with 1 where something is.

    Reads everything and changes nothing; the store may be in use meanwhile.
    """
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    from agentlightning.store import doctor as doctors

    console = Console(stderr=True)
    checked = doctors.Checked()
    wrong = 0

    async def work(bar: Progress) -> None:
        nonlocal wrong
        task = bar.add_task("looking", total=None)

        def on_progress(now: Checked) -> None:
            nonlocal checked
            checked = now
            bar.update(task, description=_said(now))

        async with open_store(store_url(store)) as opened:
            async for finding in doctors.examine(opened, runs, on_progress):
                wrong += finding.kind == "wrong"
                if finding.kind == "note":
                    typer.echo(f"note: run {finding.run_id}: {finding.sentence}")
                elif wrong <= MOST_SHOWN:
                    typer.echo(f"wrong: run {finding.run_id}: {finding.sentence}")

    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        asyncio.run(work(bar))
    if wrong > MOST_SHOWN:
        typer.echo(f"and {wrong - MOST_SHOWN} more")
    if wrong:
        typer.echo(f"{wrong} things are wrong in {_said(checked)}")
        raise typer.Exit(1)
    typer.echo(f"nothing is wrong in {_said(checked)}")


def status(store: Store = None) -> None:
    """What goes on in each running run."""
    import asyncio

    from rich.table import Table

    from agentlightning.cli.display import screen

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


def _said(checked: Checked) -> str:
    return f"{checked.runs} runs, {checked.rollouts} rollouts, {checked.calls} calls, {checked.steps} steps"
