"""The Redis server of a store: its URL, the connections to it, and its failures in plain words.

``redis://[user:password@]host[:port][/number]?prefix=NAME``, or rediss:// for TLS. An outage is waited out, and so is a
server that becomes a replica, reads its file or runs somebody's script: what is asked is asked again until the address's
patience ends, so it must bear being sent twice. All work happens in the event loop that opened the connection; callers in
others are served from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
from redis import exceptions
from redis.asyncio.client import PubSub
from redis.asyncio.connection import BlockingConnectionPool, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from agentlightning.errors import ConfigError, StoreError
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.runtime.backoff import Backoff
from agentlightning.store.urls import seconds_in_url
from agentlightning.store.waiting import Notifier

R = TypeVar("R")

Command = tuple[str | bytes | int, ...]
Reply = Any

CONNECT_TIMEOUT_S = 5.0
MAX_OUTAGE_S = 75.0
"""Seconds that an outage may last before callers get an error: a minute, and the time it takes to notice."""
MAX_CONNECTIONS = 8
"""Most that ask at a time; one more listens."""
REPLY_TIMEOUT_S = 15.0
"""Seconds after which a connection that was asked counts as lost."""
LISTEN_TIMEOUT_S = 10.0
"""Seconds of silence after which the one that listens asks whether the server is there."""
LISTEN_PAUSE_S = 0.2
MIN_PAUSE_S = 0.02
MAX_PAUSE_S = 1.0
OPEN_TIMEOUT_S = 3.0
"""Patience with a server that does not reply when the store is opened: the URL may be wrong."""

MIN_VERSION = (7, 0)
SCHEMA_VERSION = 1

CERTIFICATES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
ACCEPTED = {"appendonly": ("off",), "appendfsync": ("everysec", "no")}
"""Settings of the server that a user may accept in the URL though they can lose data."""
OPTIONS = ("prefix", *ACCEPTED, "patience", *CERTIFICATES)

_NOT_NOW = (exceptions.ReadOnlyError, exceptions.MasterDownError)
_ANY: tuple[Any, ...] = (exceptions.RedisError, OSError)
_LOST: tuple[Any, ...] = (exceptions.ConnectionError, exceptions.TimeoutError, OSError, *_NOT_NOW)

_SCRIPT = resources.files(__package__).joinpath("apply.lua").read_text()
_SCRIPT_SHA = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()

_REFUSED = "the server refuses this user and password; correct them in the URL: redis://USER:PASSWORD@HOST"
_REPLICA = "the server is a read-only replica; give the URL of its primary"
_SENTENCES = {
    "WRONGPASS": _REFUSED,
    "NOAUTH": _REFUSED,
    "invalid username-password": _REFUSED,
    "MISCONF": "the server cannot write to its disk; free some space there and go on: what was acknowledged is kept",
    "maxmemory": "the server's memory is full; raise its maxmemory or delete runs: what was acknowledged is kept",
    "READONLY": _REPLICA,
    "read only replica": _REPLICA,
    "MASTERDOWN": "the server is a replica that has lost its primary; give the URL of the primary, or start that",
    "is busy running a script": "the server is busy with a script of somebody else; end that: redis-cli script kill",
    "DB index": "the server has no database of this number; correct the number after the host",
    "max number of clients": "the server has as many clients as it may; raise its maxclients",
    "LOADING": "the server is still reading its data; try again when it has",
    "loading the dataset": "the server is still reading its data; try again when it has",
}


@dataclass(frozen=True, slots=True)
class Address:
    """A store's URL in parts."""

    host: str
    port: int
    database: int
    user: str | None
    password: str | None
    certificates: dict[str, str] | None
    """None where the connection is not encrypted."""
    prefix: str
    accepted: dict[str, str]
    """Values of ACCEPTED."""
    patience_s: float

    @staticmethod
    def at(url: str) -> Address:
        """Parses a redis:// or rediss:// URL; ConfigError otherwise."""
        parts = urlsplit(url)
        said = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := sorted(set(said) - set(OPTIONS)):
            raise ConfigError(f"store: unknown in a Redis URL: {', '.join(unknown)}; known are {', '.join(OPTIONS)}")
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise ConfigError("store: expected redis://[user:password@]host[:port][/number], or rediss:// for TLS")
        try:
            port = parts.port or 6379
        except ValueError as error:
            raise ConfigError(f"store: port: expected a number in a Redis URL: {error}") from None
        prefix, number = said.get("prefix", "default"), parts.path.strip("/") or "0"
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", prefix):
            raise ConfigError(f"store: prefix: expected letters, digits, '.', '_' and '-', got {prefix!r}")
        if not re.fullmatch(r"[0-9]+", number):
            raise ConfigError(f"store: the database after the host: expected a number in a Redis URL, got {number!r}")
        certificates = {name: said[name] for name in CERTIFICATES if name in said}
        if certificates and parts.scheme == "redis":
            raise ConfigError(f"store: {min(certificates)} is of no use without TLS: write rediss://")
        accepted = {name: said[name] for name in ACCEPTED if name in said}
        for name, value in accepted.items():
            if value not in ACCEPTED[name]:
                wanted = " or ".join(ACCEPTED[name])
                raise ConfigError(f"store: {name}: expected {wanted} in a Redis URL, got {value!r}")
        return Address(
            host=parts.hostname,
            port=port,
            database=int(number),
            user=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            certificates=certificates if parts.scheme == "rediss" else None,
            prefix=prefix,
            accepted=accepted,
            patience_s=seconds_in_url("patience", said.get("patience", MAX_OUTAGE_S)),
        )

    @property
    def name(self) -> str:
        """Its name in sentences: without the password."""
        scheme = "redis" if self.certificates is None else "rediss"
        return f"{scheme}://{self.host}:{self.port}/{self.database} ({self.prefix})"

    @property
    def tag(self) -> str:
        """The beginning of every key."""
        return "{agl:" + self.prefix + "}"

    def explain(self, error: Exception) -> StoreError:
        """The sentence for a failure, with where and what to do."""
        said = str(error)
        if isinstance(error, (exceptions.AuthenticationError, exceptions.AuthenticationWrongNumberOfArgsError)):
            return StoreError(f"{self.name}: {_REFUSED}")
        for symptom, sentence in _SENTENCES.items():
            if symptom in said:
                return StoreError(f"{self.name}: {sentence}")
        if isinstance(error, exceptions.NoPermissionError):
            return StoreError(f"{self.name}: the user of the URL may not do what a store does; allow it: {said}")
        if isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError, OSError)):
            reason = said or type(error).__name__
            return StoreError(f"{self.name}: the server cannot be reached; start it, or correct the URL: {reason}")
        return StoreError(f"{self.name}: the server failed: {said}")


