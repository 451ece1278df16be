"""Tokens and the audit log in SQL, and the acts that are noted in it without more ado.

Methods of the writer take a transaction and an actor, those that read a connection; base.py says what they mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sqlalchemy import Connection, insert, select, update

from agentlightning.records import JSON, Resource
from agentlightning.store import codec
from agentlightning.store.audit import AUDITED_KINDS, Actor, AuditEntry, named_ids, noted_value
from agentlightning.store.sentences import refusal
from agentlightning.store.sql import lifecycle
from agentlightning.store.sql.tables import audit, tokens
from agentlightning.store.sql.writer import Transaction
from agentlightning.store.tokens import Token

_TOKENS, _ENTRIES = codec.RecordCodec(Token), codec.RecordCodec(AuditEntry)
_TOKEN = select(*[tokens.c[name] for name in _TOKENS.names])
_ENTRY = select(*[audit.c[name] for name in _ENTRIES.names])


def note(transaction: Transaction, actor: Actor, action: str, subject: str, run_id: str | None, detail: JSON) -> None:
    """Add an entry to the audit log, in the transaction of the act."""
    entry = AuditEntry(
        seq=0,
        created_ns=transaction.now_ns,
        actor=codec.text(actor.name) or "",
        action=action,
        subject=codec.text(subject) or "",
        run_id=run_id,
        detail=detail,
    )
    columns = _ENTRIES.columns(entry)
    del columns["seq"]
    transaction.connection.execute(insert(audit).values(columns))


def note_resources(transaction: Transaction, actor: Actor, stored: Iterable[Resource]) -> None:
    for resource in stored:
        if resource.kind in AUDITED_KINDS:
            detail = {**noted_value(resource), "kind": resource.kind, "version": resource.version}
            note(transaction, actor, "put_resources", resource.name, resource.run_id, detail)


def cancel(transaction: Transaction, actor: Actor, rollout_ids: Sequence[str]) -> int:
    """Cancel rollouts, as lifecycle.py does, and note it; returns how many."""
    by_run = lifecycle.cancel(transaction, rollout_ids)
    for run_id, ids in sorted(by_run.items()):
        note(transaction, actor, "cancel", run_id, run_id, named_ids(ids))
    return sum(map(len, by_run.values()))


def bind_token(transaction: Transaction, actor: Actor, run_id: str) -> None:
    """Give the actor's token the run that is created. ConflictError where it has one meanwhile."""
    if actor.binds is None:
        return
    free = tokens.c.id == actor.binds, tokens.c.run_id.is_(None), tokens.c.revoked_ns.is_(None)
    if transaction.connection.execute(update(tokens).where(*free).values(run_id=run_id)).rowcount == 0:
        raise refusal("token_has_run", actor.binds)


def add_token(
    transaction: Transaction, actor: Actor, token: Token, secret_hash: str, lifetime_s: float | None
) -> Token:
    if token.run_id is not None:
        lifecycle.require_runs(transaction.connection, {token.run_id})
    expires_ns = None if lifetime_s is None else transaction.now_ns + int(lifetime_s * 1e9)
    token = replace(token, created_ns=transaction.now_ns, expires_ns=expires_ns)
    transaction.connection.execute(insert(tokens).values({**_TOKENS.columns(token), "secret_hash": secret_hash}))
    detail = {"name": token.name, "role": token.role, "lifetime_s": lifetime_s}
    note(transaction, actor, "create_token", token.id, token.run_id, detail)
    return token


def revoke_token(transaction: Transaction, actor: Actor, token_id: str) -> Token:
    row = transaction.connection.execute(_TOKEN.where(tokens.c.id == token_id)).first()
    if row is None:
        raise refusal("no_token", token_id)
    token = _TOKENS.of_row(row)
    if token.revoked_ns is not None:
        return token
    revoked = update(tokens).where(tokens.c.id == token_id).values(revoked_ns=transaction.now_ns)
    transaction.connection.execute(revoked)
    note(transaction, actor, "revoke_token", token.id, token.run_id, {"name": token.name, "role": token.role})
    return replace(token, revoked_ns=transaction.now_ns)


def read_tokens(connection: Connection, run_id: str | None = None) -> list[Token]:
    query = _TOKEN.order_by(tokens.c.created_ns, tokens.c.id)
    if run_id is not None:
        query = query.where(tokens.c.run_id == run_id)
    return [_TOKENS.of_row(row) for row in connection.execute(query)]


def find_token(connection: Connection, secret_hash: str) -> Token | None:
    row = connection.execute(_TOKEN.where(tokens.c.secret_hash == secret_hash)).first()
    return None if row is None else _TOKENS.of_row(row)


def read_audit(
    connection: Connection, run_id: str | None = None, after: int = 0, limit: int = 1000
) -> list[AuditEntry]:
    query = _ENTRY.where(audit.c.seq > after).order_by(audit.c.seq).limit(limit)
    if run_id is not None:
        query = query.where(audit.c.run_id == run_id)
    return [_ENTRIES.of_row(row) for row in connection.execute(query)]
