"""Access to /api: who calls (authentication) and what they may call (roles).

Driven by the RPC and the views for every request. A caller has the server key, a token of the store, or, on a server
without a key, a program of this machine that is no web page of another site. Tokens are cached for a few seconds, so long
they may still open other servers after they were revoked. A method that the table does not name is for admins only. A token
of one run has arguments that name no run narrowed to its own.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import orjson
from cachetools import LRUCache, TTLCache

from agentlightning import errors
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.gateway.external_keys import ExternalKeys
from agentlightning.store.base import LightningStore, RolloutQuery
from agentlightning.store.server_keys import KEY_VARIABLE, is_loopback
from agentlightning.store.summaries import SummaryQuery
from agentlightning.store.tokens import Token, TokenRole, hash_of, is_token
from agentlightning.store.wire import BINDS_HEADER

log = logging.getLogger(__name__)

Headers = Iterable[tuple[bytes, bytes]]
Arguments = dict[str, Any]

MAX_CACHED_ROLLOUTS = 8192
"""Rollouts whose runs are remembered."""


class RoleError(ConfigError):
    """The caller is known, and may not."""

    http_status = 403


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An authenticated caller of the API."""

    role: TokenRole
    run_id: str | None = None
    """None: every run; a trainer has none before it created it."""
    token_id: str = ""
    """'' for the server key, and for callers of a server without one."""
    binds: str | None = None
    """Id of a token without a run: the first run that the caller creates becomes its run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Touched:
    """Things that a request names."""

    runs: Iterable[str | None] = ()
    rollouts: Iterable[str] = ()
    tokens: Iterable[str] = ()
    models: Iterable[tuple[str, int]] = ()
    """Name and number of model versions."""


@dataclass(frozen=True, slots=True)
class MethodRule:
    """The roles beside admin that may call a method, and what a request to it names."""

    roles: frozenset[TokenRole]
    touched: Callable[[Arguments], Touched]
    default: str = ""
    """The argument that is narrowed to the token's run where it is None."""
    refused: Callable[[Arguments], str | None] = lambda _: None
    """The reason why nobody but an admin may send this request."""


def _rule(roles: str, touched: Callable[[Arguments], Touched], default: str = "") -> MethodRule:
    return MethodRule(frozenset(roles.split()), touched, default)  # type: ignore[arg-type]


def _run(given: Arguments) -> Touched:
    return Touched(runs=[given["run_id"]])


def _rollouts(given: Arguments) -> Touched:
    return Touched(rollouts=given["rollout_ids"])


def _within(name: str) -> Callable[[Arguments], Touched]:
    """The run of the argument of this name."""
    return lambda given: Touched(runs=[given[name].run_id])


def _model(given: Arguments) -> Touched:
    version = given["version"]
    changed = [(version.name, version.number)] if version.revision else []
    return Touched(runs=[version.run_id], models=changed)


def _each(name: str, rollouts: bool = False) -> Callable[[Arguments], Touched]:
    """The run of each record, and its rollout."""

    def touched(given: Arguments) -> Touched:
        records = given[name]
        return Touched(
            runs={each.run_id for each in records}, rollouts={each.rollout_id for each in records} if rollouts else ()
        )

    return touched


def _finished(given: Arguments) -> Touched:
    finishes = given["finishes"]
    rewards = [reward for finish in finishes for reward in finish.rewards]
    return Touched(
        runs={reward.run_id for reward in rewards},
        rollouts={finish.lease.rollout_id for finish in finishes} | {reward.rollout_id for reward in rewards},
    )


def _heartbeat(given: Arguments) -> Touched:
    return Touched(runs=[given["worker"].run_id], rollouts={lease.rollout_id for lease in given["leases"]})


def _created_token(given: Arguments) -> str | None:
    return None if given["role"] == "worker" else "role: a trainer makes tokens for workers of its run only"


_ALL_READ = "trainer worker reader"
_READ = "trainer reader"

