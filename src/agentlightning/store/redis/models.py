"""Model versions and their aliases in Redis; store/models.py says what the methods mean and what they may change.

``model:NAME:NUMBER`` is a version, ``models:NAME`` the numbers of a name, ``run_models:RUN`` the references of a run by step
and policy, ``aliases:NAME`` a hash by alias.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from agentlightning.records import JSON
from agentlightning.store.models import ModelAlias, ModelVersion, changed_version, moved_alias, next_number
from agentlightning.store.redis import codec
from agentlightning.store.redis.connection import RedisConnection
from agentlightning.store.redis.transactions import Reads, Transaction
from agentlightning.store.redis.writes import note
from agentlightning.store.waiting import ALIASES

_VERSION, _ALIAS = msgspec.json.Decoder(ModelVersion), msgspec.json.Decoder(ModelAlias)


def put_model(t: Transaction, version: ModelVersion) -> Reads[ModelVersion]:
    if version.revision == 0:
        return (yield from _register(t, version))
    known = yield from _find(t, version.name, version.number)
    [rows] = yield [("HVALS", f"aliases:{version.name}")]
    aliases = sorted((_ALIAS.decode(row) for row in rows), key=lambda one: one.alias)
    stored = changed_version(version, known, aliases, t.now_ns)
    _put(t, stored)
    if known is not None and stored.deleted and not known.deleted:
        note(t, "delete_model", stored.reference, stored.run_id, {"step": stored.step})
    return stored


def put_alias(t: Transaction, alias: ModelAlias, reason: JSON) -> Reads[ModelAlias]:
    key = f"aliases:{alias.name}"
    [row] = yield from t.read(("HGET", key, alias.alias))
    known = None if row is None else _ALIAS.decode(row)
    version = None if alias.number is None else (yield from _find(t, alias.name, alias.number))
    moved = moved_alias(alias, known, version, t.now_ns)
    if moved.number is None:
        t.write("HDEL", key, moved.alias)
        version = yield from _find(t, alias.name, moved.previous or 0)
    else:
        t.write("HSET", key, moved.alias, codec.dump(moved, "alias"))
    detail = {"number": moved.number, "previous": moved.previous, "reason": reason}
    note(t, "set_alias", f"{moved.name}@{moved.alias}", None if version is None else version.run_id, detail)
    t.tell(ALIASES, moved.name)
    return moved


def _register(t: Transaction, version: ModelVersion) -> Reads[ModelVersion]:
    yield from t.require_runs([version.run_id])
    place = (f"run_models:{version.run_id}", f"{version.step} {version.policy}")
    [row] = yield from t.read(("HGET", *place))
    if row is not None:
        number, _, name = row.decode().partition(" ")
        known = yield from _find(t, name, int(number))
        assert known is not None
        return known
    [numbers, listed] = yield [("ZRANGE", f"models:{version.name}", 0, -1), ("HGETALL", place[0])]
    own = []
    for each, reference in codec.pairs(listed):
        step, _, policy = each.partition(" ")
        number, _, name = reference.decode().partition(" ")
        if (policy, name) == (version.policy, version.name):
            own.append((int(number), int(step)))
    given = next_number([int(each) for each in numbers], max(own, default=None), version.step)
    new = replace(version, number=given, revision=1, created_ns=t.now_ns)
    t.check(("ZSCORE", f"models:{new.name}", given), None)
    _put(t, new)
    t.write("SADD", "model_names", new.name)
    t.write("ZADD", f"models:{new.name}", given, given)
    t.write("HSET", *place, f"{given} {new.name}")
    return new


def _put(t: Transaction, version: ModelVersion) -> None:
    t.write("SET", f"model:{version.name}:{version.number}", codec.dump(version, "version"))


def _find(t: Transaction, name: str, number: int) -> Reads[ModelVersion | None]:
    [row] = yield from t.read(("GET", f"model:{name}:{number}"))
    return None if row is None else _VERSION.decode(row)


async def read(connection: RedisConnection, name: str | None = None, run_id: str | None = None) -> list[ModelVersion]:
    """By name and number."""
    names = await _names(connection) if name is None else [name]
    listed = await connection.query([("ZRANGE", f"models:{each}", 0, -1) for each in names])
    places = [(each, number.decode()) for each, numbers in zip(names, listed, strict=True) for number in numbers]
    rows = await connection.query([("GET", f"model:{each}:{number}") for each, number in places])
    found = [_VERSION.decode(row) for row in rows if row is not None]
    chosen = [version for version in found if run_id in (None, version.run_id)]
    return sorted(chosen, key=lambda version: (version.name, version.number))


async def aliases(connection: RedisConnection, name: str | None = None) -> list[ModelAlias]:
    names = await _names(connection) if name is None else [name]
    listed = await connection.query([("HVALS", f"aliases:{each}") for each in names])
    return sorted((_ALIAS.decode(row) for rows in listed for row in rows), key=lambda one: (one.name, one.alias))


async def _names(connection: RedisConnection) -> list[str]:
    [names] = await connection.query([("SMEMBERS", "model_names")])
    return sorted(each.decode() for each in names)
