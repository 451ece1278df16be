"""Server-sent events, the framing under every streamed protocol: bytes in, data out, and the other way round. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from agentlightning.errors import EngineError

DONE = b"data: [DONE]\n\n"

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""Room for the largest event there is, a whole response with an image in it; the loop that reads it serves everybody."""


def event(data: Any, name: str = "") -> bytes:
    """One event that carries `data` as JSON, with its name where it has one."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


class EventReader:
    """Splits a byte stream into the data of its events, wherever the network cut it.

    >>> reader = EventReader()
    >>> reader.feed(b'data: {"a"')
    []
    >>> reader.feed(b': 1}\\n\\ndata: [DONE]\\n\\n')
    [b'{"a": 1}', b'[DONE]']
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """Pieces of the line under way: joined once, so that reading takes time linear in the stream's bytes."""
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes; comments and other fields are passed over.

        Raises EngineError where an event is longer than MAX_EVENT_BYTES.
        """
        self._line.append(chunk)
        if b"\n" not in chunk:
            self._size += len(chunk)
            if self._size > MAX_EVENT_BYTES:
                raise event_too_large()
            return []
        lines = b"".join(self._line).split(b"\n")
        self._line = [lines.pop()]
        self._size = len(self._line[0])
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def event_too_large() -> EngineError:
    """The error for a stream whose next event does not end within MAX_EVENT_BYTES."""
    return EngineError(f"the stream has an event of more than {MAX_EVENT_BYTES} bytes")
