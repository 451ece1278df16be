"""Outcomes of requests, in SQL: rows that the writer reads first and writes last in the transaction that does it.

store/requests.py says what they are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from sqlalchemy import Connection, Row, delete, select

from agentlightning.errors import AgentLightningError
from agentlightning.store.codec import chunks
from agentlightning.store.requests import KEPT_S, Request, check_same
from agentlightning.store.sql.tables import requests
from agentlightning.store.sql.upsert import upsert

PRUNE_EVERY_S = 60.0
"""Seconds after which old rows are deleted again."""


class Work(Protocol):
    """Something that is done for a request."""

    kind: Any
    result: Any
    error: BaseException | None


def read(connection: Connection, keys: Sequence[str]) -> dict[str, Row[*tuple[Any, ...]]]:
    query = select(requests.c.key, requests.c.digest, requests.c.outcome)
    return {row.key: row for part in chunks(keys) for row in connection.execute(query.where(requests.c.key.in_(part)))}


def answer(work: Work, request: Request, known: Row[*tuple[Any, ...]] | None) -> bool:
    """True where the work needs no doing: its request was done before, or is refused, since it was another then."""
    if known is None:
        return False
    try:
        check_same(request, known.digest)
    except AgentLightningError as error:
        work.error = error
        return True
    if known.outcome is None:
        return False
    work.result = msgspec.msgpack.decode(known.outcome, type=work.kind)
    return True


def row(work: Work, request: Request, now_ns: int) -> Mapping[str, Any] | None:
    """The row of what was done; None where nothing was."""
    if work.error is not None or work.result == []:
        return None
    outcome = None if work.kind is None else msgspec.msgpack.encode(work.result)
    return {"key": request.key, "digest": request.digest, "outcome": outcome, "created_ns": now_ns}


def write(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        connection.execute(upsert(connection, requests).on_conflict_do_nothing(index_elements=["key"]), rows)


def prune(connection: Connection, now_ns: int) -> None:
    """Delete the rows of requests that nobody sends any more."""
    connection.execute(delete(requests).where(requests.c.created_ns < now_ns - int(KEPT_S * 1e9)))
