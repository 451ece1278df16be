"""The connections to a Redis server: a few that ask and are answered, and one that hears what others wrote.

Driven by the Redis store and its writer. An outage is waited out: whatever is asked is asked again until the address's
patience ends, so what is sent must bear being sent twice. All work happens in the event loop that opened the link;
callers in others are served from there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import orjson
from redis import exceptions
from redis.asyncio.connection import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from agentlightning.backoff import Backoff
from agentlightning.errors import StoreError
from agentlightning.store.notifier import Notifier
from agentlightning.store.redis.address import Address
from agentlightning.store.redis.scripts import Script
from agentlightning.store.sentences import refusal

R = TypeVar("R")

Command = tuple[str | bytes | int, ...]
Reply = Any

MAX_CONNECTIONS = 8
"""Most that ask at a time."""
CONNECT_TIMEOUT_S = 5.0
REPLY_TIMEOUT_S = 15.0
"""Seconds after which a connection that was asked counts as lost."""
LISTEN_TIMEOUT_S = 10.0
"""Seconds of silence after which the one that hears asks whether the server is there."""
MIN_PAUSE_S = 0.02
MAX_PAUSE_S = 1.0
OPEN_TIMEOUT_S = 3.0
"""Patience with a server that does not answer when the store is opened: the URL may be wrong."""

_LOST = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ClusterDownError, OSError)


class RedisConnection:
    """Between `open` and `close`, both awaited in the same event loop."""

    def __init__(self, address: Address, scripts: Mapping[str, Script], notifier: Notifier) -> None:
        self.address = address
        self._settings = address.connection_settings()
        self._scripts = scripts
        self._notifier = notifier
        self._home: asyncio.AbstractEventLoop | None = None
        self._idle: list[Connection] = []
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)
        self._listener: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def open(self) -> None:
        """Find the server; StoreError where it does not answer soon. It is not yet heard: `listen` does that."""
        self._home = asyncio.get_running_loop()
        await self.ask([("PING",)], patience_s=min(self.address.patience_s, OPEN_TIMEOUT_S))

    def listen(self) -> None:
        self._listener = asyncio.create_task(self._listen(), name="redis-listener")

    def hasten(self) -> None:
        """Wait for no server any longer: who owns the store wants to close it."""
        self._closing.set()

    async def close(self) -> None:
        self.hasten()
        if self._listener is not None:
            self._listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listener
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect()

    async def at_home(self, work: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Run this in the link's event loop."""
        if self._home is asyncio.get_running_loop():
            return await work()
        if self._home is None or self._home.is_closed():
            raise StoreError(f"{self.address.name}: the event loop that opened the store has ended; open it again")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self._home))

    async def read(self, script: str, question: Mapping[str, Any]) -> Reply:
        """Returns a reading script's answer; NotFoundError where it says that there is no such run."""
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

    async def rename(self, key: str, new: str) -> None:
        """Give a key the place of another, at once."""
        await self.query([("RENAME", key, f"{self.address.tag}:{new}")])

    async def run(self, calls: Sequence[tuple[str, Sequence[str | bytes]]]) -> list[Reply]:
        """Replies to scripts with their arguments, in one round trip. Errors of scripts are replies."""
        return await self.at_home(lambda: self._run(calls))

    async def ask(self, commands: Sequence[Command], patience_s: float | None = None) -> list[Reply]:
        """Send commands and read a reply to each. Errors that the server replies are replies; lost connections are not."""

        async def converse() -> list[Reply]:
            async with self._connection() as connection, asyncio.timeout(REPLY_TIMEOUT_S):
                await connection.connect()  # type: ignore[no-untyped-call]
                await connection.send_packed_command(connection.pack_commands(commands))
                return [await _reply(connection) for _ in commands]

        return await self._patiently(converse, self.address.patience_s if patience_s is None else patience_s)

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

    async def _patiently(self, converse: Callable[[], Awaitable[list[Reply]]], patience_s: float) -> list[Reply]:
        backoff = Backoff(MIN_PAUSE_S, MAX_PAUSE_S, patience_s)
        while True:
            try:
                replies = await converse()
                if not (moved := _moved(replies)):
                    return replies
                self._settings |= {"host": moved.host, "port": moved.port}
                await self._forget_idle()
                error: Exception = moved
            except exceptions.AuthenticationError as refusal:
                raise self.address.explain(refusal) from refusal
            except (
                exceptions.BusyLoadingError
            ) as loading:  # it is there, and reads its file: that takes as long as it takes
                error = loading
                backoff.extend(self.address.patience_s)
                await self._forget_idle()
            except _LOST as lost:
                error = lost
                await self._forget_idle()
            except exceptions.RedisError as failure:
                raise self.address.explain(failure) from failure
            pause_s = backoff.next_s()
            if self._closing.is_set() or pause_s is None:
                raise self.address.explain(error) from error
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._closing.wait()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """A connection for one conversation; one that was left in the middle of it is not used again."""
        async with self._places:
            connection = self._idle.pop() if self._idle else self._new_connection()
            try:
                yield connection
            except BaseException:
                await connection.disconnect(nowait=True)
                raise
            self._idle.append(connection)

    def _new_connection(self) -> Connection:
        kind = Connection if self.address.certificates is None else SSLConnection
        return kind(
            **self._settings,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,  # with one, redis-py would send by wait_for(), which loses cancellations
            socket_connect_timeout=CONNECT_TIMEOUT_S,
        )

    async def _forget_idle(self) -> None:
        """Connections that were made before something was lost are lost too."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect(nowait=True)

    async def _listen(self) -> None:
        backoff = Backoff(MIN_PAUSE_S, MAX_PAUSE_S)
        while True:
            connection = self._new_connection()
            try:
                async with asyncio.timeout(REPLY_TIMEOUT_S):
                    await connection.connect()  # type: ignore[no-untyped-call]
                    await connection.send_command("SUBSCRIBE", self.address.tag)
                    await connection.read_response()
                backoff.reset()
                self._notifier.notify_all()  # nobody knows what was said before
                await self._hear(connection)
            except (exceptions.RedisError, OSError):  # whoever asks hears what is wrong; this only comes back
                await backoff.sleep()
            finally:
                await connection.disconnect(nowait=True)

    async def _hear(self, connection: Connection) -> None:
        asked = False
        while True:
            heard = await connection.read_response(timeout=LISTEN_TIMEOUT_S, disconnect_on_error=False)
            if heard is None:
                if asked:
                    raise exceptions.TimeoutError("the server is silent")
                await connection.send_command("PING")
            elif heard[0] == b"message":
                about, run_id, value = heard[2].decode().split(" ")
                self._notifier.notify({(about, run_id): int(value)})
            asked = heard is None


async def _reply(connection: Connection) -> Reply:
    try:
        return await connection.read_response()
    except (exceptions.ResponseError, exceptions.ClusterDownError) as error:
        if isinstance(error, exceptions.ClusterDownError):
            raise
        return error


def _moved(replies: Sequence[Reply]) -> exceptions.MovedError | None:
    """The server of a cluster that keeps our keys, if not the one that was asked, which executed none of the commands."""
    return next((reply for reply in replies if isinstance(reply, exceptions.MovedError)), None)
