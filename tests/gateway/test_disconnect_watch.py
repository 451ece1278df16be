"""Watches for clients that disconnect: what is left of them once they are stopped."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

from agentlightning.gateway.asgi_response import DisconnectWatch


class Call:
    """What a watch tells of, and so holds."""

    def tell(self) -> None:
        raise AssertionError("nobody disconnected")


async def test_a_watch_that_was_stopped_leaves_no_cycle_that_holds_its_call() -> None:
    waiting, freed = asyncio.Event(), asyncio.Event()

    async def receive() -> dict[str, Any]:
        waiting.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody disconnected")

    gc.disable()
    try:
        call = Call()
        weakref.finalize(call, freed.set)
        watch = DisconnectWatch(receive, call.tell)
        await waiting.wait()
        watch.stop()
        del call, watch
        async with asyncio.timeout(5.0):
            await freed.wait()
    finally:
        gc.enable()
