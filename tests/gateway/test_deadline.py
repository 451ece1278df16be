"""Deadlines, and what happens where one is reached, moved or passed in the same turn of the event loop."""

from __future__ import annotations

import asyncio

import pytest

from agentlightning.gateway.asgi_response import Deadline


async def test_work_that_takes_longer_ends_with_a_timeout_error() -> None:
    with pytest.raises(TimeoutError), Deadline(0.0):
        await asyncio.Event().wait()


async def test_work_that_is_done_in_time_is_not_disturbed_later() -> None:
    with Deadline(0.01) as deadline:
        pass
    deadline.shorten(0.0)
    await asyncio.sleep(0.02)


async def test_a_deadline_can_be_shortened_but_not_extended() -> None:
    async def work() -> None:
        with Deadline(60.0) as deadline:
            deadline.shorten(0.0)
            deadline.shorten(60.0)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await work()


async def test_shortening_a_deadline_in_the_tick_in_which_it_is_reached_does_nothing() -> None:
    later = []

    async def work() -> None:
        with Deadline(0.0) as deadline:

            def shorten() -> None:
                deadline.shorten(10.0)
                later.append(deadline.when)

            # After the deadline's own timer, before the task goes on.
            asyncio.get_running_loop().call_at(deadline.when, shorten)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await work()
    assert later


async def test_a_task_that_is_cancelled_by_somebody_else_stays_cancelled() -> None:
    async def work() -> None:
        with Deadline(0.0) as deadline:
            asyncio.get_running_loop().call_at(deadline.when, task.cancel)
            await asyncio.Event().wait()

    task = asyncio.ensure_future(work())
    with pytest.raises(asyncio.CancelledError):
        await task
