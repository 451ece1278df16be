"""``agl store``: the database behind a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.options import Store

app = typer.Typer(help="Copy a store.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def options() -> None:
    """Copy a store."""


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
