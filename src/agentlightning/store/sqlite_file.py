"""The file of an SQLite store, as its URL names it.

For what lies beside that file (locks, server keys) and for what copies it; opening it is sql/sqlite.py's.
"""

from __future__ import annotations

from pathlib import Path

SQLITE = "sqlite:///"


def sqlite_file(url: str) -> Path | None:
    """The file; None where the URL is that of another store.

    >>> sqlite_file("sqlite:///runs/agl.db?timeout=20"), sqlite_file("sqlite:///file:/x/agl.db?uri=true"), sqlite_file("memory://")
    (PosixPath('runs/agl.db'), PosixPath('/x/agl.db'), None)
    """
    if not url.startswith(SQLITE):
        return None
    return Path(url.removeprefix(SQLITE).partition("?")[0].removeprefix("file:"))
