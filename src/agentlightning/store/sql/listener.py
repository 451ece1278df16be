"""The listener: a thread that receives what other processes commit to one PostgreSQL, and wakes who waits in this one.

Driven by the SQL store. A notification is a hint, never data: who is woken looks. While the connection is away nothing
comes, so everybody is woken when it is back.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from typing import Any

import orjson
import psycopg

from agentlightning.runtime.background import BackgroundTasks
from agentlightning.store.notifier import Notifier

CHANNEL = "agl"
NAME = "postgresql listener"
PAUSE_S = 0.2
"""Between attempts to connect again."""


class Listener:
    """Hears from the constructor on, until `stop`. psycopg.Error where the first connection fails."""

    def __init__(
        self,
        connect: Callable[[], psycopg.Connection[Any]],
        notifier: Notifier,
        writer: str,
        background: BackgroundTasks,
    ) -> None:
        self._connect = connect
        self._background = background
        self._notifier = notifier
        self._writer = writer
        self._stopped, self._stop = socket.socketpair()
        first = self._listening()
        self._thread = threading.Thread(target=self._serve, args=[first], name="store-listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Blocks."""
        self._stop.send(b".")
        self._thread.join()
        self._stop.close()
        self._stopped.close()

    def _listening(self) -> psycopg.Connection[Any]:
        connection = self._connect()
        try:
            connection.execute(f"LISTEN {CHANNEL}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _serve(self, connection: psycopg.Connection[Any] | None) -> None:
        going = True
        while going:
            try:
                if connection is None:
                    connection = self._listening()
                    self._notifier.notify_all()  # what was told meanwhile was not heard
                going = self._hear(connection)
            except (psycopg.Error, OSError):  # the server is away, which whoever asks it something is told
                going = not self._ready(None, PAUSE_S)
            except Exception as error:  # as what somebody else says on the channel
                self._background.failed(NAME, error)
                going = not self._ready(None, PAUSE_S)
                self._background.running(NAME)
            if connection is not None:
                connection.close()
                connection = None

    def _hear(self, connection: psycopg.Connection[Any]) -> bool:
        """Notify for each notification; False when stopped. Raises psycopg.Error when the connection is lost."""
        while True:
            for told in connection.notifies(timeout=0):
                writer, news = orjson.loads(told.payload)
                if writer != self._writer:  # that notifier has rung already
                    self._notifier.notify({(about, run_id): value for about, run_id, value in news})
            if self._ready(connection):
                return False

    def _ready(self, connection: psycopg.Connection[Any] | None, timeout_s: float | None = None) -> bool:
        """Wait until the connection has something to read, or `timeout_s`; True when stopped."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._stopped, selectors.EVENT_READ)
            if connection is not None:
                selector.register(connection.fileno(), selectors.EVENT_READ)
            return any(key.fileobj is self._stopped for key, _ in selector.select(timeout_s))
