"""Checks that tasks are what they say: by their content, and by what the model is shown first.

A seed is no task: a generator may hand out the same item under many seeds, or drop the seed. The rows are compared without
their seeds, and the first request that each of a few tasks makes is caught by a server of our own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
from aiohttp import web

from agentlightning.environments.base import Environment, Outcome
from agentlightning.errors import DataError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM

OPEN_TIMEOUT_S = 300.0
"""Seconds that a task has until it asks the model for the first time; containers are slow to start."""
SEEDS = ("seed", "index", "split", "limit")
"""Fields of a row that say how its content is made, and are none of it."""
REPLY = "[0]"
"""What the model of a check answers."""


def check_rows(train: Sequence[JSON], val: Sequence[JSON]) -> list[str]:
    """Warnings about rows by their content. DataError where a held-out task is a training task, or one split is empty."""
    contents = {split: [_content(row) for row in rows] for split, rows in (("train", train), ("val", val))}
    for split, rows in contents.items():
        if not rows:
            raise DataError(f"env: has no task in the split {split!r}")
    told = [content for content in contents["val"] if content != b"{}"]
    if shared := len(set(told) & set(contents["train"])):
        raise DataError(f"env: {shared} of {len(val)} held-out tasks equal training tasks; give other options, or --val")
    warnings = []
    for split, rows in contents.items():
        if (repeated := len(rows) - len(set(rows))) and rows[0] != b"{}":
            warnings.append(f"{repeated} of {len(rows)} tasks of {split} equal another one of it")
    return warnings


async def check_openings(environment: Environment, train: Sequence[JSON], val: Sequence[JSON]) -> list[str]:
    """Warnings about what the model is shown first: the same task must show the same, other tasks something else.

    DataError where a task shows something else each time, since rollouts of a group must have the same task.
    """
    async with _caught_requests() as first:
        once, again = await first(environment, train[0]), await first(environment, train[0])
        if once != again:
            raise DataError(
                "env: the same task opened twice shows the model two things: the environment drops its seed, so that "
                "rollouts of one task cannot be compared"
            )
        others = [await first(environment, row) for row in (*train[1:2], *val[:1])]
    if others and all(other == once for other in others):
        return [
            "every task opens alike: the tasks differ in what is hidden, or in the opponent's moves alone, or not at all; "
            "held-out tasks then say little"
        ]
    return []


async def check_outcome(environment: Environment, task: JSON) -> list[str]:
    """Warnings about an episode with a model that always answers the same. DataError where it ends without a number."""
    async with _answering() as (llm, _):
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            played = await environment.play(task, llm)
    outcome = played if isinstance(played, Outcome) else Outcome(reward=played)
    if isinstance(outcome.reward, bool) or not isinstance(outcome.reward, int | float):
        raise DataError(f"env: expected a number as reward, got {outcome.reward!r:.200}")
    if outcome.success is None:
        return ["success is not recorded: the held-out figure is the mean reward, which may be partial credit"]
    return []


def _content(row: JSON) -> bytes:
    return orjson.dumps({key: value for key, value in row.items() if key not in SEEDS}, option=orjson.OPT_SORT_KEYS)


@asynccontextmanager
async def _caught_requests() -> AsyncIterator[Any]:
    async with _answering() as (llm, requests):

        async def first(environment: Environment, task: JSON) -> Any:
            """What the model is shown first on a task; the episode is then cancelled."""
            while not requests.empty():
                requests.get_nowait()
            playing = asyncio.ensure_future(environment.play(task, llm))
            asked = asyncio.ensure_future(requests.get())
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    await asyncio.wait({playing, asked}, return_when=asyncio.FIRST_COMPLETED)
            except TimeoutError as cause:
                raise DataError(f"env: a task asked the model nothing in {OPEN_TIMEOUT_S:g} s") from cause
            finally:
                both = (playing, asked)
                for one in both:
                    one.cancel()
                done = await asyncio.gather(*both, return_exceptions=True)
            shown, error = done[1], done[0]
            if isinstance(shown, dict):
                return shown.get("messages", shown)
            if isinstance(error, Exception):
                raise error
            raise DataError("env: a task was played without a call of the model")

        yield first


@asynccontextmanager
async def _answering() -> AsyncIterator[tuple[LLM, asyncio.Queue[JSON]]]:
    """A model that always answers the same, and the requests that it got."""
    requests: asyncio.Queue[JSON] = asyncio.Queue()

    async def complete(request: web.Request) -> web.Response:
        body: JSON = await request.json()
        requests.put_nowait(body)
        message = {"role": "assistant", "content": REPLY}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": f"check-{requests.qsize()}", "object": "chat.completion", "created": 0, "model": "check"}
        return web.json_response(answer | {"choices": [choice], "usage": usage})

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}"
        yield LLM(base_url=f"{url}/v1", anthropic_base_url=url, api_key="check", model="check"), requests
    finally:
        await runner.cleanup()
