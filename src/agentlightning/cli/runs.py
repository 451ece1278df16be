"""``agl runs``: the runs of a store."""

from __future__ import annotations

from typing import Annotated

import typer

from agentlightning.cli.options import Store, open_store, store_url

app = typer.Typer(help="List and show runs.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_runs(
    store: Store = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most runs to list.")] = 20,
) -> None:
    """List runs, newest first."""
    import asyncio

    from rich.table import Table

    from agentlightning.cli.display import screen

    async def work() -> None:
        async with open_store(store_url(store)) as opened:
            found = await opened.runs(limit=limit)
        table = Table(box=None)
        for column in ("run", "name", "state", "step", "reward", "held-out greedy", "created (UTC)"):
            table.add_column(column, no_wrap=column == "run")
        for run in found:
            summary = run.summary
            table.add_row(
                run.id,
                run.name,
                run.state,
                str(summary.get("step", "")),
                _number(summary.get("reward_mean")),
                _number(summary.get("heldout_greedy")),
                _time(run.created_ns),
            )
        screen().print(table if found else "no run yet; start one with: agl demo")

    asyncio.run(work())


@app.command("show")
def show_run(run: Annotated[str, typer.Argument(help="Id of the run.")], store: Store = None) -> None:
    """Show a run: its settings, rollouts by state, checkpoints and last metrics."""
    import asyncio

    import orjson

    from agentlightning.cli.display import screen
    from agentlightning.errors import NotFoundError

    async def work() -> None:
        async with open_store(store_url(store)) as opened:
            found = await opened.runs(ids=[run])
            if not found:
                raise NotFoundError(f"{run}: no such run; see: agl runs list")
            counts = await opened.count(run)
            checkpoints = await opened.checkpoints(run)
            metrics = [metric for metric in await opened.metrics(run) if not metric.abandoned]
        console = screen()
        console.print(f"{found[0].id}  {found[0].name}  {found[0].state}  created {_time(found[0].created_ns)} UTC")
        console.print_json(orjson.dumps(found[0].config).decode())
        for (mode, state), number in sorted(counts.items()):
            console.print(f"{mode} rollouts {state}: {number}")
        for checkpoint in checkpoints:
            console.print(f"checkpoint step {checkpoint.step}: {checkpoint.path}", soft_wrap=True)
        latest = {metric.name: metric for metric in metrics}
        for name, metric in sorted(latest.items()):
            console.print(f"{name}: {metric.value:.4g} (step {metric.step})")

    asyncio.run(work())


def _number(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else ""


def _time(nanoseconds: int) -> str:
    from datetime import UTC, datetime

    return f"{datetime.fromtimestamp(nanoseconds / 1e9, UTC):%Y-%m-%d %H:%M:%S}"
