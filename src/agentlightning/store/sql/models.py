"""Model versions and their aliases in SQL; models.py says what the methods mean and what they may change."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import Connection, delete, insert, select, update

from agentlightning.records import JSON
from agentlightning.store import codec
from agentlightning.store.audit import Actor
from agentlightning.store.models import ModelAlias, ModelVersion, changed_version, moved_alias, next_number
from agentlightning.store.notifier import ALIASES
from agentlightning.store.sql.record import note, require_runs
from agentlightning.store.sql.tables import model_aliases, model_versions
from agentlightning.store.sql.upsert import upsert
from agentlightning.store.sql.writer import SqlTransaction

_VERSIONS, _ALIASES = codec.RecordCodec(ModelVersion), codec.RecordCodec(ModelAlias)


def put_model(transaction: SqlTransaction, actor: Actor, version: ModelVersion) -> ModelVersion:
    connection = transaction.connection
    if version.revision == 0:
        return _register(transaction, version)
    known = _find(connection, version.name, version.number)
    stored = changed_version(version, known, read_aliases(connection, version.name), transaction.now_ns)
    mine = model_versions.c.name == stored.name, model_versions.c.number == stored.number
    connection.execute(update(model_versions).where(*mine).values(_VERSIONS.columns(stored)))
    if known is not None and stored.deleted and not known.deleted:
        note(transaction, actor, "delete_model", stored.reference, stored.run_id, {"step": stored.step})
    return stored


def put_alias(transaction: SqlTransaction, actor: Actor, alias: ModelAlias, reason: JSON) -> ModelAlias:
    connection = transaction.connection
    known = next((one for one in read_aliases(connection, alias.name) if one.alias == alias.alias), None)
    version = None if alias.number is None else _find(connection, alias.name, alias.number)
    moved = moved_alias(alias, known, version, transaction.now_ns)
    columns = _ALIASES.columns(moved)
    if moved.number is None:
        mine = model_aliases.c.name == moved.name, model_aliases.c.alias == moved.alias
        connection.execute(delete(model_aliases).where(*mine))
        version = _find(connection, alias.name, moved.previous or 0)
    else:
        statement = upsert(connection, model_aliases).values(columns)
        connection.execute(statement.on_conflict_do_update(index_elements=["name", "alias"], set_=columns))
    detail = {"number": moved.number, "previous": moved.previous, "reason": reason}
    run_id = None if version is None else version.run_id
    note(transaction, actor, "set_alias", f"{moved.name}@{moved.alias}", run_id, detail)
    transaction.tell(ALIASES, moved.name)
    return moved


def read_models(connection: Connection, name: str | None = None, run_id: str | None = None) -> list[ModelVersion]:
    query = select(model_versions).order_by(model_versions.c.name, model_versions.c.number)
    if name is not None:
        query = query.where(model_versions.c.name == name)
    if run_id is not None:
        query = query.where(model_versions.c.run_id == run_id)
    return [_VERSIONS.of_row(row) for row in connection.execute(query)]


def read_aliases(connection: Connection, name: str | None = None) -> list[ModelAlias]:
    query = select(model_aliases).order_by(model_aliases.c.name, model_aliases.c.alias)
    if name is not None:
        query = query.where(model_aliases.c.name == name)
    return [_ALIASES.of_row(row) for row in connection.execute(query)]


def _register(transaction: SqlTransaction, version: ModelVersion) -> ModelVersion:
    connection = transaction.connection
    require_runs(connection, {version.run_id})
    own = [one for one in read_models(connection, run_id=version.run_id) if one.policy == version.policy]
    if known := [one for one in own if one.step == version.step]:
        return known[0]
    last = max(((one.number, one.step) for one in own if one.name == version.name), default=None)
    taken = select(model_versions.c.number).where(model_versions.c.name == version.name)
    number = next_number(connection.execute(taken).scalars().all(), last, version.step)
    new = replace(version, number=number, revision=1, created_ns=transaction.now_ns)
    connection.execute(insert(model_versions).values(_VERSIONS.columns(new)))
    return new


def _find(connection: Connection, name: str, number: int) -> ModelVersion | None:
    mine = model_versions.c.name == name, model_versions.c.number == number
    row = connection.execute(select(model_versions).where(*mine)).first()
    return None if row is None else _VERSIONS.of_row(row)
