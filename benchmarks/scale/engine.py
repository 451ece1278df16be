"""The engine of the benchmark of fleets: answers every request with one file, so many seconds later.

python benchmarks/scale/engine.py FILE PORT SECONDS
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import cast

import uvloop


class Connection(asyncio.Protocol):
    """Requests with a Content-Length, one after the other."""

    def __init__(self, answer: bytes, delay_s: float) -> None:
        self._answer = answer
        self._delay_s = delay_s
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._unread += data
        head, found, rest = self._unread.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if found and len(rest) >= length:
            self._unread = rest[length:]
            asyncio.get_running_loop().call_later(self._delay_s, self._reply)

    def _reply(self) -> None:
        self._transport.write(self._answer)


async def serve(body: bytes, port: int, delay_s: float) -> None:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(head + body, delay_s), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(Path(sys.argv[1]).read_bytes(), int(sys.argv[2]), float(sys.argv[3])))
