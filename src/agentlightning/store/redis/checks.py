"""Demands of a store on a Redis server before it trusts it with data, and the schema of the data.

Driven by the Redis store when it opens. A server that would acknowledge what it can lose is refused, unless the URL says
that the user knows.
"""

from __future__ import annotations

import secrets

from redis import exceptions

from agentlightning.errors import StoreError
from agentlightning.store.redis.connection import RedisConnection

OLDEST = (7, 0)
SCHEMA_VERSION = 1


async def check_server(connection: RedisConnection) -> None:
    """StoreError with what to set where the server is too old, or would lose or forget what it acknowledged."""
    name, accepted = connection.address.name, connection.address.keep
    known, setting = await connection.ask([("INFO",), ("CONFIG", "GET", "appendfsync")])
    if isinstance(known, exceptions.ResponseError):
        raise connection.address.explain(known)
    facts = _facts(known)
    version = facts.get("redis_version", "0")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise StoreError(f"{name}: the server is Redis {version}, and a store needs 7.0 or later; upgrade it")
    if facts.get("role") == "slave":
        raise connection.address.explain(exceptions.ReadOnlyError("READONLY"))
    if facts.get("maxmemory", "0") != "0" and facts.get("maxmemory_policy") != "noeviction":
        raise StoreError(
            f"{name}: the server forgets data when its memory is full (maxmemory-policy {facts['maxmemory_policy']}); "
            "set maxmemory-policy noeviction"
        )
    if "appendonly=off" in accepted:
        return
    if facts.get("aof_enabled") != "1":
        raise StoreError(
            f"{name}: the server keeps no append-only file, so what it acknowledges can be lost; set appendonly yes "
            "(redis-cli config set appendonly yes), or accept that with ?appendonly=off"
        )
    sync = setting[1].decode() if isinstance(setting, list) and setting else "always"  # hosted servers may not say
    if sync != "always" and f"appendfsync={sync}" not in accepted:
        raise StoreError(
            f"{name}: the server acknowledges writes before they are in its file (appendfsync {sync}), so they can be "
            "lost; set appendfsync always (redis-cli config set appendfsync always), or accept that with "
            f"?appendfsync={sync}"
        )


async def prepare_data(connection: RedisConnection) -> bytes:
    """The signing secret, made now where the store is new; StoreError where the data are of another version."""
    name = connection.address.name
    *_, version, secret = await connection.query(
        [
            ("HSETNX", "meta", "schema_version", SCHEMA_VERSION),
            ("HSETNX", "meta", "signing_secret", secrets.token_hex(32)),
            ("HGET", "meta", "schema_version"),
            ("HGET", "meta", "signing_secret"),
        ]
    )
    if int(version) != SCHEMA_VERSION:
        raise StoreError(
            f"{name}: its schema has version {int(version)}, this program knows {SCHEMA_VERSION}; "
            "install the agentlightning that wrote it, or choose another prefix"
        )
    return bytes.fromhex(secret.decode())


def _facts(info: bytes) -> dict[str, str]:
    lines = [line.partition(":") for line in info.decode().splitlines()]
    return {name: value for name, found, value in lines if found}
