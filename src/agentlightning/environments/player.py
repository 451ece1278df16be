"""The player: one conversation per seat, for environments whose loop is ours.

An observation is a user turn (or the tool's result) that extends the conversation exactly; the reply is the action. A kind
gives a `Game`, and `play_episode` makes an `EpisodeResult` of it. Knows nothing of any kind.
"""

from __future__ import annotations

import random
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from agentlightning.environments.base import EpisodeResult
from agentlightning.errors import AgentError, InfrastructureError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM

MAX_COMMAND = 200
"""Characters of a text command: interpreters of adventures have short buffers."""
MAX_UNREADABLE = 2
"""Actions in a row that the environment cannot read: the first is answered with the reason, the next ends the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The next thing that a seat sees."""

    text: str
    """Only what is new: the conversation holds the rest."""
    seat: int = 0
    over: bool = False
    """The episode has ended: nobody is asked for an action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A reply: its text, and the first tool call where it made one."""

    text: str
    tool: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


class UnreadableActionError(Exception):
    """The episode cannot read an action. The text says what was expected: the model sees it, and may try once more."""


class Game(Protocol):
    """One task while it is played."""

    @property
    def system(self) -> str:
        """The rules, as system message of every seat; empty for none."""
        ...

    @property
    def tools(self) -> Sequence[JSON]:
        """Actions as tools, in the form of Chat Completions; empty where the reply's text is the action."""
        ...

    async def start(self) -> Observation:
        """The first observation."""
        ...

    async def act(self, action: Action) -> tuple[Observation, float | None]:
        """The observation after an action, and the step's reward, if it has one. UnreadableActionError."""
        ...

    def result(self) -> EpisodeResult:
        """Reward and success of the episode, over or not."""
        ...


Opponent = Callable[[Sequence[JSON]], Awaitable[str]]
"""Another player of a seat: its conversation so far to the text of its action."""


async def play_episode(
    episode: Game, llm: LLM, *, max_calls: int, opponents: Mapping[int, Opponent] | None = None
) -> EpisodeResult:
    """Play until the episode is over, the model has made `max_calls` calls or its context is full (``truncated`` is then
    1), or two actions in a row could not be read.

    opponents: the players of seats that are not the model's.
    """
    table = _Table(episode, llm, opponents or {})
    observation = await episode.start()
    unreadable = 0
    while not observation.over:
        if table.calls >= max_calls and observation.seat not in table.opponents:
            table.truncated = True
            break
        reply = await table.ask(observation)
        if reply is None:
            break
        action, call_id = reply
        try:
            observation, reward = await episode.act(action)
        except UnreadableActionError as cause:
            unreadable, table.invalid = unreadable + 1, table.invalid + 1
            if unreadable >= MAX_UNREADABLE:
                break
            observation = Observation(text=str(cause), seat=observation.seat)
            continue
        unreadable = 0
        if reward is not None and call_id is not None:
            table.steps.append((call_id, reward))
    done = episode.result()
    counted = {"invalid": float(table.invalid), "truncated": float(table.truncated)}
    return EpisodeResult(
        reward=done.reward, success=done.success, steps=[*table.steps, *done.steps], metrics={**done.metrics, **counted}
    )


def text_command(action: Action) -> str:
    """The command of a text adventure: the reply's last line, in ASCII. UnreadableActionError where there is none."""
    lines = action.text.strip().splitlines() or [""]
    command = "".join(letter for letter in lines[-1] if " " <= letter <= "~").strip(" >`")[:MAX_COMMAND]
    if not command:
        raise UnreadableActionError("Expected one command.")
    return command


def model_opponent(llm: LLM, model: str) -> Opponent:
    """Another model as the opponent: a policy of the run that is not trained, or an external model, by its name."""

    async def act(messages: Sequence[JSON]) -> str:
        answer = await _complete(llm, {"model": model, "messages": list(messages)})
        if answer is None:
            raise InfrastructureError(f"the opponent {model!r} has no room left in its context")
        return str(answer["choices"][0]["message"].get("content") or "")

    return act


