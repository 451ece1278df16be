"""Options that several commands share, declared once, and what they mean."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

if TYPE_CHECKING:
    from agentlightning.store.base import LightningStore

T = TypeVar("T")

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
    from agentlightning.store import open as stores

    return stores.store_url(store)


def open_store(url: str) -> LightningStore:
    """The store that exists at `url`, for ``async with``; a server's key is read from AGL_SERVER_KEY."""
    from agentlightning.store import open as stores

    return stores.existing_store(url)


def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """Run it as `asyncio.run` does; SIGTERM and SIGHUP end it as Ctrl-C does, so that its run is recorded as interrupted."""
    import asyncio
    import signal

    async def ended_by_signals() -> T:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(ended_by_signals())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


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
