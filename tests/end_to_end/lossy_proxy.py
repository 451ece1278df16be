"""A bad network in front of one port: what passes arrives late, and connections are dropped in the middle of anything.

    python -m lossy_proxy LISTEN_HOST:PORT TARGET_HOST:PORT --latency-s 0.02 --life-s 10 --seed 1

Prints the number of dropped connections, a line for each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random


class Proxy:
    def __init__(self, target: tuple[str, int], latency_s: float, life_s: float, seed: int) -> None:
        """life_s: mean of an exponential distribution, after which a connection is reset on both sides."""
        self._target = target
        self._latency_s = latency_s
        self._life_s = life_s
        self._random = random.Random(seed)
        self.dropped = 0

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        life_s = self._random.expovariate(1 / self._life_s)
        try:
            there, back = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        passing = [asyncio.ensure_future(self._pass(*pair)) for pair in ((reader, back), (there, writer))]
        _, unfinished = await asyncio.wait(passing, timeout=life_s)
        if unfinished:
            self.dropped += 1
            print(f"dropped {self.dropped}", flush=True)
            for one in unfinished:
                one.cancel()
        for end in (writer, back):
            end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Everything that comes is written the latency later, in order."""
        loop = asyncio.get_running_loop()
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=1000)

        async def write() -> None:
            data = b"-"
            while data:
                due, data = await late.get()
                await asyncio.sleep(due - loop.time())
                if data:
                    writer.write(data)
                    await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

        writing = asyncio.ensure_future(write())
        try:
            data = b"-"
            while data:
                data = await reader.read(1 << 16)
                await late.put((loop.time() + self._latency_s, data))
            await writing
        except OSError:
            pass
        finally:
            writing.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await writing


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("listen", type=address)
    parser.add_argument("target", type=address)
    parser.add_argument("--latency-s", type=float, required=True, help="of each direction")
    parser.add_argument("--life-s", type=float, required=True, help="mean")
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    proxy = Proxy(given.target, given.latency_s, given.life_s, given.seed)
    server = await asyncio.start_server(proxy.accept, *given.listen)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