RULES: Mapping[str, MethodRule] = {
    "create_run": _rule("trainer", _run, "run_id"),
    "update_run": _rule("trainer", _run),
    "runs": _rule(_ALL_READ, lambda given: Touched(runs=given["ids"]), "ids"),
    "enqueue": _rule("trainer", _each("rollouts")),
    "claim": _rule("trainer worker", _within("worker")),
    "heartbeat": _rule("trainer worker", _heartbeat),
    "finish": _rule("trainer worker", _finished),
    "cancel": _rule("trainer", _rollouts),
    "rollouts": _rule(_ALL_READ, _within("query"), "query"),
    "summaries": _rule(_ALL_READ, _within("query"), "query"),
    "count": _rule(_READ, _run),
    "attempts": _rule(_ALL_READ, _rollouts),
    "wait": _rule(_READ, _run),
    "workers": _rule(_READ, _run, "run_id"),
    # A worker that could append calls would forge what is trained on.
    "append_calls": _rule("trainer", _each("calls", rollouts=True)),
    "put_files": _rule(
        "trainer",
        lambda given: Touched(
            runs=[given["run_id"]], rollouts=[] if given["rollout_id"] is None else [given["rollout_id"]]
        ),
    ),
    "files": _rule(_ALL_READ, _run),
    "append_spans": _rule("trainer worker", _each("spans", rollouts=True)),
    "calls": _rule(_ALL_READ, _rollouts),
    "spans": _rule(_ALL_READ, _rollouts),
    "record_rewards": _rule("trainer worker", _each("rewards", rollouts=True)),
    "record_feedback": _rule("trainer", _each("rewards", rollouts=True)),
    "rewards": _rule(_ALL_READ, _rollouts),
    "put_resources": _rule("trainer", _each("resources")),
    "resources": _rule(_ALL_READ, _run),
    "log_metrics": _rule("trainer", _each("metrics")),
    "metrics": _rule(_READ, _run),
    "series": _rule(_READ, _run),
    "wait_resources": _rule(_READ, _run),
    "follow_metrics": _rule(_READ, _run),
    "statistics": _rule(_READ, _run, "run_id"),
    "open_step": _rule("trainer", _run),
    "close_step": _rule("trainer", _run),
    "steps": _rule(_READ, _run),
    "reopen_steps": _rule("trainer", _run),
    "put_checkpoint": _rule("trainer", _within("checkpoint")),
    "checkpoints": _rule(_READ, _run),
    "record_credit": _rule("trainer", _each("credits", rollouts=True)),
    "credit": _rule(_READ, _rollouts),
    "drop_credit": _rule("trainer", _run),
    "create_token": replace(_rule("trainer", _run), refused=_created_token),
    "tokens": _rule(_READ, _run, "run_id"),
    "revoke_token": _rule("trainer", lambda given: Touched(tokens=[given["token_id"]])),
    "put_model": _rule("trainer", _model),
    "models": _rule(_READ, _run, "run_id"),
    "aliases": _rule("reader", lambda _: Touched(runs=[None])),
    "wait_aliases": _rule("reader", lambda _: Touched(runs=[None])),
}
"""By method of the store. Left to admins: drop_records, delete_runs, expire_leases, mark_delivered, open_session,
find_token, put_alias, signing_secret. Clients may call none: they ask the served model (sessions/)."""


