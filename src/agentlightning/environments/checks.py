"""Checks that tasks are what they say: by their content, and by what the model is shown first.

A seed is no task: a generator may hand out the same item under many seeds, or drop the seed. The rows are compared without
their seeds, and the first request that each of a few tasks makes is caught by a server of our own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import orjson
from aiohttp import web

from agentlightning.environments.base import Environment, Outcome
from agentlightning.errors import DataError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM

OPEN_TIMEOUT_S = 300.0
"""Seconds that a task has until it asks the model for the first time; containers are slow to start."""
SEEDS = ("seed", "seat", "index", "split", "limit")
"""Fields of a row that say how its content is made, and are none of it."""
REPLY = "[0]"
"""What the model of a check answers."""


def check_rows(train: Sequence[JSON], val: Sequence[JSON]) -> tuple[list[JSON], list[str]]:
    """The training rows without those that equal a held-out one, and warnings. DataError where a split is empty, or no
    training row is left."""
    for split, rows in (("train", train), ("val", val)):
        if not rows:
            raise DataError(f"env: has no task in the split {split!r}")
    held_out = {_content(row) for row in val} - {b"{}"}
    kept = [row for row in train if _content(row) not in held_out]
    if not kept:
        raise DataError("env: every training task equals a held-out task; give other options, or --val")
    warnings = []
    if len(kept) < len(train):
        warnings.append(f"{len(train) - len(kept)} of {len(train)} training tasks equal held-out ones and are left out")
    contents = [_content(row) for row in kept]
    if (repeated := len(kept) - len(set(contents))) and contents[0] != b"{}":
        warnings.append(f"{repeated} of {len(kept)} training tasks equal another one")
    return kept, warnings


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
    async with _answering() as model, asyncio.timeout(OPEN_TIMEOUT_S):
        played = await environment.play(task, model()[0])
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
    async with _answering() as model:

        async def first(environment: Environment, task: JSON) -> Any:
            """What the model is shown first on a task; the episode is then cancelled."""
            llm, requests = model()
            playing = asyncio.ensure_future(environment.play(task, llm))
            asked = asyncio.ensure_future(requests.get())
            await asyncio.wait({playing, asked}, timeout=OPEN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            shown = asked.result().get("messages") if asked.done() else None
            waited = not playing.done()
            playing.cancel()
            asked.cancel()
            (failed,) = await asyncio.gather(playing, return_exceptions=True)
            if shown is not None:
                return shown
            if isinstance(failed, Exception):
                raise failed
            silence = f"in {OPEN_TIMEOUT_S:g} s" if waited else "and ended"
            raise DataError(f"env: a task asked the model nothing {silence}")

        yield first


@asynccontextmanager
async def _answering() -> AsyncIterator[Callable[[], tuple[LLM, asyncio.Queue[JSON]]]]:
    """Makes models that always answer the same, each with the requests that it got."""
    asked: list[asyncio.Queue[JSON]] = []

    async def complete(request: web.Request) -> web.Response:
        asked[int(request.match_info["model"])].put_nowait(await request.json())
        message = {"role": "assistant", "content": REPLY}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": f"check-{uuid4().hex}", "object": "chat.completion", "created": 0, "model": "check"}
        return web.json_response(answer | {"choices": [choice], "usage": usage})

    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/{model}/v1/chat/completions", complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]

        def model() -> tuple[LLM, asyncio.Queue[JSON]]:
            asked.append(asyncio.Queue())
            url = f"http://{host}:{port}/{len(asked) - 1}"
            llm = LLM(base_url=f"{url}/v1", anthropic_base_url=url, api_key="check", model="check")
            return llm, asked[-1]

        yield model
    finally:
        await runner.cleanup()
