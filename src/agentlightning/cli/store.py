"""``agl store``: the database behind a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import Store, with_store

app = typer.Typer(help="Copy and look after a store.", no_args_is_help=True, rich_markup_mode=None)


@app.command("status")
def status(store: Store = None) -> None:
    """Print the state of each running run."""
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


@app.command("backup")
def backup(
    to: Annotated[Path, typer.Argument(metavar="FILE", help="The new file.")],
    store: Store = None,
) -> None:
    """Write the store to a new file while it is in use, by its database's own tool.

    PostgreSQL needs pg_dump, Redis redis-cli. The file holds secrets of the store: keep it as you keep those.
    """
    from agentlightning.store.backup import backup_store
    from agentlightning.store.open import require_file, store_url

    url = store_url(store)
    require_file(url)
    backup_store(url, to)
    typer.echo(f"{to}: the store as it was at one moment; copy the folder of its runs, too")