class Permissions:
    """Decides what callers may do in an open store."""

    def __init__(
        self, store: LightningStore, external_keys: ExternalKeys = ExternalKeys(), limit: int = MAX_CACHED_ROLLOUTS
    ) -> None:
        self._store = store
        self._external_keys = external_keys
        self._runs: LRUCache[str, str] = LRUCache(limit)
        """The run of a rollout."""

    def learn(self, runs: Mapping[str, str]) -> None:
        """Remember the runs of rollouts."""
        self._runs.update(runs)

    async def check(self, caller: Caller, method: str, given: Arguments) -> Arguments:
        """The arguments with which the method is to be executed for this caller. RoleError where it may not."""
        if method == "put_resources":  # what the operator of the server forbids is nobody's to store
            for resource in given["resources"]:
                if (why := self._external_keys.refusal_of(resource)) is not None:
                    raise RoleError(why)
        if caller.role == "admin":
            return given
        rule = RULES.get(method)
        if rule is None or caller.role not in rule.roles:
            roles = " or ".join(sorted({"admin"} | (set() if rule is None else rule.roles)))
            raise RoleError(f"{method}: needs a token of role {roles}; this one's role is {caller.role}")
        if caller.run_id is None:
            if caller.role == "trainer" and method == "runs":
                return {**given, "ids": []}  # whoever asks whether its run is there already is told that it is not
            if caller.role == "trainer" and method != "create_run":
                raise RoleError(f"{method}: this trainer's token has no run yet; it gets the first that it creates")
            return given
        given = _narrowed(given, rule.default, caller.run_id)
        await self._check_run(caller, caller.run_id, method, rule, given)
        return given

    async def _check_run(self, caller: Caller, run_id: str, method: str, rule: MethodRule, given: Arguments) -> None:
        touched = rule.touched(given)
        others = {"all runs" if each is None else f"run {each}" for each in touched.runs if each != run_id}
        ids = set(touched.rollouts)
        runs = {each: self._runs[each] for each in ids if each in self._runs}
        if unknown := ids - runs.keys():
            # A rollout that does not exist is left to the method, which says so. What is remembered decides nothing here:
            # other requests, and this one, push rollouts out of the cache.
            found = {each.id: each.run_id for each in await self._store.rollouts(RolloutQuery(ids=sorted(unknown)))}
            self.learn(found)
            runs |= found
        others |= {f"rollout {each}" for each, its_run in runs.items() if its_run != run_id}
        named = set(touched.tokens)
        tokens = {each.id: each.role for each in await self._store.tokens(run_id)} if named else {}
        others |= {f"token {each}" for each in named - tokens.keys()}
        for name, number in touched.models:
            if number not in {each.number for each in await self._store.models(name, run_id)}:
                others.add(f"model version {name}@{number}")
        if others:
            raise RoleError(f"{method}: {min(others)}: this token opens run {run_id} only")
        if kept := [each for each in named if tokens[each] != "worker"]:
            raise RoleError(f"{method}: token {min(kept)}: a trainer revokes tokens of workers only")
        if (why := rule.refused(given)) is not None:
            raise RoleError(f"{method}: {why}")


def _narrowed(given: Arguments, default: str, run_id: str) -> Arguments:
    """The arguments with the run where they name none."""
    if not default:
        return given
    value = given[default]
    if isinstance(value, RolloutQuery | SummaryQuery):
        return {**given, default: replace(value, run_id=run_id)} if value.run_id is None else given
    if value is not None:
        return given
    return {**given, default: run_id if default == "run_id" else [run_id]}


# --- authentication -----------------------------------------------------------------------------------------------------

MADE_BY_THE_USER = (b"none", b"same-origin")
"""Values of Sec-Fetch-Site of requests that no other site made."""

TOKEN_AGE_S = 5.0
"""A token is read again after so long: the time within which its end is noticed everywhere."""
MAX_CACHED_TOKENS = 1024

_WANTED = "send `Authorization: Bearer` with AGL_SERVER_KEY, the server's key or a token of it (agl tokens create)"


class ServerKeyError(ConfigError):
    """Nobody knows the caller."""

    http_status = 401


