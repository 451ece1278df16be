"""Loops that fail are started again, counted, logged with their traceback, and known to be down meanwhile."""

from __future__ import annotations

import asyncio
import logging

import pytest

from agentlightning.runtime.background import BackgroundTasks


async def failed(background: BackgroundTasks, times: int) -> None:
    """Returns when loops have failed so often."""
    async with asyncio.timeout(20):
        while background.failures.total() < times:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)


async def test_a_loop_that_fails_is_logged_counted_down_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    background = BackgroundTasks(first_pause_s=0.05)
    runs = 0
    again = asyncio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise KeyError("the third time is fine")
        assert background.down == []
        again.set()
        await asyncio.Event().wait()

    with caplog.at_level(logging.ERROR):
        task = background.start("a loop", work)
        await failed(background, 1)
        assert background.down == ["a loop"]
        await asyncio.wait_for(again.wait(), 10)
    assert background.failures == {"a loop": 2}
    assert background.down == []
    assert "a loop failed, and is started again" in caplog.text
    assert "the third time is fine" in caplog.text
    assert "Traceback" in caplog.text
    await background.stop()
    assert task.cancelled()


async def test_a_loop_that_returns_is_done_and_one_that_is_ended_while_down_is_not_down_any_more() -> None:
    background = BackgroundTasks(first_pause_s=600)

    async def returns() -> None: ...

    async def fails() -> None:
        raise RuntimeError("no")

    await background.start("done", returns)
    background.start("broken", fails)
    other = background.start("broken", fails)
    await failed(background, 2)
    other.cancel()
    await asyncio.wait({other})
    assert background.down == ["broken"]
    await background.stop()
    assert background.down == []
