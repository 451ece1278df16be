"""OpenEnv's own server of the games, as a program of the Python that has it. Prints its port."""

# mypy: ignore-errors
from __future__ import annotations

import socket
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from openenv_games import TYPED, Guessing
from pydantic import Field


class GuessAction(Action):
    """Guess the number."""

    number: int = Field(ge=0, lt=8)


class GuessObservation(Observation):
    hint: str
    half: int | None = None


def typed(game: type[Guessing]) -> type[Environment]:
    class Typed(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._game = game()

        def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> GuessObservation:
            return GuessObservation(**self._game.reset(seed))

        def step(self, action: GuessAction, timeout_s: float | None = None, **more: Any) -> GuessObservation:
            seen, reward, done = self._game.guess(action.number)
            return GuessObservation(**seen, reward=reward, done=done)

        @property
        def state(self) -> State:
            return State()

    return Typed


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._game = Guessing()
        self._last: tuple[float | None, bool] = (None, False)
        tools = FastMCP("guessing")

        @tools.tool
        def guess(number: int) -> str:
            """Guess the number."""
            seen, *self._last = self._game.guess(number)
            return seen["hint"]

        super().__init__(tools)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Observation:
        return Observation(metadata=self._game.reset(seed))

    def _step_impl(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        return Observation(metadata={"error": "no tool"})

    async def step_async(self, action: Action, timeout_s: float | None = None, **more: Any) -> Observation:
        seen = await super().step_async(action, timeout_s=timeout_s, **more)
        if isinstance(seen, CallToolObservation) and seen.error is None:
            seen.reward, seen.done = self._last
        return seen

    @property
    def state(self) -> State:
        return State()


def main() -> None:
    app = FastAPI()
    for path, (game, sessions) in TYPED.items():
        app.mount(
            f"/{path}", create_fastapi_app(typed(game), GuessAction, GuessObservation, max_concurrent_envs=sessions)
        )
    app.mount("/tools", create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=8))
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])


if __name__ == "__main__":
    main()