class RedisConnection:
    """Between `open` and `close`, both awaited in the same event loop."""

    def __init__(self, address: Address, notifier: Notifier) -> None:
        self.address = address
        self._notifier = notifier
        self._home: asyncio.AbstractEventLoop | None = None
        certificates: dict[str, Any] = dict(address.certificates or {})
        self._pool = BlockingConnectionPool(
            MAX_CONNECTIONS + 1,
            timeout=None,
            connection_class=Connection if address.certificates is None else SSLConnection,
            host=address.host,
            port=address.port,
            db=address.database,
            username=address.user,
            password=address.password,
            **certificates,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,  # with one, redis-py would send by wait_for(), which loses cancellations
            socket_connect_timeout=CONNECT_TIMEOUT_S,
        )
        self._listener: asyncio.Task[None] | None = None
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._closing = False

    async def open(self) -> None:
        """Find the server; StoreError where it does not reply soon. Nothing is heard of others yet: `listen` does that."""
        self._home = asyncio.get_running_loop()
        await self.ask([("PING",)], patience_s=min(self.address.patience_s, OPEN_TIMEOUT_S))

    def listen(self, background: BackgroundTasks) -> None:
        """Notify those who wait of what others publish, from now on."""

        async def listen_for_ever() -> None:
            while True:
                with contextlib.suppress(*_ANY):  # whoever asks is told what is wrong; this only comes back
                    await self._listen()
                await asyncio.sleep(LISTEN_PAUSE_S)

        self._listener = background.start("redis listener", listen_for_ever)

    def hasten(self) -> None:
        """Wait for no server any longer: who owns the store wants to close it."""
        self._closing = True

    async def close(self) -> None:
        self.hasten()
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
        await _disconnect(self._pool)

    async def at_home(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run this in the connection's event loop."""
        if self._home is asyncio.get_running_loop():
            return await work()
        if self._home is None or self._home.is_closed():
            raise StoreError(f"{self.address.name}: the event loop that opened the store has ended; open it again")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._home))

    async def query(self, commands: Sequence[Command], now: bool = False) -> list[Reply]:
        """Replies to plain commands on keys, which come second, without the tag; first the server's time, if `now`."""
        tagged: list[Command] = [(name, f"{self.address.tag}:{key!s}", *rest) for name, key, *rest in commands]
        asked = [("TIME",), *tagged] if now else tagged
        return self._replies(await self.at_home(lambda: self.ask(asked))) if asked else []

    async def query_at(self, commands: Sequence[Command], now_ns: Callable[[], int] | None) -> tuple[int, list[Reply]]:
        """The time, by this clock or the server's, and replies to commands."""
        if now_ns is not None:
            return now_ns(), await self.query(commands)
        (second, microsecond), *replies = await self.query(commands, now=True)
        return int(second) * 10**9 + int(microsecond) * 1000, replies

    async def query_at_once(self, commands: Sequence[Command]) -> list[Reply]:
        """Replies to commands, all of one moment: by the script, since a server without memory takes no MULTI."""
        words = [[each if isinstance(each, str) else str(each) for each in command] for command in commands]
        return await self.at_home(lambda: self._script(msgspec.msgpack.encode(words), "read"))

    async def apply(self, transactions: bytes) -> list[Reply]:
        """The replies of the script to transactions."""
        return await self._script(transactions, "write")

    async def _script(self, words: bytes, mode: str) -> list[Reply]:
        asked = ("EVALSHA", _SCRIPT_SHA, 1, self.address.tag, words, mode)
        [reply] = await self.ask([asked])
        if isinstance(reply, exceptions.NoScriptError):  # a server that was started since has none
            await self.ask([("SCRIPT", "LOAD", _SCRIPT)])
            [reply] = await self.ask([asked])
        return list(self._replies([reply])[0])

    def _replies(self, replies: list[Reply]) -> list[Reply]:
        if error := next((reply for reply in replies if isinstance(reply, Exception)), None):
            raise self.address.explain(error)
        return replies

    async def ask(self, commands: Sequence[Command], patience_s: float | None = None) -> list[Reply]:
        """Send commands and read a reply to each. Errors that the server replies are replies; lost connections, and that it
        cannot do it now, are not."""
        backoff = Backoff(MIN_PAUSE_S, MAX_PAUSE_S, self.address.patience_s if patience_s is None else patience_s)
        while True:
            try:
                return await self._ask_once(commands)
            except _ANY as error:
                if isinstance(error, exceptions.BusyLoadingError):  # it reads its file: that takes as long as it takes
                    backoff.reset()
                final = self._closing or isinstance(error, exceptions.AuthenticationError)
                if final or not isinstance(error, _LOST) or not await backoff.sleep():
                    raise self.address.explain(error) from error
                # Connections that were made before something was lost are lost too.
                await _disconnect(self._pool, in_use=False)

    async def _ask_once(self, commands: Sequence[Command]) -> list[Reply]:
        # With a place there is a connection: the pool's own wait loses a wake-up where who is woken is cancelled.
        async with self._places, asyncio.timeout(REPLY_TIMEOUT_S):
            connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
            try:  # a connection that is left while it sends or reads is disconnected by redis-py
                await connection.send_packed_command([_packed(commands)])
                replies = [await _reply(connection) for _ in commands]
            finally:
                await self._pool.release(connection)
        if unable := next((reply for reply in replies if _is_not_now(reply)), None):
            raise unable if isinstance(unable, _NOT_NOW) else exceptions.ConnectionError(str(unable)) from unable
        return replies

    async def _listen(self) -> None:
        """Until the connection is lost."""
        async with PubSub(self._pool) as pubsub:
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await pubsub.subscribe(self.address.tag)
            asked = False
            while True:
                heard = await pubsub.get_message(timeout=LISTEN_TIMEOUT_S)
                if heard is None:
                    if asked:
                        raise exceptions.TimeoutError("the server is silent")
                    await pubsub.ping()
                elif heard["type"] == "subscribe":
                    self._notifier.notify_all()  # nobody knows what was said before
                elif heard["type"] == "message":
                    about, run_id, value = heard["data"].decode().split(" ")
                    self._notifier.notify({(about, run_id): int(value)})
                asked = heard is None


