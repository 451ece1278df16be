"""URLs of stores: the file of an SQLite store, and seconds among the parameters."""

from __future__ import annotations

from pathlib import Path

from agentlightning.errors import ConfigError

SQLITE = "sqlite:///"


def sqlite_file(url: str) -> Path | None:
    """The file of an SQLite store; None where the URL is that of another store.

    >>> sqlite_file("sqlite:///runs/agl.db?timeout=20"), sqlite_file("sqlite:///file:/x/agl.db?uri=true"), sqlite_file("memory://")
    (PosixPath('runs/agl.db'), PosixPath('/x/agl.db'), None)
    """
    if not url.startswith(SQLITE):
        return None
    return Path(url.removeprefix(SQLITE).partition("?")[0].removeprefix("file:"))


def seconds_in_url(name: str, value: object) -> float:
    """The seconds that a parameter of a store's URL says. ConfigError where it says none."""
    try:
        seconds = float(str(value))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 10**6:
        raise ConfigError(f"store: {name}: expected seconds in its URL, got {value!r}")
    return seconds
