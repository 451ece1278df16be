"""Options that several commands share, declared once, and what they mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore

Runs = Annotated[Path, typer.Option("--runs", help="Folder that holds a folder for every run.")]
Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Store URL: sqlite:///PATH, postgresql://…, redis://…, memory:// or http://SERVER. "
        "[AGL_STORE, else runs/agl.db]",
    ),
]
Server = Annotated[
    str | None,
    typer.Option("--server", help="URL of a running `agl serve` (its key in AGL_SERVER_KEY)."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting: --set trainer.steps=20. May be repeated."),
]


def store_url(store: str | None) -> str:
    """--store, else AGL_STORE, else the SQLite file under runs/."""
    from agentlightning.config import DEFAULT_STORE

    return store or os.environ.get("AGL_STORE") or DEFAULT_STORE


def open_store(url: str) -> LightningStore:
    """The store that exists at `url`, for ``async with``; a server's key is read from AGL_SERVER_KEY."""
    from agentlightning.store import open as stores

    require_file(url)
    return stores.open_store(url, os.environ.get("AGL_SERVER_KEY"))


def require_file(url: str) -> None:
    """NotFoundError where the URL names an SQLite file that is not there: opening it would make one."""
    from agentlightning.errors import NotFoundError

    if url.startswith("sqlite:///") and not (file := Path(url.removeprefix("sqlite:///").partition("?")[0])).exists():
        raise NotFoundError(f"{file}: there is no store yet; start a run with: agl demo, or name a store with --store")


def one_store(store: str | None, server: str | None) -> str | None:
    """The store's URL from --store or --server; ConfigError where both are given."""
    from agentlightning.errors import ConfigError

    if store and server:
        raise ConfigError("--store: a server has a store of its own; give --store or --server, not both")
    return server or store


def store_setting(store: str | None) -> dict[str, str]:
    """The store given, else AGL_STORE, as a setting; empty where neither is."""
    url = store or os.environ.get("AGL_STORE")
    return {"store.url": url} if url else {}
