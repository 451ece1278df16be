"""The audit log: who deleted, cancelled, published, or gave and took access; and how a store learns who asks.

Written by the stores in the transaction of the act, read by people; nothing of ours changes or deletes an entry. A server
says for whom it acts by `acting_as`; whoever opens a store without a server is a user of this machine.
"""

from __future__ import annotations

import functools
import getpass
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from agentlightning.records import JSON, Resource

MAX_ACTOR_CHARS = 200
MAX_IDS_NAMED = 20
"""Rollouts that one entry names; of more it gives the number."""
AUDITED = frozenset(
    {"cancel", "create_token", "put_alias", "put_model", "delete_runs", "drop_records", "put_resources", "revoke_token"}
    | {"update_run"}
)
"""Methods that write entries."""
AUDITED_KINDS = frozenset({"policy", "external", "prompt_template", "routes"})
"""Kinds of resources that decide where agents' requests go, and what agents are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """Something that was done, and by whom."""

    seq: int
    """Counts up, by one at least: the cursor of `audit`."""
    created_ns: int
    actor: str
    """``token NAME (ID)``, ``server key``, ``local user NAME``; behind a further server, as that server says."""
    action: str
    """The store's method."""
    subject: str
    """Id of what it was done to: a run, a token, a resource's name."""
    run_id: str | None
    detail: JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """Somebody who asks a store to do something."""

    name: str
    binds: str | None = None
    """Id of their token, where the first run that it creates is to become its run."""


_actor: ContextVar[Actor | None] = ContextVar("actor", default=None)


@contextmanager
def acting_as(actor: Actor) -> Iterator[None]:
    """Around calls of a store's methods: they are done for this actor."""
    previous = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(previous)


def declared_actor() -> Actor | None:
    """The actor of `acting_as`; None outside of it."""
    return _actor.get()


def current_actor() -> Actor:
    """The actor for whom a method is called now: that of `acting_as`, else the user of this process."""
    return _actor.get() or Actor(name=f"local user {_user()}")


def noted_value(resource: Resource) -> JSON:
    """The detail of an entry about a resource beside its kind and version: of routes all they say, with the numbers for
    which they were chosen."""
    return dict(resource.value) if resource.kind == "routes" else {}


def named_ids(ids: list[str]) -> JSON:
    """The detail of an entry about rollouts: how many they are, and the first of them."""
    return {"rollouts": len(ids), "ids": sorted(ids)[:MAX_IDS_NAMED]}


@functools.cache
def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for its user
        return str(os.getuid())