def random_opponent(seed: int) -> Opponent:
    """An opponent that takes one of the actions in square brackets that the last line with any shows."""
    draw = random.Random(seed)

    async def act(messages: Sequence[JSON]) -> str:
        lines = [re.findall(r"\[[^\[\]]+\]", line) for line in str(messages[-1]["content"]).splitlines()]
        shown: list[str] = next((found for found in reversed(lines) if found), [])
        return draw.choice(shown) if shown else ""

    return act


class _Table:
    """The seats of one episode: a conversation each."""

    def __init__(self, episode: Game, llm: LLM, opponents: Mapping[int, Opponent]) -> None:
        self._episode = episode
        self._llm = llm
        self.opponents = opponents
        self._talks: dict[int, list[JSON]] = {}
        self._pending: dict[int, list[str]] = {}
        """Ids of the tool calls that each seat's last reply made, and that have no result yet."""
        self.calls = 0
        self.invalid = 0
        self.truncated = False
        self.steps: list[tuple[str, float]] = []

    async def ask(self, observation: Observation) -> tuple[Action, str | None] | None:
        """The seat's action on an observation, and the id of the call that made it; None where the context is full."""
        seat = observation.seat
        talk = self._talks.setdefault(seat, _opening(self._episode.system))
        ids = self._pending.pop(seat, [])
        contents = [observation.text, *["one action at a time: this one was not taken" for _ in ids[1:]]]
        if ids:
            talk += [
                {"role": "tool", "tool_call_id": key, "content": text} for key, text in zip(ids, contents, strict=True)
            ]
        else:
            talk.append({"role": "user", "content": observation.text})
        if seat in self.opponents:
            text = await self.opponents[seat](talk)
            talk.append({"role": "assistant", "content": text})
            return Action(text=text), None
        return await self._call(seat, talk)

    async def _call(self, seat: int, talk: list[JSON]) -> tuple[Action, str] | None:
        body: JSON = {"model": self._llm.model, "messages": talk}
        if self._episode.tools:
            body["tools"] = list(self._episode.tools)
        answer = await _complete(self._llm, body)
        if answer is None:
            self.truncated = True
            return None
        self.calls += 1
        message = answer["choices"][0]["message"]
        uses = message.get("tool_calls") or []
        kept = {"role": "assistant", "content": message.get("content")} | ({"tool_calls": uses} if uses else {})
        talk.append(kept)
        self._pending[seat] = [str(use["id"]) for use in uses]
        return _action(message), str(answer["id"])


def _opening(system: str) -> list[JSON]:
    return [{"role": "system", "content": system}] if system else []


def _action(message: JSON) -> Action:
    text = str(message.get("content") or "")
    for use in message.get("tool_calls") or []:
        called = use["function"]
        try:
            arguments = orjson.loads(called.get("arguments") or "{}")
        except orjson.JSONDecodeError:
            arguments = None
        return Action(text=text, tool=str(called["name"]), arguments=arguments if isinstance(arguments, dict) else {})
    return Action(text=text)


async def _complete(llm: LLM, body: JSON) -> Any:
    """A chat completion; None where the prompt fills the context or the attempt's limits end it."""
    headers = {"authorization": f"Bearer {llm.api_key}"}
    try:
        answer = await llm.http_client.post(f"{llm.base_url}/chat/completions", json=body, headers=headers)
    except Exception as cause:  # of httpx or httpx2, whichever is installed
        raise InfrastructureError(f"the model could not be asked: {type(cause).__name__}: {cause}") from cause
    if answer.status_code == 200:
        return answer.json()
    if answer.status_code in (400, 429) and _ends(answer.content):
        return None
    text = answer.text[:500]
    if answer.status_code >= 500:
        raise InfrastructureError(f"the model could not be asked: HTTP {answer.status_code}: {text}")
    raise AgentError(f"the gateway refused a call: HTTP {answer.status_code}: {text}")


def _ends(content: bytes) -> bool:
    try:
        error = orjson.loads(content)["error"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False
    return isinstance(error, dict) and error.get("code") in ("context_length_exceeded", "insufficient_quota")
