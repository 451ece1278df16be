"""Files and connections that a server process may hold."""

from __future__ import annotations

import sys

MAX_CONNECTIONS = 16_384
"""Connections of a server, where its file descriptors allow as many."""
RESERVED_FILES = 128
"""File descriptors for the store, the listening sockets and the log."""
MAX_FILES = 65_536
"""File descriptors that a server process asks for."""


def raise_file_limit() -> None:
    """Have this process open as many files as it may, up to `MAX_FILES`: most systems allow 1,024 unless asked."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def allowed_connections() -> int:
    """Connections that this process can hold, at most MAX_CONNECTIONS."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_FILES if soft == resource.RLIM_INFINITY else soft
    return min(MAX_CONNECTIONS, max(16, (files - RESERVED_FILES) // 2))  # a call has a connection to its engine, too
