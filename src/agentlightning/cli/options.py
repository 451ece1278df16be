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
        "--store", help="Store URL: sqlite:///PATH, memory:// or http://SERVER. [AGL_STORE, else runs/agl.db]"
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
    return store or os.environ.get("AGL_STORE") or "sqlite:///runs/agl.db"


def open_store(url: str) -> LightningStore:
    """The store at `url`, for ``async with``; a server's key is read from AGL_SERVER_KEY."""
    from agentlightning.store import open as stores

    return stores.open_store(url, os.environ.get("AGL_SERVER_KEY"))


def store_setting(store: str | None) -> dict[str, str]:
    """--store or AGL_STORE as a setting; empty where neither is given."""
    url = store or os.environ.get("AGL_STORE")
    return {"store.url": url} if url else {}
