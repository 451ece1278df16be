"""``agl store``: the database behind a store."""

from __future__ import annotations

from typing import Annotated

import typer

from agentlightning.cli import doctor

app = typer.Typer(help="Upgrade and look after a store.", no_args_is_help=True, rich_markup_mode=None)
app.command("doctor")(doctor.doctor)
app.command("status")(doctor.status)


@app.command("upgrade")
def upgrade_store(
    store: Annotated[
        str | None,
        typer.Argument(help="Store URL: sqlite:///PATH or postgresql://… [AGL_STORE, else runs/agl.db]"),
    ] = None,
) -> None:
    """Bring the database of an older version to this one, in one transaction. Make a copy first."""
    from agentlightning.cli.display import screen
    from agentlightning.cli.options import require_file, store_url
    from agentlightning.store.sql.database import database_at
    from agentlightning.store.sql.schema import upgrade

    url = store_url(store)
    require_file(url)
    done = upgrade(database_at(url))
    if done.before == done.after:
        said = f"{done.name}: its schema has version {done.after}, the newest there is; nothing to do"
    else:
        said = f"{done.name}: upgraded from version {done.before} to {done.after}"
    screen().print(said, soft_wrap=True)
