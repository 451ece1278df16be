"""open_store: the store at a URL.

Driven by everything that is told where its store is. Knows the schemes and nothing else; what a scheme needs is imported
when it is asked for, so that a machine with agents needs no database, and the configuration when a default or a refusal
needs it: the command line imports this module to print its help.
"""

from __future__ import annotations

import os

from agentlightning.errors import ConfigError, MissingExtraError, NotFoundError
from agentlightning.store.base import LightningStore
from agentlightning.store.server_keys import KEY_VARIABLE, find_key
from agentlightning.store.urls import sqlite_file


def open_store(url: str, server_key: str | None = None) -> LightningStore:
    """The store at `url`, not yet open: use it with ``async with``. `server_key`: the key of a server, or a token of it;
    without one, that of a server which this user started on this machine is found.

    ``memory://``, ``sqlite:///path`` (``sqlite:////absolute/path``), ``http://server``, ``https://server``,
    ``postgresql://user:password@host/database``, ``redis://user:password@host/number?prefix=name`` (``rediss://`` for TLS).
    Raises ConfigError for any other URL, MissingExtraError where a package that its scheme needs is not installed.
    """
    scheme = url.partition("://")[0]
    if scheme in ("http", "https"):
        from agentlightning.store.client import LightningStoreClient

        return LightningStoreClient(url, server_key or find_key(url))
    if scheme in ("memory", "sqlite", "postgresql", "postgres"):
        try:
            from agentlightning.store.sql.store import SqlLightningStore
        except ModuleNotFoundError as error:
            if error.name != "sqlalchemy":
                raise
            raise MissingExtraError("sqlalchemy", "server") from error
        return SqlLightningStore(url)
    if scheme in ("redis", "rediss"):
        try:
            from agentlightning.store.redis.store import RedisLightningStore
        except ModuleNotFoundError as error:
            if error.name not in ("redis", "msgspec"):
                raise
            raise MissingExtraError(error.name, "redis") from error
        return RedisLightningStore(url)
    from agentlightning.config.run import without_password

    raise ConfigError(
        "store: expected memory://, sqlite:///path, postgresql://…, redis://…, rediss://…, http://… or https://…, "
        f"got {without_password(url)!r}"
    )


def store_url(given: str | None) -> str:
    """The URL given, else AGL_STORE, else the SQLite file under runs/."""
    from agentlightning.config.run import DEFAULT_STORE

    return given or os.environ.get("AGL_STORE") or DEFAULT_STORE


def existing_store(url: str) -> LightningStore:
    """The store that exists at `url`, not yet open; a server's key is read from AGL_SERVER_KEY. Raises as `open_store` and
    `require_file` do."""
    require_file(url)
    return open_store(url, os.environ.get(KEY_VARIABLE))


def require_file(url: str) -> None:
    """NotFoundError where the URL names an SQLite file that is not there: opening it would make one."""
    if (file := sqlite_file(url)) is not None and not file.exists():
        raise NotFoundError(f"{file}: there is no store yet; start a run with: agl demo, or name a store with --store")
