"""A port for a server that a test starts, kept for it until it has ended."""

from __future__ import annotations

import socket


def reserved_place() -> socket.socket:
    """Bound to a free port, not listening: nobody else is given it before the server has it, or while that is down."""
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: then both may be bound to it
    place.bind(("127.0.0.1", 0))
    return place
