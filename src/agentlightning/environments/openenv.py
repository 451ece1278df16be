"""OpenEnv: the kind ``openenv:http://HOST:PORT?option=value``: an environment that a server of OpenEnv plays.

An episode is one session of its WebSocket, ``/ws``. Actions are tools: those that the server lists where it is an MCP
environment, else one with the JSON schema of its action. A task is a seed; other options go to its reset. OpenEnv itself is
not imported, since its client costs 10 s of CPU and conflicts with half of what others pin.

Options: prompt (the system message; many servers do not say what to do), max_calls, timeout_s (seconds that a session has
to become free, and each answer to arrive).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import orjson

from agentlightning.environments.base import UNREWARDED, EpisodeResult, Split, seeds
from agentlightning.environments.player import Action, Observation, UnreadableActionError, play_episode
from agentlightning.errors import ConfigError, InfrastructureError, VerifierError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM
from agentlightning.runtime.backoff import Backoff

ACT = "act"
"""The tool of an environment with typed actions."""
MAX_MESSAGE_BYTES = 64 << 20


class OpenEnv:
    """The tasks of one server."""

    def __init__(
        self, url: str, *, prompt: str = "", max_calls: int = 64, timeout_s: float = 300.0, **reset: Any
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"env openenv:{url}: expected the server's address, such as openenv:http://127.0.0.1:8000"
            )
        self._url = url.rstrip("/")
        self._prompt = prompt
        self._max_calls = max_calls
        self._timeout_s = timeout_s
        self._reset = reset
        self._action_schema: JSON | None = None

    def tasks(self, split: Split, limit: int, seed: int) -> Iterator[JSON]:
        yield from ({"seed": one} for one in seeds(split, limit, seed))

    async def play(self, task: JSON, llm: LLM) -> EpisodeResult:
        async with aiohttp.ClientSession() as http:
            schema = await self._schema(http)
            session, first = await self._open(http, {**self._reset, "seed": task["seed"]})
            try:
                game = _Game(session, first, self._prompt, schema)
                return await play_episode(game, llm, max_calls=self._max_calls)
            finally:
                await session.close()

    def close(self) -> None:
        """Nothing outlives an episode."""

    async def _schema(self, http: aiohttp.ClientSession) -> JSON:
        if self._action_schema is None:
            try:
                timeout = aiohttp.ClientTimeout(total=self._timeout_s)
                async with http.get(f"{self._url}/schema", timeout=timeout, raise_for_status=True) as answer:
                    self._action_schema = (await answer.json())["action"]
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError) as cause:
                raise InfrastructureError(
                    f"no OpenEnv server at {self._url}: {type(cause).__name__}: {cause}"
                ) from cause
        return self._action_schema

    async def _open(self, http: aiohttp.ClientSession, reset: JSON) -> tuple[_Session, JSON]:
        """A session and its first observation. A server has so many sessions at a time: where all are taken, wait."""
        waiting = Backoff(first_s=0.05, timeout_s=self._timeout_s)
        while True:
            session = _Session(self._url, self._timeout_s)
            try:
                await session.connect(http)
                return session, await session.ask("reset", reset)
            except _NoSessionError as cause:
                await session.close()
                if not await waiting.sleep():
                    raise InfrastructureError(
                        f"{self._url}: no session became free in {self._timeout_s:g} s ({cause}); let the server have as "
                        "many as agent.concurrency times agent.workers, or lower those"
                    ) from cause
            except _RequestError as cause:
                await session.close()
                raise InfrastructureError(f"{self._url}: reset failed: {cause}") from cause
            except BaseException:
                await session.close()
                raise


class _NoSessionError(Exception):
    """The server has no session to give now."""


class _RequestError(Exception):
    """The server's error to a request; `invalid` where the request is not what its schema says."""

    def __init__(self, data: JSON) -> None:
        code, errors = data.get("code"), data.get("errors") or []
        self.invalid = code == "VALIDATION_ERROR"
        details = "; ".join(f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in errors)
        super().__init__(f"{data.get('message')}{f': {details}' if details else ''}"[:500])
        self.full = code == "CAPACITY_REACHED"


