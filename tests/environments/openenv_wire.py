"""A server of the games that speaks OpenEnv's wire, as 0.10.0 does: GET /schema, and a session per WebSocket of /ws."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson
from aiohttp import web
from openenv_games import TYPED, Guessing
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentlightning.records import JSON


class GuessAction(BaseModel):
    """Guess the number."""

    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, Any] = Field(default_factory=dict)
    number: int = Field(ge=0, lt=8)


GUESS = {
    "name": "guess",
    "description": "Guess the number.",
    "input_schema": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
}
CALL_TOOL = {
    "title": "CallToolAction",
    "type": "object",
    "properties": {
        "metadata": {"type": "object"},
        "type": {"const": "call_tool", "type": "string"},
        "tool_name": {"type": "string"},
        "arguments": {"type": "object"},
    },
    "required": ["tool_name"],
}


def wire_app() -> web.Application:
    """The games by their paths, and /curt: no session free, said by closing alone."""
    app = web.Application()
    taken = dict.fromkeys(TYPED, 0)

    async def schema(request: web.Request) -> web.Response:
        tools = request.match_info["game"] == "tools"
        return web.json_response({"action": CALL_TOOL if tools else GuessAction.model_json_schema()})

    async def session(request: web.Request) -> web.WebSocketResponse:
        path = request.match_info["game"]
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        game, sessions = TYPED.get(path, (Guessing, 8))
        taken.setdefault(path, 0)
        if path == "curt" or taken[path] == sessions:
            if path != "curt":
                await socket.send_json(error("Server at capacity", "CAPACITY_REACHED", max_sessions=sessions))
            await socket.close()
            return socket
        with one_of(taken, path):
            playing = game()
            async for message in socket:
                await socket.send_json(answer(playing, path == "tools", orjson.loads(message.data)))
        return socket

    app.router.add_get("/{game}/schema", schema)
    app.router.add_get("/{game}/ws", session)
    return app


def answer(game: Guessing, tools: bool, message: JSON) -> JSON:
    """The answer to one message of a session."""
    data = message["data"]
    try:
        if message["type"] == "reset":
            seen = game.reset(data["seed"])
            return observed({"metadata": seen} if tools else {"metadata": {}, "half": None} | seen, None, False)
        if not tools:
            seen, reward, done = game.guess(GuessAction.model_validate(data).number)
            return observed({"metadata": {}, "half": None} | seen, reward, done)
    except ValidationError as cause:
        return error(
            "Invalid message", "VALIDATION_ERROR", errors=cause.errors(include_url=False, include_context=False)
        )
    except Exception as cause:
        return error(str(cause), "EXECUTION_ERROR")
    if data["type"] == "list_tools":
        return observed({"metadata": {}, "tools": [GUESS], "error": None}, None, False)
    called = {"metadata": {}, "tool_name": data["tool_name"], "result": None}
    if not isinstance(data["arguments"].get("number"), int):
        message = "1 validation error for call[guess]\nnumber\n  Input should be a valid integer"
        return observed(called | {"error": {"error_type": "execution_error", "message": message}}, None, False)
    seen, reward, done = game.guess(data["arguments"]["number"])
    result = {"content": [{"type": "text", "text": seen["hint"]}], "data": seen["hint"], "is_error": False}
    return observed(called | {"result": result, "error": None}, reward, done)


def observed(observation: JSON, reward: float | None, done: bool) -> JSON:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def error(message: str, code: str, **more: Any) -> JSON:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


@contextmanager
def one_of(taken: dict[str, int], path: str) -> Iterator[None]:
    taken[path] += 1
    try:
        yield
    finally:
        taken[path] -= 1


async def main() -> None:
    """Serve, as a program. Prints its port."""
    runner = web.AppRunner(wire_app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
