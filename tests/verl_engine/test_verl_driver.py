"""The driver's watch over the rollout servers; no verl is needed."""

from __future__ import annotations

import asyncio

import pytest

from agentlightning.engines.verl.driver import watch_servers
from agentlightning.runtime.watchdog import BEATS


class Server:
    """A Ray actor, as far as it is watched: answers with what it was given."""

    def __init__(self, answer: Exception | bool | None) -> None:
        self.answer = answer
        self.asked = 0
        self.often = asyncio.Event()
        """It was asked three times as often as a timeout has beats."""
        self.__ray_ready__ = self

    def remote(self) -> asyncio.Future[bool]:
        self.asked += 1
        if self.asked == 3 * BEATS:
            self.often.set()
        future = asyncio.get_running_loop().create_future()
        if isinstance(self.answer, Exception):
            future.set_exception(self.answer)
        elif self.answer is not None:
            future.set_result(self.answer)
        return future


async def test_the_watch_ends_with_a_server_that_died(caplog: pytest.LogCaptureFixture) -> None:
    await watch_servers([Server(True), Server(RuntimeError("gone"))], hang_timeout_s=60)
    assert "rollout servers [1] died: gone" in caplog.text


async def test_the_watch_ends_with_a_server_that_gives_no_sign_of_life(caplog: pytest.LogCaptureFixture) -> None:
    await watch_servers([Server(None), Server(True)], hang_timeout_s=0.05)
    assert "rollout servers [0] gave no sign of life for 0.05 s" in caplog.text


async def test_the_watch_asks_again_as_long_as_all_answer() -> None:
    server = Server(True)
    watch = asyncio.create_task(watch_servers([server], hang_timeout_s=0.01))
    await asyncio.wait_for(server.often.wait(), 10)
    assert not watch.done()
    watch.cancel()
