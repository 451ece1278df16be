"""Server-sent events, the framing under every streamed protocol: bytes in, data out, and the other way round. Pure."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


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
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that `chunk` completes; comments and other fields are passed over."""
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
