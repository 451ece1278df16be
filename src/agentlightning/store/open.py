"""open_store: the store at a URL.

Driven by everything that is told where its store is. Knows the schemes and nothing else; what a scheme needs is imported
when it is asked for, so that a machine with agents needs no database.
"""

from __future__ import annotations

from agentlightning.config import without_password
from agentlightning.errors import ConfigError, MissingExtraError
from agentlightning.store.base import LightningStore


def open_store(url: str, server_key: str | None = None) -> LightningStore:
    """The store at `url`, not yet open: use it with ``async with``. `server_key` is for servers only.

    ``memory://``, ``sqlite:///path`` (``sqlite:////absolute/path``), ``http://server``, ``https://server``,
    ``postgresql://user:password@host/database``, ``redis://user:password@host/number?prefix=name`` (``rediss://`` for TLS).
    Raises ConfigError for any other URL, MissingExtraError where a package that its scheme needs is not installed.
    """
    scheme = url.partition("://")[0]
    if scheme in ("http", "https"):
        from agentlightning.store.client import LightningStoreClient

        return LightningStoreClient(url, server_key)
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
    raise ConfigError(
        "store: expected memory://, sqlite:///path, postgresql://…, redis://…, rediss://…, http://… or https://…, "
        f"got {without_password(url)!r}"
    )
