"""The connections to a Redis server: redis-py's pool for commands and their replies, its pub/sub for what others wrote.

Driven by the Redis store and its writer. An outage is waited out, and so is a server that becomes a replica, reads its file
or runs somebody's script: whatever is asked is asked again until the address's patience ends, so what is sent must bear
being sent twice. All work happens in the event loop that opened the connection; callers in others are served from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import orjson
from redis import exceptions
from redis.asyncio.client import PubSub
from redis.asyncio.connection import BlockingConnectionPool, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, DecorrelatedJitterBackoff, NoBackoff

from agentlightning.errors import StoreError
from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.notifier import Notifier
from agentlightning.store.redis.address import CONNECT_TIMEOUT_S, Address
from agentlightning.store.redis.scripts import Script
from agentlightning.store.sentences import refusal

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

_NOT_NOW = (exceptions.ReadOnlyError, exceptions.MasterDownError)
_ANY: tuple[Any, ...] = (exceptions.RedisError, OSError)
_LOST: tuple[Any, ...] = (exceptions.ConnectionError, exceptions.TimeoutError, OSError, *_NOT_NOW)


class RedisConnection:
    """Between `open` and `close`, both awaited in the same event loop."""

    def __init__(self, address: Address, scripts: Mapping[str, Script], notifier: Notifier) -> None:
        self.address = address
        self._scripts = scripts
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

    async def read(self, script: str, question: Mapping[str, Any]) -> Reply:
        """Returns a reading script's reply; NotFoundError where it says that there is no such run."""
        [reply] = await self.run([(script, (orjson.dumps(question),))])
        if isinstance(reply, exceptions.ResponseError):
            if str(reply).startswith("NOSUCHRUN "):
                raise refusal("no_run", str(reply).partition(" ")[2])
            raise self.address.explain(reply)
        return reply

    async def query(self, commands: Sequence[tuple[str, str, *tuple[str | bytes | int, ...]]]) -> list[Reply]:
        """Replies to plain commands on keys, which are named without the tag, each of its own moment."""
        if not commands:
            return []
        asked = [(name, f"{self.address.tag}:{key}", *rest) for name, key, *rest in commands]
        replies = await self.at_home(lambda: self.ask(asked))
        if error := next((reply for reply in replies if isinstance(reply, Exception)), None):
            raise self.address.explain(error)
        return replies

    async def run(self, calls: Sequence[tuple[str, Sequence[str | bytes]]]) -> list[Reply]:
        """Replies to scripts with their arguments, in one round trip. Errors of scripts are replies."""
        return await self.at_home(lambda: self._run(calls))

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
                await connection.send_packed_command(connection.pack_commands(commands))
                replies = [await _reply(connection) for _ in commands]
            finally:
                await self._pool.release(connection)
        if unable := next((reply for reply in replies if _is_not_now(reply)), None):
            raise unable if isinstance(unable, _NOT_NOW) else exceptions.ConnectionError(str(unable)) from unable
        return replies

    async def _run(self, calls: Sequence[tuple[str, Sequence[str | bytes]]]) -> list[Reply]:
        replies = await self.ask([("EVALSHA", *self._named(*each)) for each in calls])
        while unknown := [place for place, reply in enumerate(replies) if isinstance(reply, exceptions.NoScriptError)]:
            texts = {calls[place][0] for place in unknown}  # a server that was started since it was asked has none
            await self.ask([("SCRIPT", "LOAD", self._scripts[name].text) for name in texts])
            again = await self.ask([("EVALSHA", *self._named(*calls[place])) for place in unknown])
            for place, reply in zip(unknown, again, strict=True):
                replies[place] = reply
        return replies

    def _named(self, name: str, arguments: Sequence[str | bytes]) -> Command:
        return (self._scripts[name].sha, 1, self.address.tag, *arguments)

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


async def _reply(connection: Connection) -> Reply:
    try:
        return await connection.read_response()
    except exceptions.ResponseError as error:
        return error
