"""``agl tokens``: who may use a store over HTTP, and who did what to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from agentlightning.cli.options import Json, Server, Store, one_store, with_store
from agentlightning.cli.quantities import seconds_of
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentlightning.store.audit import AuditEntry
    from agentlightning.store.base import LightningStore
    from agentlightning.store.tokens import NewToken

app = typer.Typer(
    help="Create, list and revoke access tokens; the audit log.", no_args_is_help=True, rich_markup_mode=None
)

Run = Annotated[str | None, typer.Option("--run", help="Id of a run.")]

PAGE = 1000


@app.command("create")
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
    if limited and made.token.name not in limited:
        typer.echo(f"--name: {made.token.name} has no limits; names with limits are {', '.join(limited)}", err=True)
    typer.echo(f"token {made.token.id}, {_what(made.token.role, made.token.run_id)}; it is not shown again:", err=True)
    typer.echo(made.secret)


@app.command("list")
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
    import time

    from agentlightning.cli.options import print_columns, print_json
    from agentlightning.trainer.display import screen

    found = with_store(one_store(store, server), lambda opened: opened.tokens(run))
    if as_json:
        print_json(found)
        return
    rows = [("token", "name", "role", "run", "created (UTC)", "expires (UTC)", "state")]
    now_ns = time.time_ns()
    for token in found:
        ended = token.ended(now_ns)
        state = "valid" if ended is None else f"revoked {_time(token.revoked_ns)}" if token.revoked_ns else ended
        times = _time(token.created_ns), _time(token.expires_ns)
        rows.append((token.id, token.name, token.role, token.run_id or "-", *times, state))
    print_columns(screen(), rows)


@app.command("revoke")
def revoke_token(
    token: Annotated[str, typer.Argument(metavar="TOKEN", help="Id of the token.")],
    store: Store = None,
    server: Server = None,
) -> None:
    """End a token: its server refuses it from the next request on, others within seconds."""
    revoked = with_store(one_store(store, server), lambda opened: opened.revoke_token(token))
    typer.echo(f"token {revoked.id} ({revoked.name}) is revoked since {_time(revoked.revoked_ns)} UTC")


@app.command("audit")
def show_audit(
    run: Run = None,
    after: Annotated[int, typer.Option("--after", min=0, help="Only entries after this number.")] = 0,
    store: Store = None,
    server: Server = None,
) -> None:
    """Print who deleted, cancelled, published, and gave or took access; oldest first."""
    import orjson

    from agentlightning.cli.options import print_columns
    from agentlightning.trainer.display import screen

    async def work(opened: LightningStore) -> Sequence[AuditEntry]:
        found: list[AuditEntry] = []
        while page := await opened.audit(run, found[-1].seq if found else after, PAGE):
            found += page
        return found

    rows = [("number", "time (UTC)", "who", "did", "to", "run", "detail")]
    for entry in with_store(one_store(store, server), work):
        detail = orjson.dumps(entry.detail).decode() if entry.detail else ""
        place = str(entry.seq), _time(entry.created_ns)
        rows.append((*place, entry.actor, entry.action, entry.subject, entry.run_id or "-", detail))
    print_columns(screen(), rows)


def _list_usage(run: str, as_json: bool, store: str | None) -> None:
    from dataclasses import asdict

    from agentlightning.cli.options import print_columns, print_json
    from agentlightning.gateway.limits import read_key_usage
    from agentlightning.trainer.display import screen

    found = with_store(store, lambda opened: read_key_usage(opened, run))
    if as_json:
        print_json([asdict(one) for one in found])
        return
    rows: list[tuple[str, ...]] = [("token", "name", "calls", "tokens", "limits")]
    for one in found:
        limits = ", ".join(f"{setting} {bound}" for setting, bound in one.limits.items())
        rows.append((one.token, one.name, f"{one.calls}", f"{one.tokens}", limits or "-"))
    print_columns(screen(), rows)


def _what(role: str, run_id: str | None) -> str:
    return f"{role} of run {run_id}" if run_id is not None else role


def _time(nanoseconds: int | None) -> str:
    from datetime import UTC, datetime

    return "-" if nanoseconds is None else f"{datetime.fromtimestamp(nanoseconds / 1e9, UTC):%Y-%m-%d %H:%M:%S}"
