"""Checks that tasks are what they say: by their content, and by what the model is shown first.

A seed is no task: a generator may hand out the same item under many seeds, or drop the seed. The rows are compared without
their seeds, and the first request that each of a few tasks makes is caught by a server of our own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from agentlightning.environments.base import UNREWARDED, Environment, episode_result
from agentlightning.environments.local_model import Answer, local_models
from agentlightning.errors import DataError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM

OPEN_TIMEOUT_S = 300.0
"""Seconds that a task has until it asks the model for the first time; containers are slow to start."""
SEEDS = ("seed", "seat", "opponent", "index", "split", "limit")
"""Fields of a row that say how its content is made, and are none of it."""
REPLY = "[0]"
"""The answer of a check's model where no tool is offered."""


def check_rows(train: Sequence[JSON], val: Sequence[JSON]) -> tuple[list[JSON], list[str]]:
    """The training rows without those that equal a held-out one, and warnings. DataError where a split is empty, or no
    training row is left."""
    for split, rows in (("train", train), ("val", val)):
        if not rows:
            raise DataError(f"env: has no task in the split {split!r}")
    held_out = {_content(row) for row in val} - {b"{}"}
    kept = [row for row in train if _content(row) not in held_out]
    if not kept:
        raise DataError(
            "env: every training task equals a held-out one; let tasks('val', …) give others, or give held-out tasks of "
            "your own with --val"
        )
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
    once, again, *others = await openings(environment, [train[0], train[0], *train[1:2], *val[:1]])
    if once != again:
        raise DataError(
            "env: the same task opened twice shows the model two things: the environment drops its seed, so that rollouts "
            "of one task cannot be compared"
        )
    if others and all(other == once for other in others):
        return [
            "every task opens alike: the tasks differ in what is hidden, or in the opponent's moves alone, or not at all; "
            "held-out tasks then say little"
        ]
    return []


async def openings(environment: Environment, tasks: Sequence[JSON]) -> list[Any]:
    """The messages of the first request of each task, whose episode is then cancelled. DataError where one asks nothing."""
    async with local_models() as model:
        return [await _opening(environment, task, model) for task in tasks]


async def _opening(environment: Environment, task: JSON, model: Callable[[Answer], LLM]) -> Any:
    asked: asyncio.Future[JSON] = asyncio.get_running_loop().create_future()

    async def answer(request: JSON) -> JSON:
        if not asked.done():
            asked.set_result(request)
        return _reply(request)

    playing: asyncio.Future[Any] = asyncio.ensure_future(environment.play(task, model(answer)))
    both: set[asyncio.Future[Any]] = {playing, asked}
    await asyncio.wait(both, timeout=OPEN_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    waited = not playing.done()
    playing.cancel()
    await asyncio.wait({playing})
    if asked.done():
        return asked.result().get("messages")
    if not playing.cancelled():
        playing.result()  # raises why it ended
    raise DataError(f"env: a task asked the model nothing {f'in {OPEN_TIMEOUT_S:g} s' if waited else 'and ended'}")


async def check_outcome(environment: Environment, task: JSON) -> list[str]:
    """Warnings about an episode with a model that always answers the same. VerifierError where it ends without a number."""

    async def answer(request: JSON) -> JSON:
        return _reply(request)

    async with local_models() as model, asyncio.timeout(OPEN_TIMEOUT_S):
        outcome = episode_result(await environment.play(task, model(answer)))
    if outcome.metrics.get(UNREWARDED):
        return ["an episode ended without any reward, which counts as 0: give --reward if that is always so"]
    if outcome.success is None:
        return ["success is not recorded: the held-out figure is the mean reward, which may be partial credit"]
    return []


def tool_call(request: JSON, name: str, arguments: JSON) -> JSON:
    """The message that calls a tool, in answer to a request."""
    function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
    call = {"id": f"call-{len(request['messages'])}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _reply(request: JSON) -> JSON:
    if not request.get("tools"):
        return {"role": "assistant", "content": REPLY}
    first = request["tools"][0]["function"]
    schema = first.get("parameters") or {}
    return tool_call(request, first["name"], _least(schema, schema.get("$defs", {})))


def _least(schema: JSON, definitions: JSON) -> Any:
    """The smallest value that a JSON schema of a tool allows, where it is one of the usual ones."""
    if (reference := schema.get("$ref")) is not None:
        return _least(definitions.get(str(reference).rpartition("/")[2], {}), definitions)
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return schema[key][0] if key == "enum" else _least(schema[key][0], definitions)
    kind = schema.get("type", "object")
    if kind == "object":
        fields = schema.get("properties", {})
        return {key: _least(fields.get(key, {}), definitions) for key in schema.get("required", ())}
    if kind == "array":
        return [_least(schema.get("items", {}), definitions)] * int(schema.get("minItems", 0))
    lowest = schema.get("minimum", 0)
    return {"string": "0" * max(1, int(schema.get("minLength", 1))), "boolean": False, "null": None}.get(kind, lowest)


def _content(row: JSON) -> bytes:
    return orjson.dumps({key: value for key, value in row.items() if key not in SEEDS}, option=orjson.OPT_SORT_KEYS)
