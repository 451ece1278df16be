"""Model versions, their aliases and their leases in SQL.

Methods of the writer take a transaction, those that read a connection; model_registry.py says what they mean.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, insert, or_, select, update

from agentlightning.records import JSON
from agentlightning.store import codec
from agentlightning.store.audit import Actor
from agentlightning.store.model_versions import ModelAlias, ModelVersion, next_number, same_weights
from agentlightning.store.notifier import ALIASES
from agentlightning.store.sentences import in_use, refusal
from agentlightning.store.sql.record import note, require_runs
from agentlightning.store.sql.tables import model_aliases, model_leases, model_versions
from agentlightning.store.sql.upsert import upsert
from agentlightning.store.sql.writer import Transaction

_VERSIONS, _ALIASES = codec.RecordCodec(ModelVersion), codec.RecordCodec(ModelAlias)
_VERSION = select(*[model_versions.c[name] for name in _VERSIONS.names])
_ALIAS = select(*[model_aliases.c[name] for name in _ALIASES.names])
_OWN = ("name", "number", "tags", "notes", "pinned")
"""Fields of a version that stay when it is registered again."""


def register_model(transaction: Transaction, version: ModelVersion) -> ModelVersion:
    connection = transaction.connection
    require_runs(connection, {version.run_id})
    own = model_versions.c.run_id == version.run_id, model_versions.c.policy == version.policy
    row = connection.execute(_VERSION.where(*own, model_versions.c.step == version.step)).first()
    if row is not None:
        known = _VERSIONS.of_row(row)
        if not known.deleted:
            return _moved(connection, known, version)
        kept = {name: getattr(known, name) for name in _OWN}
        again = replace(version, **kept, deleted=False, created_ns=transaction.now_ns)
        connection.execute(_update(again.name, again.number).values(_VERSIONS.columns(again)))
        return again
    numbers = select(model_versions.c.number).where(model_versions.c.name == version.name)
    last = select(model_versions.c.number, model_versions.c.step).where(*own, model_versions.c.name == version.name)
    before = connection.execute(last.order_by(model_versions.c.number.desc()).limit(1)).first()
    number = next_number(
        connection.execute(numbers).scalars().all(),
        None if before is None else (before.number, before.step),
        version.step,
    )
    new = replace(version, number=number, deleted=False, created_ns=transaction.now_ns)
    connection.execute(insert(model_versions).values(_VERSIONS.columns(new)))
    return new


def describe_model(
    transaction: Transaction,
    name: str,
    number: int,
    tags: dict[str, str] | None,
    notes: str | None,
    pinned: bool | None,
) -> ModelVersion:
    known = _find(transaction.connection, name, number)
    if pinned and known.deleted:
        raise refusal("model_deleted", known.reference)
    merged = {key: value for key, value in {**known.tags, **(tags or {})}.items() if value}
    changed = replace(
        known,
        tags=merged,
        notes=known.notes if notes is None else codec.text(notes) or "",
        pinned=known.pinned if pinned is None else pinned,
    )
    transaction.connection.execute(_update(name, number).values(_VERSIONS.columns(changed)))
    return changed


def set_alias(
    transaction: Transaction, actor: Actor, name: str, alias: str, number: int | None, reason: JSON
) -> ModelAlias:
    connection = transaction.connection
    row = connection.execute(_ALIAS.where(model_aliases.c.name == name, model_aliases.c.alias == alias)).first()
    known = None if row is None else _ALIASES.of_row(row)
    named = None if known is None else known.number
    if number is None and named is None:
        raise refusal("no_alias", f"{name}@{alias}")
    version = _find(connection, name, number if number is not None else named or 0)
    if number is not None and version.deleted:
        raise refusal("model_deleted", version.reference)
    if known is not None and named == number:
        return known
    previous = named if named is not None or known is None else known.previous
    moved = ModelAlias(name=name, alias=alias, number=number, previous=previous, moved_ns=transaction.now_ns)
    columns = _ALIASES.columns(moved)
    statement = upsert(connection, model_aliases).values(columns)
    connection.execute(statement.on_conflict_do_update(index_elements=["name", "alias"], set_=columns))
    detail = {"number": number, "previous": previous, "reason": reason}
    note(transaction, actor, "set_alias", f"{name}@{alias}", version.run_id, detail)
    transaction.tell(ALIASES, name)
    return moved


def lease_model(transaction: Transaction, name: str, number: int, holder: str, lifetime_s: float) -> None:
    connection = transaction.connection
    if (version := _find(connection, name, number)).deleted:
        raise refusal("model_deleted", version.reference)
    ends = transaction.now_ns + int(lifetime_s * 1e9)
    row = {"name": name, "number": number, "holder": codec.text(holder), "expires_ns": ends}
    statement = upsert(connection, model_leases).values(row)
    keys = ["name", "number", "holder"]
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_={"expires_ns": ends}))
    old = model_leases.c.expires_ns <= transaction.now_ns  # of holders that were killed
    connection.execute(delete(model_leases).where(model_leases.c.name == name, old))


def release_model(transaction: Transaction, name: str, number: int, holder: str) -> None:
    lease = model_leases.c.name == name, model_leases.c.number == number, model_leases.c.holder == codec.text(holder)
    transaction.connection.execute(delete(model_leases).where(*lease))


def delete_model(transaction: Transaction, actor: Actor, name: str, number: int) -> None:
    version = _find(transaction.connection, name, number)
    if version.deleted:
        return
    if use := _use(transaction, version):
        raise refusal("model_in_use", version.reference, use)
    _mark_deleted(transaction, actor, version)


def delete_models_of_run(transaction: Transaction, actor: Actor, run_id: str) -> None:
    """Marks all versions of a run that is deleted. ConflictError where one of them is in use."""
    query = _VERSION.where(model_versions.c.run_id == run_id, model_versions.c.deleted.is_(False))
    found = [_VERSIONS.of_row(row) for row in transaction.connection.execute(query.order_by(*_ORDER))]
    used = [f"{version.reference} is {use}" for version in found if (use := _use(transaction, version))]
    if used:
        raise refusal("run_has_models", run_id, "; ".join(used))
    for version in found:
        _mark_deleted(transaction, actor, version)


def read_models(connection: Connection, name: str | None = None, run_id: str | None = None) -> list[ModelVersion]:
    query = _VERSION.order_by(*_ORDER)
    if name is not None:
        query = query.where(model_versions.c.name == name)
    if run_id is not None:
        query = query.where(model_versions.c.run_id == run_id)
    return [_VERSIONS.of_row(row) for row in connection.execute(query)]


def read_aliases(connection: Connection, name: str | None = None) -> list[ModelAlias]:
    query = _ALIAS.where(model_aliases.c.number.is_not(None)).order_by(model_aliases.c.name, model_aliases.c.alias)
    if name is not None:
        query = query.where(model_aliases.c.name == name)
    return [_ALIASES.of_row(row) for row in connection.execute(query)]


_ORDER = model_versions.c.name, model_versions.c.number


def _moved(connection: Connection, known: ModelVersion, version: ModelVersion) -> ModelVersion:
    """The version as it is, with the URL at which the same weights are now."""
    if not same_weights(known.weights, version.weights):
        return known
    moved = replace(known, weights=version.weights)
    connection.execute(_update(known.name, known.number).values(_VERSIONS.columns(moved)))
    return moved


def _find(connection: Connection, name: str, number: int) -> ModelVersion:
    row = connection.execute(_VERSION.where(*_is(name, number))).first()
    if row is None:
        raise refusal("no_model", f"{name}@{number}")
    return _VERSIONS.of_row(row)


def _use(transaction: Transaction, version: ModelVersion) -> str:
    """Says by what a version's weights are in use; nothing where they may be deleted."""
    connection = transaction.connection
    named = or_(model_aliases.c.number == version.number, model_aliases.c.previous == version.number)
    aliases = _ALIAS.where(model_aliases.c.name == version.name, model_aliases.c.number.is_not(None), named)
    leases = select(model_leases.c.holder).where(
        model_leases.c.name == version.name,
        model_leases.c.number == version.number,
        model_leases.c.expires_ns > transaction.now_ns,
    )
    return in_use(
        version.pinned,
        [(each.alias, each.number == version.number) for each in connection.execute(aliases.order_by("alias"))],
        list(connection.execute(leases.order_by("holder")).scalars()),
    )


def _mark_deleted(transaction: Transaction, actor: Actor, version: ModelVersion) -> None:
    transaction.connection.execute(_update(version.name, version.number).values(deleted=True))
    note(transaction, actor, "delete_model", version.reference, version.run_id, {"step": version.step})


def _update(name: str, number: int) -> Any:
    return update(model_versions).where(*_is(name, number))


def _is(name: str, number: int) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return model_versions.c.name == name, model_versions.c.number == number
