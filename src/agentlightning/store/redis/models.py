"""Model versions, their aliases and their leases in Redis: requests of the scripts in lua/ that change them, and reading.

Driven by the Redis store. model_registry.py says what the methods mean.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from typing import Any

import orjson

from agentlightning.records import JSON
from agentlightning.store.audit import current_actor
from agentlightning.store.codec import dump, text
from agentlightning.store.model_versions import ModelAlias, ModelVersion
from agentlightning.store.redis import codec
from agentlightning.store.redis.codec import whole
from agentlightning.store.redis.connection import RedisConnection

MAX_VERSIONS_PER_READ = 500

_SCRIPTS = ("name", "number", "weights", "tags", "notes", "pinned", "deleted", "created_ns")
"""Fields that scripts look at or change, and keep by themselves."""

Write = Callable[[str, Any], Awaitable[Any]]


async def register(write: Write, version: ModelVersion) -> ModelVersion:
    fixed = {field.name: getattr(version, field.name) for field in fields(version) if field.name not in _SCRIPTS}
    request = {
        "name": version.name,
        "run_id": version.run_id,
        "policy": version.policy,
        "step": whole(version.step),
        "fixed": dump(fixed, "version"),
        "weights": dump(version.weights, "weights"),
        "manifest_hash": str(version.weights.get("manifest_hash") or ""),
        "tags": _flat(version.tags),
        "notes": text(version.notes),
        "pinned": str(int(version.pinned)),
    }
    return _read(*await write("register_model", request))


async def describe(
    write: Write, name: str, number: int, tags: dict[str, str] | None, notes: str | None, pinned: bool | None
) -> ModelVersion:
    request: dict[str, Any] = {"name": name, "number": whole(number), "tags": _flat(tags or {})}
    request |= {} if notes is None else {"notes": text(notes)}
    request |= {} if pinned is None else {"pinned": str(int(pinned))}
    return _read(*await write("describe_model", request))


async def set_alias(write: Write, name: str, alias: str, number: int | None, reason: JSON) -> ModelAlias:
    request = {
        "actor": text(current_actor().name),
        "name": name,
        "alias": alias,
        "number": "" if number is None else whole(number),
        "reason": dump(reason, "reason"),
    }
    return _alias(name, alias, await write("set_alias", request))


async def lease(write: Write, name: str, number: int, holder: str, lifetime_s: float) -> None:
    request = {"name": name, "number": whole(number), "holder": text(holder)}
    await write("lease_model", {**request, "lifetime_ns": codec.nanoseconds(lifetime_s)})


async def release(write: Write, name: str, number: int, holder: str) -> None:
    await write("release_model", {"name": name, "number": whole(number), "holder": text(holder)})


async def delete(write: Write, name: str, number: int) -> None:
    await write("delete_model", {"actor": text(current_actor().name), "name": name, "number": whole(number)})


async def read(connection: RedisConnection, name: str | None = None, run_id: str | None = None) -> list[ModelVersion]:
    """By name and number."""
    if run_id is not None:
        [listed] = await connection.query([("HVALS", f"run_models:{run_id}")])
        places = [(its_name, number) for number, _, its_name in (each.decode().partition(" ") for each in listed)]
    else:
        names = await _names(connection) if name is None else [name]
        numbers = await connection.query([("ZRANGE", f"models:{each}", 0, -1) for each in names])
        places = [(each, number.decode()) for each, of in zip(names, numbers, strict=True) for number in of]
    places = [place for place in places if name in (None, place[0])]
    found = []
    for start in range(0, len(places), MAX_VERSIONS_PER_READ):
        part = places[start : start + MAX_VERSIONS_PER_READ]
        keys = [f"{kind}:{its_name}:{number}" for its_name, number in part for kind in ("model", "model_tags")]
        replies = await connection.query([("HGETALL", key) for key in keys])
        found += [
            _read(*place, *of) for place, of in zip(part, zip(replies[::2], replies[1::2], strict=True), strict=True)
        ]
    return sorted(found, key=lambda version: (version.name, version.number))


async def aliases(connection: RedisConnection, name: str | None = None) -> list[ModelAlias]:
    names = await _names(connection) if name is None else [name]
    replies = await connection.query([("HGETALL", f"aliases:{each}") for each in names])
    found = [
        _alias(each, alias, orjson.loads(moved))
        for each, flat in zip(names, replies, strict=True)
        for alias, moved in codec.pairs(flat).items()
    ]
    return sorted((one for one in found if one.number is not None), key=lambda one: (one.name, one.alias))


async def _names(connection: RedisConnection) -> list[str]:
    [names] = await connection.query([("SMEMBERS", "model_names")])
    return sorted(each.decode() for each in names)


def _read(name: str, number: str, flat: Sequence[Any], tags: Sequence[Any]) -> ModelVersion:
    known = codec.pairs(flat)
    return ModelVersion(
        **orjson.loads(known["fixed"]),
        name=name,
        number=int(number),
        weights=orjson.loads(known["weights"]),
        tags=dict(sorted(codec.pairs(tags).items())),
        notes=known["notes"],
        pinned=known["pinned"] == "1",
        deleted=known.get("deleted") == "1",
        created_ns=int(known["created_ns"]),
    )


def _alias(name: str, alias: str, moved: Sequence[str]) -> ModelAlias:
    number, previous = (int(each) if each else None for each in moved[:2])
    return ModelAlias(name=name, alias=alias, number=number, previous=previous, moved_ns=int(moved[2]))


def _flat(tags: dict[str, str]) -> list[str]:
    return [part for pair in tags.items() for part in pair]