async def _disconnect(pool: BlockingConnectionPool, in_use: bool = True) -> None:
    """Close connections; over TLS a server that is silent does not close them in time, and they are left all the same."""
    with contextlib.suppress(*_ANY):
        await pool.disconnect(in_use)


def _is_not_now(reply: Reply) -> bool:
    if isinstance(reply, _NOT_NOW):
        return True
    return isinstance(reply, exceptions.ResponseError) and str(reply).startswith("BUSY ")


def _packed(commands: Sequence[Command]) -> bytes:
    """The commands in Redis' protocol: in a fifth of the time that redis-py takes."""
    parts: list[bytes] = []
    for command in commands:
        parts.append(b"*%d\r\n" % len(command))
        for word in command:
            raw = word if isinstance(word, bytes) else str(word).encode()
            parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


async def _reply(connection: Connection) -> Reply:
    try:
        return await connection.read_response()
    except exceptions.ResponseError as error:
        return error


# --- opening ----------------------------------------------------------------------------------------------------------


async def check_server(connection: RedisConnection) -> None:
    """StoreError with what to set where the server is too old, or would lose or forget what it acknowledged."""
    name, accepted = connection.address.name, connection.address.accepted
    info, setting = await connection.ask([("INFO",), ("CONFIG", "GET", "appendfsync")])
    if isinstance(info, exceptions.ResponseError):
        raise connection.address.explain(info)
    facts = {
        name: value for name, found, value in (line.partition(":") for line in info.decode().splitlines()) if found
    }
    version = facts.get("redis_version", "0")
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise StoreError(f"{name}: the server is Redis {version}, and a store needs 7.0 or later; upgrade it")
    if facts.get("role") == "slave":
        raise connection.address.explain(exceptions.ReadOnlyError("READONLY"))
    if facts.get("maxmemory", "0") != "0" and facts.get("maxmemory_policy") != "noeviction":
        raise StoreError(
            f"{name}: the server forgets data when its memory is full (maxmemory-policy {facts['maxmemory_policy']}); "
            "set maxmemory-policy noeviction"
        )
    if "appendonly" in accepted:
        return
    if facts.get("aof_enabled") != "1":
        raise StoreError(
            f"{name}: the server keeps no append-only file, so what it acknowledges can be lost; set appendonly yes "
            "(redis-cli config set appendonly yes), or accept that with ?appendonly=off"
        )
    sync = setting[1].decode() if isinstance(setting, list) and setting else "always"  # hosted servers may not say
    if sync not in ("always", accepted.get("appendfsync")):
        raise StoreError(
            f"{name}: the server acknowledges writes before they are in its file (appendfsync {sync}), so they can be "
            "lost; set appendfsync always (redis-cli config set appendfsync always), or accept that with "
            f"?appendfsync={sync}"
        )


async def prepare_data(connection: RedisConnection) -> bytes:
    """The signing secret, made now where the store is new; StoreError where the data are of another version."""
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
            f"{connection.address.name}: its schema has version {int(version)}, this program knows {SCHEMA_VERSION}; "
            "install the agentlightning that wrote it, or choose another prefix"
        )
    return bytes.fromhex(secret.decode())
