"""Model versions, their aliases and their leases in Redis; model_registry.py says what the methods mean.

``model:NAME:NUMBER`` is a version, ``models:NAME`` the numbers of a name, ``run_models:RUN`` the references of a run by step
and policy, ``aliases:NAME`` and ``model_leases:NAME:NUMBER`` are hashes by alias and by holder.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from agentlightning.records import JSON
from agentlightning.store.codec import text
from agentlightning.store.model_versions import ModelAlias, ModelVersion, next_number, same_weights
from agentlightning.store.notifier import ALIASES
from agentlightning.store.redis import codec
from agentlightning.store.redis.connection import RedisConnection
from agentlightning.store.redis.transactions import Reads, Transaction
from agentlightning.store.redis.writes import note
from agentlightning.store.sentences import in_use, refusal

_VERSION, _ALIAS = msgspec.json.Decoder(ModelVersion), msgspec.json.Decoder(ModelAlias)


def register(t: Transaction, version: ModelVersion) -> Reads[ModelVersion]:
    yield from t.require_runs([version.run_id])
    place = (f"run_models:{version.run_id}", f"{version.step} {version.policy}")
    [row] = yield from t.read(("HGET", *place))
    if row is not None:
        number, _, name = row.decode().partition(" ")
        known = yield from _find(t, name, int(number))
        if known.deleted:
            kept = {each: getattr(known, each) for each in ("name", "number", "tags", "notes", "pinned")}
            known = replace(version, **kept, deleted=False, created_ns=t.now_ns)
        elif same_weights(known.weights, version.weights):
            known = replace(known, weights=version.weights)
        _put(t, known)
        return known
    [numbers, listed] = yield [("ZRANGE", f"models:{version.name}", 0, -1), ("HGETALL", place[0])]
    own = []
    for each, reference in codec.pairs(listed):
        step, _, policy = each.partition(" ")
        number, _, name = reference.decode().partition(" ")
        if (policy, name) == (version.policy, version.name):
            own.append((int(number), int(step)))
    number = next_number([int(each) for each in numbers], max(own, default=None), version.step)
    new = replace(version, number=number, deleted=False, created_ns=t.now_ns)
    t.check(("ZSCORE", f"models:{new.name}", number), None)
    _put(t, new)
    t.write("SADD", "model_names", new.name)
    t.write("ZADD", f"models:{new.name}", number, number)
    t.write("HSET", *place, f"{number} {new.name}")
    return new


def describe(
    t: Transaction, name: str, number: int, tags: dict[str, str] | None, notes: str | None, pinned: bool | None
) -> Reads[ModelVersion]:
    known = yield from _find(t, name, number)
    if pinned and known.deleted:
        raise refusal("model_deleted", known.reference)
    changed = replace(
        known,
        tags={key: value for key, value in {**known.tags, **(tags or {})}.items() if value},
        notes=known.notes if notes is None else text(notes) or "",
        pinned=known.pinned if pinned is None else pinned,
    )
    _put(t, changed)
    return changed


def set_alias(t: Transaction, name: str, alias: str, number: int | None, reason: JSON) -> Reads[ModelAlias]:
    [row] = yield from t.read(("HGET", f"aliases:{name}", alias))
    known = None if row is None else _ALIAS.decode(row)
    named = None if known is None else known.number
    if number is None and named is None:
        raise refusal("no_alias", f"{name}@{alias}")
    version = yield from _find(t, name, number if number is not None else named or 0)
    if number is not None and version.deleted:
        raise refusal("model_deleted", version.reference)
    if known is not None and named == number:
        return known
    previous = named if named is not None or known is None else known.previous
    moved = ModelAlias(name=name, alias=alias, number=number, previous=previous, moved_ns=t.now_ns)
    t.write("HSET", f"aliases:{name}", alias, codec.dump(moved, "alias"))
    note(t, "set_alias", f"{name}@{alias}", version.run_id, {"number": number, "previous": previous, "reason": reason})
    t.tell(ALIASES, name)
    return moved


def lease(t: Transaction, name: str, number: int, holder: str, lifetime_s: float) -> Reads[None]:
    version = yield from _find(t, name, number)
    if version.deleted:
        raise refusal("model_deleted", version.reference)
    key = f"model_leases:{name}:{number}"
    [flat] = yield [("HGETALL", key)]
    for each, ends in codec.pairs(flat):  # of holders that were killed
        if int(ends) <= t.now_ns:
            t.write("HDEL", key, each)
    t.write("HSET", key, text(holder) or "", t.now_ns + int(lifetime_s * 1e9))


def release(t: Transaction, name: str, number: int, holder: str) -> Reads[None]:
    yield ()
    t.write("HDEL", f"model_leases:{name}:{number}", text(holder) or "")


def delete(t: Transaction, name: str, number: int) -> Reads[None]:
    version = yield from _find(t, name, number)
    if version.deleted:
        return
    use = yield from _use(t, version)
    if use:
        raise refusal("model_in_use", version.reference, use)
    _mark_deleted(t, version)


def delete_of_run(t: Transaction, run_id: str) -> Reads[None]:
    """Marks all versions of a run that is deleted. ConflictError where one of them is in use."""
    [listed] = yield [("HVALS", f"run_models:{run_id}")]
    places = sorted((name, int(number)) for number, _, name in (each.decode().partition(" ") for each in listed))
    found, used = [], []
    for name, number in places:
        version = yield from _find(t, name, number)
        if not version.deleted:
            found.append(version)
            use = yield from _use(t, version)
            used += [f"{version.reference} is {use}"] if use else []
    if used:
        raise refusal("run_has_models", run_id, "; ".join(used))
    for version in found:
        _mark_deleted(t, version)


def _mark_deleted(t: Transaction, version: ModelVersion) -> None:
    _put(t, replace(version, deleted=True))
    note(t, "delete_model", version.reference, version.run_id, {"step": version.step})


def _put(t: Transaction, version: ModelVersion) -> None:
    t.write("SET", f"model:{version.name}:{version.number}", codec.dump(version, "version"))


def _find(t: Transaction, name: str, number: int) -> Reads[ModelVersion]:
    [row] = yield from t.read(("GET", f"model:{name}:{number}"))
    if row is None:
        raise refusal("no_model", f"{name}@{number}")
    return _VERSION.decode(row)


def _use(t: Transaction, version: ModelVersion) -> Reads[str]:
    """Says by what a version's weights are in use; nothing where they may be deleted."""
    leases = f"model_leases:{version.name}:{version.number}"
    [moved, held] = yield [("HVALS", f"aliases:{version.name}"), ("HGETALL", leases)]
    aliases = sorted((_ALIAS.decode(row) for row in moved), key=lambda each: each.alias)
    named = [each for each in aliases if each.number is not None and version.number in (each.number, each.previous)]
    holders = sorted(holder for holder, ends in codec.pairs(held) if int(ends) > t.now_ns)
    return in_use(version.pinned, [(each.alias, each.number == version.number) for each in named], holders)


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
    found = [_ALIAS.decode(row) for rows in listed for row in rows]
    return sorted((one for one in found if one.number is not None), key=lambda one: (one.name, one.alias))


async def _names(connection: RedisConnection) -> list[str]:
    [names] = await connection.query([("SMEMBERS", "model_names")])
    return sorted(each.decode() for each in names)
