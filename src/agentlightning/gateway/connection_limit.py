"""ConnectionLimit: how many connections a server holds, and which one goes where another comes.

Driven by uvicorn_server.py. A connection costs a file descriptor, and who opens thousands without asking for anything must
keep nobody out: a new one takes the place of the one that has waited for a request for longest. Those with a request under
way keep their places, which need a key. Nothing is counted by address: agents on one machine, behind one proxy or in one
network share theirs. Knows nothing of HTTP.
"""

from __future__ import annotations

import sys
from typing import Protocol as Interface

from agentlightning.errors import ConfigError

MAX_CONNECTIONS = 16_384
"""Connections of a server, where its file descriptors allow as many."""
RESERVED_FILES = 128
"""File descriptors for the store, the listening sockets and the log."""
MAX_FILES = 65_536
"""File descriptors that a server process asks for."""


class Connection(Interface):
    """A client's connection."""

    def abort(self) -> None:
        """Close it at once, whatever the client does; nothing is under way on it."""
        ...


class ConnectionLimit:
    """The connections of one server, at most `max_connections`. Use from one event loop."""

    def __init__(self, max_connections: int) -> None:
        self._max = max_connections
        self._busy: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """Without a request under way, the one that has waited for longest first."""

    def admit(self, connection: Connection) -> bool:
        """Count a new connection, which waits for its first request; False where all have a request under way."""
        if len(self._busy) + len(self._waiting) >= self._max:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            del self._waiting[oldest]
            oldest.abort()
        self._waiting[connection] = None
        return True

    def begin(self, connection: Connection) -> None:
        """A request is under way. One that lost its place at this moment does not get it back."""
        if connection in self._waiting:
            del self._waiting[connection]
            self._busy.add(connection)

    def end(self, connection: Connection) -> None:
        """It waits for a further request."""
        if connection in self._busy:
            self._busy.discard(connection)
            self._waiting[connection] = None

    def remove(self, connection: Connection) -> None:
        """It is closed."""
        self._busy.discard(connection)
        self._waiting.pop(connection, None)


def raise_file_limit() -> None:
    """Have this process open as many files as it may, up to `MAX_FILES`: most systems allow 1,024 unless asked."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def allowed_connections(wanted: int | None) -> int:
    """`wanted` connections, or by default as many as this process can hold. ConfigError where it cannot hold `wanted`."""
    possible = _possible_connections()
    if wanted is None:
        return min(MAX_CONNECTIONS, possible)
    if not 1 <= wanted <= possible:
        raise ConfigError(
            f"--max-connections: expected 1 to {possible}, got {wanted}: each takes two of the files that this process may "
            "open (ulimit -n)"
        )
    return wanted


def _possible_connections() -> int:
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_FILES if soft == resource.RLIM_INFINITY else soft
    return max(16, (files - RESERVED_FILES) // 2)  # a call has a connection to its engine, too
