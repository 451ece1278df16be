"""The connections to a Redis server: redis-py's pool for commands and their replies, its pub/sub for what others wrote.

Driven by the Redis store and its writer. An outage is waited out, and so is a server that becomes a replica, reads its file
or runs somebody's script: whatever is asked is asked again until the address's patience ends, so what is sent must bear
being sent twice. All work happens in the event loop that opened the connection; callers in others are served from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from importlib import resources
from typing import Any, TypeVar

import msgspec
from redis import exceptions
from redis.asyncio.client import PubSub
from redis.asyncio.connection import BlockingConnectionPool, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, DecorrelatedJitterBackoff, NoBackoff

from agentlightning.errors import StoreError
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.notifier import Notifier
from agentlightning.store.redis.address import CONNECT_TIMEOUT_S, Address

R = TypeVar("R")

Command = tuple[str | bytes | int, ...]
Reply = Any

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

_NOT_NOW = (exceptions.ReadOnlyError, exceptions.MasterDownError)
_ANY: tuple[Any, ...] = (exceptions.RedisError, OSError)
_LOST: tuple[Any, ...] = (exceptions.ConnectionError, exceptions.TimeoutError, OSError, *_NOT_NOW)


_SCRIPT = resources.files(__package__).joinpath("apply.lua").read_text()
_SCRIPT_SHA = hashlib.sha1(_SCRIPT.encode(), usedforsecurity=False).hexdigest()


class RedisConnection:
    """Between `open` and `close`, both awaited in the same event loop."""

    def __init__(self, address: Address, notifier: Notifier) -> None:
        self.address = address
        self._notifier = notifier
        self._home: asyncio.AbstractEventLoop | None = None
        self._pool = self._new_pool()
        self._listener: asyncio.Task[None] | None = None
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._closing = False

    async def open(self) -> None:
        """Find the server; StoreError where it does not reply soon. Nothing is heard of others yet: `listen` does that."""
        self._home = asyncio.get_running_loop()
        await self.ask([("PING",)], patience_s=min(self.address.patience_s, OPEN_TIMEOUT_S))

    def listen(self, background: BackgroundTasks) -> None:
        forever = Retry(ConstantBackoff(LISTEN_PAUSE_S), -1, _ANY)

        async def again(_: Exception) -> None:
            """Whoever asks is told what is wrong; this only comes back."""

        self._listener = background.start("redis listener", lambda: forever.call_with_retry(self._listen, again))

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

    async def query(self, commands: Sequence[Command], at_once: bool = False) -> list[Reply]:
        """Replies to plain commands on keys, which are named without the tag; `at_once`: all of one moment."""
        if not commands:
            return []
        if at_once:
            words = [[each if isinstance(each, str) else str(each) for each in command] for command in commands]
            replies = await self.at_home(lambda: self._script(msgspec.msgpack.encode(words), "read"))
            return list(replies)
        return self._replies(await self.at_home(lambda: self.ask(self._tagged(commands))))

    async def query_at(self, commands: Sequence[Command], now_ns: Callable[[], int] | None) -> tuple[int, list[Reply]]:
        """The time, by this clock or the server's, and replies to commands on keys."""
        if now_ns is not None:
            return now_ns(), await self.query(commands)
        asked: list[Command] = [("TIME",), *self._tagged(commands)]
        (second, microsecond), *replies = self._replies(await self.at_home(lambda: self.ask(asked)))
        return int(second) * 10**9 + int(microsecond) * 1000, replies

    async def apply(self, transactions: bytes) -> list[Reply]:
        """The replies of the script to transactions."""
        return list(await self._script(transactions, "write"))

    async def _script(self, words: bytes, mode: str) -> Reply:
        asked = ("EVALSHA", _SCRIPT_SHA, 1, self.address.tag, words, mode)
        [reply] = await self.ask([asked])
        if isinstance(reply, exceptions.NoScriptError):  # a server that was started since has none
            await self.ask([("SCRIPT", "LOAD", _SCRIPT)])
            [reply] = await self.ask([asked])
        return self._replies([reply])[0]

    def _tagged(self, commands: Sequence[Command]) -> list[Command]:
        return [(name, f"{self.address.tag}:{key!s}", *rest) for name, key, *rest in commands]

    def _replies(self, replies: list[Reply]) -> list[Reply]:
        if error := next((reply for reply in replies if isinstance(reply, Exception)), None):
            raise self.address.explain(error)
        return replies

    async def ask(self, commands: Sequence[Command], patience_s: float | None = None) -> list[Reply]:
        """Send commands and read a reply to each. Errors that the server replies are replies; lost connections, and that it
        cannot do it now, are not."""

        deadline = time.monotonic() + (self.address.patience_s if patience_s is None else patience_s)

        async def recover(error: Exception) -> None:
            nonlocal deadline
            if isinstance(error, exceptions.BusyLoadingError):  # it reads its file: that takes as long as it takes
                deadline = time.monotonic() + self.address.patience_s
            over = self._closing or time.monotonic() >= deadline
            if over or isinstance(error, exceptions.AuthenticationError):
                raise error
            # Connections that were made before something was lost are lost too.
            await _disconnect(self._pool, in_use=False)

        retry = Retry(DecorrelatedJitterBackoff(MAX_PAUSE_S, MIN_PAUSE_S), -1, _LOST)
        try:
            return await retry.call_with_retry(lambda: self._ask_once(commands), recover)
        except _ANY as error:
            raise self.address.explain(error) from error

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

    def _new_pool(self) -> BlockingConnectionPool:
        return BlockingConnectionPool(
            MAX_CONNECTIONS + 1,
            timeout=None,
            connection_class=Connection if self.address.certificates is None else SSLConnection,
            **self.address.connection_settings(),
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,  # with one, redis-py would send by wait_for(), which loses cancellations
            socket_connect_timeout=CONNECT_TIMEOUT_S,
        )

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
    name, accepted = connection.address.name, connection.address.keep
    known, setting = await connection.ask([("INFO",), ("CONFIG", "GET", "appendfsync")])
    if isinstance(known, exceptions.ResponseError):
        raise connection.address.explain(known)
    facts = _facts(known)
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
    if "appendonly=off" in accepted:
        return
    if facts.get("aof_enabled") != "1":
        raise StoreError(
            f"{name}: the server keeps no append-only file, so what it acknowledges can be lost; set appendonly yes "
            "(redis-cli config set appendonly yes), or accept that with ?appendonly=off"
        )
    sync = setting[1].decode() if isinstance(setting, list) and setting else "always"  # hosted servers may not say
    if sync != "always" and f"appendfsync={sync}" not in accepted:
        raise StoreError(
            f"{name}: the server acknowledges writes before they are in its file (appendfsync {sync}), so they can be "
            "lost; set appendfsync always (redis-cli config set appendfsync always), or accept that with "
            f"?appendfsync={sync}"
        )


async def prepare_data(connection: RedisConnection) -> bytes:
    """The signing secret, made now where the store is new; StoreError where the data are of another version."""
    name = connection.address.name
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
            f"{name}: its schema has version {int(version)}, this program knows {SCHEMA_VERSION}; "
            "install the agentlightning that wrote it, or choose another prefix"
        )
    return bytes.fromhex(secret.decode())


def _facts(info: bytes) -> dict[str, str]:
    lines = [line.partition(":") for line in info.decode().splitlines()]
    return {name: value for name, found, value in lines if found}