class _Session:
    """One WebSocket of a server: a request, then its answer."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._answered = False

    async def connect(self, http: aiohttp.ClientSession) -> None:
        """InfrastructureError where nothing listens; _NoSessionError where it is turned away."""
        try:
            async with asyncio.timeout(self._timeout_s):
                self._socket = await http.ws_connect(f"{self._url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
        except aiohttp.WSServerHandshakeError as cause:
            if cause.status == 404:
                raise InfrastructureError(f"{self._url} has no /ws: it is no OpenEnv server of 0.2 or later") from cause
            raise _NoSessionError(f"HTTP {cause.status}") from cause
        except (aiohttp.ClientError, TimeoutError) as cause:
            raise InfrastructureError(f"{self._url}: {type(cause).__name__}: {cause}") from cause

    async def ask(self, kind: str, data: JSON) -> JSON:
        """The answer to a request. _RequestError; _NoSessionError where the first one is not taken; InfrastructureError."""
        assert self._socket is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._socket.send_str(orjson.dumps({"type": kind, "data": data}).decode())
                message = await self._socket.receive()
        except TimeoutError as cause:
            raise InfrastructureError(f"{self._url}: no answer to {kind} in {self._timeout_s:g} s") from cause
        except aiohttp.ClientError as cause:
            raise self._closed(kind) from cause
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise self._closed(kind)
        answer = orjson.loads(message.data)
        if answer["type"] == "error":
            refused = _RequestError(answer["data"])
            raise _NoSessionError(str(refused)) if refused.full else refused
        self._answered = True
        found: JSON = answer["data"]
        return found

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    def _closed(self, kind: str) -> Exception:
        """A server that is full may close without a word."""
        if not self._answered:
            return _NoSessionError("it closed the connection")
        return InfrastructureError(f"{self._url}: closed the session in the middle of a {kind}")


class _Game:
    """One episode."""

    def __init__(self, session: _Session, first: JSON, prompt: str, schema: JSON) -> None:
        self._session = session
        self._first = first
        self.system = prompt
        self.tools: Sequence[JSON] = [_tool(ACT, schema.get("description"), _fields(schema))]
        self._mcp = _takes_tool_calls(schema)
        self._rewards: list[float] = []
        self._steps = 0

    async def start(self) -> Observation:
        if self._mcp:
            listed = (await self._step({"type": "list_tools"}))["observation"]
            self.tools = [
                _tool(one["name"], one.get("description"), one.get("input_schema")) for one in listed["tools"]
            ]
        return Observation(text=_text(self._first["observation"]), over=bool(self._first.get("done")))

    async def act(self, action: Action) -> tuple[Observation, float | None]:
        if action.tool is None:
            if self._mcp and self._steps:  # an answer in words, after its tools
                return Observation(text="", over=True), None
            raise UnreadableActionError(f"Call one of the tools: {', '.join(map(_name, self.tools))}.")
        if action.tool not in map(_name, self.tools):
            raise UnreadableActionError(f"There is no tool {action.tool}: {', '.join(map(_name, self.tools))}.")
        if self._mcp:
            taken = {"type": "call_tool", "tool_name": action.tool, "arguments": dict(action.arguments)}
        else:
            taken = dict(action.arguments)
        answer = await self._step(taken)
        seen = answer["observation"]
        _check_tool_error(seen)
        self._steps += 1
        reward = answer.get("reward")
        if reward is not None:
            if not isinstance(reward, int | float) or not math.isfinite(reward):
                raise VerifierError(f"expected a number as reward, got {reward!r:.200}")
            self._rewards.append(float(reward))
        over = bool(answer.get("done"))
        return Observation(text=_text(seen), over=over), None if reward is None else float(reward)

    def result(self) -> EpisodeResult:
        unrewarded = float(self._steps > 0 and not self._rewards)
        return EpisodeResult(reward=sum(self._rewards), metrics={UNREWARDED: unrewarded})

    async def _step(self, action: JSON) -> JSON:
        try:
            return await self._session.ask("step", action)
        except _RequestError as cause:
            if cause.invalid:
                raise UnreadableActionError(str(cause)) from cause
            raise InfrastructureError(f"a step failed in the environment: {cause}") from cause


def _takes_tool_calls(schema: JSON) -> bool:
    """True for MCP environments, whose action is a call of a tool, or any action."""
    own = schema.get("properties", {}).keys() - {"metadata"}
    return b'"call_tool"' in orjson.dumps(schema) or (schema.get("title") == "Action" and not own)


def _fields(schema: JSON) -> JSON:
    """Without the field that every action has, which is for programs."""
    own = {key: value for key, value in schema.get("properties", {}).items() if key != "metadata"}
    return {**schema, "properties": own}


def _tool(name: str, description: str | None, parameters: JSON | None) -> JSON:
    function = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}


def _name(tool: JSON) -> str:
    return str(tool["function"]["name"])


def _check_tool_error(seen: JSON) -> None:
    """UnreadableActionError for a call that no tool can take, InfrastructureError for one that did not reach its tool."""
    error = seen.get("error")
    if not isinstance(error, dict):
        return
    if error.get("error_type") in ("invalid_args", "tool_not_found"):
        raise UnreadableActionError(str(error.get("message")))
    if error.get("error_type") == "transport_error":
        raise InfrastructureError(f"a tool of the environment failed: {error.get('message')}")


def _text(seen: JSON) -> str:
    """An observation in words: its only text, or its fields as JSON. Metadata is for programs, unless it is all there is."""
    if "tool_name" in seen and not seen.get("error"):
        return _result_text(seen.get("result"))
    shown = {key: value for key, value in seen.items() if key != "metadata" and value not in (None, "", [], {})}
    shown = shown or seen.get("metadata") or {}
    if len(shown) == 1 and isinstance(only := next(iter(shown.values())), str):
        return only
    return orjson.dumps(shown).decode()


def _result_text(result: Any) -> str:
    """The result of an MCP tool in words."""
    if isinstance(result, dict) and isinstance(parts := result.get("content"), list):
        texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if texts and len(texts) == len(parts):
            return "\n".join(texts)
    return result if isinstance(result, str) else orjson.dumps(result).decode()