class Authentication:
    """The callers of one server over an open store."""

    def __init__(self, store: LightningStore, server_key: str | None, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._store = store
        self.server_key = server_key
        self._now_ns = now_ns
        self._tokens: TTLCache[str, asyncio.Future[Token | None]] = TTLCache(
            MAX_CACHED_TOKENS, TOKEN_AGE_S, time.monotonic
        )
        """Reads by the hash of the secret, done or under way: a crowd of requests with one token costs one."""

    async def caller(self, headers: Headers) -> Caller:
        """The caller of a request with these headers. Raises ServerKeyError."""
        key = presented_key(headers)
        if self.server_key is not None and hmac.compare_digest(key, self.server_key.encode()):
            return Caller(role="admin", binds=_bound(headers))
        text = key.decode("latin-1")
        if is_token(text):
            return _caller(await self._valid(text), headers)
        if self.server_key is None:
            return Caller(role="admin", binds=_bound(headers))
        raise ServerKeyError(f"server key: missing or wrong; {_WANTED}")

    async def client(self, secret: str) -> Token:
        """The serving key with this secret. Raises ServerKeyError, and RoleError where a token is none."""
        token = await self._valid(secret)
        if token.role != "client":
            raise RoleError(
                f"token {token.id}: its role is {token.role}; a served model is asked with one of role client"
            )
        return token

    def forget(self) -> None:
        """A token was revoked, or got its run, through this server: each is read again when it comes next."""
        self._tokens.clear()

    async def _valid(self, secret: str) -> Token:
        secret_hash = hash_of(secret)
        reading = self._tokens.get(secret_hash)
        if reading is None or (reading.done() and (reading.cancelled() or reading.exception() is not None)):
            reading = self._tokens[secret_hash] = asyncio.ensure_future(self._store.find_token(secret_hash))
        token = await asyncio.shield(reading)
        if token is None:
            raise ServerKeyError(f"token: unknown to this server; {_WANTED}")
        if (ended := token.ended(self._now_ns())) is not None:
            when_ns = token.revoked_ns or token.expires_ns or 0
            when = f"{datetime.fromtimestamp(when_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
            raise ServerKeyError(f"token {token.id}: {ended} at {when}; have another made: agl tokens create")
        return token


def _caller(token: Token, headers: Headers) -> Caller:
    own = token.id if token.role == "trainer" and token.run_id is None else None
    binds = _bound(headers) if token.role == "admin" else own
    return Caller(role=token.role, run_id=token.run_id, token_id=token.id, binds=binds)


def _bound(headers: Headers) -> str | None:
    """The token for which an admin, such as a further server over this one's store, says that it creates a run."""
    return next((value.decode("latin-1") for name, value in headers if name == BINDS_HEADER.encode()), None)


# --- requests ---------------------------------------------------------------------------------------------------------


def presented_key(headers: Headers) -> bytes:
    """The bearer token of a request; empty where it has none."""
    presented = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, credentials = value.partition(b" ")
            if scheme.lower() == b"bearer":
                presented = credentials.strip()
    return presented


def cross_site_reason(method: str, headers: Headers) -> str | None:
    """The reason why a request to a server without a key could come from a web page in the user's browser; None if it
    cannot.

    A page can make a browser on this machine send requests to loopback. It cannot choose the Host header (its own name,
    even where that name resolves to loopback), hide its Origin, or send JSON or msgpack without asking first.
    """
    given = dict(headers)
    if b"x-forwarded-for" in given or b"forwarded" in given:
        return f"X-Forwarded-For: a server without a key is for its own machine, not behind a proxy; set {KEY_VARIABLE}"
    host = given.get(b"host", b"").decode("latin-1")
    if not is_loopback(_name(host)):
        return f"Host: expected a loopback name or address, because this server has no key, got {host[:80]!r}"
    origin = given.get(b"origin", b"").decode("latin-1")
    if origin and origin.partition("://")[2] != host:
        return f"Origin: expected none or http://{host}, because this server has no key, got {origin[:80]!r}"
    if given.get(b"sec-fetch-site", b"none") not in MADE_BY_THE_USER:
        return "Sec-Fetch-Site: a page of another site may not use a server without a key"
    if method not in ("GET", "HEAD"):
        content_type = given.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if content_type not in (b"application/json", b"application/msgpack"):
            return f"Content-Type: expected application/json, got {content_type[:80].decode('latin-1')!r}"
    return None


def _name(host: str) -> str:
    """The name in a Host header, without its port.

    >>> _name("localhost:80"), _name("[::1]:80"), _name("::1")
    ('localhost', '::1', '::1')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]


def error_body(kind: type[AgentLightningError], message: str) -> bytes:
    """An error as JSON, under the name of the nearest class that clients know."""
    known = next(base for base in kind.__mro__ if base.__module__ == errors.__name__)
    return orjson.dumps({"error": {"type": known.__name__, "message": message}})
