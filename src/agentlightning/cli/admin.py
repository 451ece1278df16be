"""``agl tokens`` and ``agl store``: who may use a store, and its backup."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentlightning.cli.options import (
    Json,
    Server,
    Store,
    one_store,
    print_columns,
    print_json,
    seconds_of,
    time_text,
    with_store,
)
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore
    from agentlightning.store.tokens import NewToken

Run = Annotated[str | None, typer.Option("--run", help="Id of a run.")]

tokens = typer.Typer(help="Create, list and revoke access tokens.", no_args_is_help=True, rich_markup_mode=None)
store_app = typer.Typer(help="Copy a store.", no_args_is_help=True, rich_markup_mode=None)


@tokens.command("create")
def create_token(
    role: Annotated[
        Literal["admin", "trainer", "worker", "reader", "client"], typer.Option("--role", help="What it may do.")
    ],
    run: Run = None,
    name: Annotated[str | None, typer.Option("--name", help="Whose it is; by default its role.")] = None,
    expires: Annotated[str | None, typer.Option("--expires", help="End it after so long: 90m, 12h, 7d.")] = None,
    store: Store = None,
    server: Server = None,
) -> None:
    """Make a token and print its secret, once; the store keeps its hash.

    A worker needs a run, and so does a client, which asks the model that its run serves. A trainer without one gets the
    first run that it creates; a reader without one reads all runs.
    """
    from agentlightning.config.run import LIMITS_RESOURCE

    lifetime_s = seconds_of(expires, "--expires")

    async def work(opened: LightningStore) -> tuple[NewToken, list[str]]:
        made = await opened.create_token(name or role, role, run, lifetime_s)
        limits = await opened.resources(run, LIMITS_RESOURCE) if role == "client" and run is not None else []
        return made, sorted(limits[0].value.get("keys") or ()) if limits else []

    made, limited = with_store(one_store(store, server), work)
    token = made.token
    if limited and token.name not in limited:
        typer.echo(f"--name: {token.name} has no limits; names with limits are {', '.join(limited)}", err=True)
    of = "" if token.run_id is None else f" of run {token.run_id}"
    typer.echo(f"token {token.id}, {token.role}{of}; it is not shown again:", err=True)
    typer.echo(made.secret)


@tokens.command("list")
def list_tokens(
    run: Run = None,
    usage: Annotated[
        bool, typer.Option("--usage", help="Print what each serving key of --run has used, and its limits.")
    ] = False,
    as_json: Json = False,
    store: Store = None,
    server: Server = None,
) -> None:
    """List tokens, oldest first, including those that have ended."""
    if usage:
        if run is None:
            raise ConfigError("--usage: expected --run RUN with it, the run that serves")
        _list_usage(run, as_json, one_store(store, server))
        return
    found = with_store(one_store(store, server), lambda opened: opened.tokens(run))
    if as_json:
        print_json(found)
        return
    rows = [("token", "name", "role", "run", "created (UTC)", "expires (UTC)", "state")]
    now_ns = time.time_ns()
    for token in found:
        ended = token.ended(now_ns) or "valid"
        state = f"revoked {time_text(token.revoked_ns)}" if token.revoked_ns else ended
        times = time_text(token.created_ns), time_text(token.expires_ns)
        rows.append((token.id, token.name, token.role, token.run_id or "-", *times, state))
    print_columns(rows)


def _list_usage(run: str, as_json: bool, store: str | None) -> None:
    from agentlightning.gateway.limits import read_key_usage

    found = with_store(store, lambda opened: read_key_usage(opened, run))
    if as_json:
        print_json(found)
        return
    rows = [("token", "name", "calls", "tokens", "limits")]
    for one in found:
        limits = ", ".join(f"{setting} {bound}" for setting, bound in one.limits.items())
        rows.append((one.token, one.name, f"{one.calls}", f"{one.tokens}", limits or "-"))
    print_columns(rows)


@tokens.command("revoke")
def revoke_token(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="Id of the token.")],
    store: Store = None,
    server: Server = None,
) -> None:
    """End a token: servers refuse it within seconds."""
    revoked = with_store(one_store(store, server), lambda opened: opened.revoke_token(token))
    typer.echo(f"token {revoked.id} ({revoked.name}) is revoked since {time_text(revoked.revoked_ns)} UTC")


@store_app.callback()
def _store() -> None:
    """Copy a store."""


@store_app.command("backup")
def backup(
    to: Annotated[Path, typer.Argument(metavar="FILE", help="The new file.")],
    store: Store = None,
) -> None:
    """Write the store to a new file while it is in use.

    Its database's own tool does it: PostgreSQL needs pg_dump, Redis redis-cli. The file holds secrets of the store: keep it
    as you keep those.
    """
    from agentlightning.store.backup import backup_store
    from agentlightning.store.open import require_file, store_url

    url = store_url(store)
    require_file(url)
    backup_store(url, to)
    typer.echo(f"{to}: the store as it was at one moment; copy the folder of its runs, too")
