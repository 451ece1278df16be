"""``agl store``: the database behind a store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli import doctor
from agentlightning.cli.options import Runs, Store
from agentlightning.store.open import Upgraded

app = typer.Typer(help="Upgrade, copy and look after a store.", no_args_is_help=True, rich_markup_mode=None)
app.command("doctor")(doctor.doctor)
app.command("status")(doctor.status)


@app.command("upgrade")
def upgrade_store(
    store: Annotated[
        str | None,
        typer.Argument(help="Store URL: sqlite:///PATH or postgresql://… [AGL_STORE, else runs/agl.db]"),
    ] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Bring a store and the folders of its runs from an older version to this one. Make a copy first.

    End what uses them before. The store is upgraded in one transaction; what was interrupted is completed by doing it again.
    """
    from agentlightning.store.open import require_file, store_url
    from agentlightning.store.server_lock import ServerLock
    from agentlightning.trainer.checkpoint import RunFolder
    from agentlightning.trainer.display import screen

    url = store_url(store)
    require_file(url)
    with ServerLock(url):
        done = _upgrade(url)
    if done.before == done.after:
        text = f"{done.name}: its schema has version {done.after}, the newest there is; nothing to do"
    else:
        text = f"{done.name}: upgraded from version {done.before} to {done.after}"
    screen().print(text, soft_wrap=True)
    for folder in sorted(path.parent for path in runs.glob("*/config.json")):
        if RunFolder(runs, folder.name).upgrade():
            screen().print(f"{folder}: upgraded", soft_wrap=True)


Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The backup.")]


@app.command("backup")
def backup_store(to: Folder, store: Store = None, runs: Runs = Path("runs")) -> None:
    """Write a store and its runs' folders to a new folder, while they are in use.

    PostgreSQL needs pg_dump, Redis redis-cli. A backup holds secrets of the store: keep it as you keep those.
    """
    from agentlightning.store.open import require_file, store_url
    from agentlightning.trainer.backup import backup, described
    from agentlightning.trainer.display import screen

    url = store_url(store)
    require_file(url)
    done = asyncio.run(backup(url, runs, to, lambda said: screen().print(said, soft_wrap=True)))
    screen().print(f"{to}: {described(done)}", soft_wrap=True)


@app.command("restore")
def restore_store(source: Folder, store: Store = None, runs: Runs = Path("runs")) -> None:
    """Make a store and its runs' folders from a backup, where there are none, and check them.

    PostgreSQL needs pg_restore, Redis redis-server. Runs are resumed as always, with --store where that is not runs/agl.db.
    """
    from agentlightning.store.open import store_url
    from agentlightning.trainer.backup import described, restore
    from agentlightning.trainer.checkpoint import make_default_folder
    from agentlightning.trainer.display import screen

    url = store_url(store)
    make_default_folder(url)
    done = asyncio.run(restore(source, url, runs))
    screen().print(f"restored and checked: {described(done)}", soft_wrap=True)


def _upgrade(url: str) -> Upgraded:
    from agentlightning.store.sql.database import database_at
    from agentlightning.store.sql.schema import upgrade

    return upgrade(database_at(url))
