"""TextArena: the kind ``textarena:ID?players=2&opponent=random``. Text games for one to six seats.

Options: players (seats, by default the fewest that the game takes), opponent (the player of the other seats: "random", or
the name of a policy or external model), val_opponent (the same on held-out tasks, "random" by default), seat (the model's;
by default it alternates by task), max_calls, and the game's own. A task is a seed.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from agentlightning.environments.base import EpisodeResult, Split, seeds
from agentlightning.environments.player import (
    Action,
    Observation,
    Opponent,
    model_opponent,
    play_episode,
    random_opponent,
)
from agentlightning.errors import ConfigError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM

with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its packages, while they are compiled
    import textarena

WORDS = ("Wordle", "Hangman", "WordLadder", "WordSearch", "WordChains", "DontSayIt", "LetterAuction", "Codenames")
"""Games that load corpora of NLTK, which no package index has."""


class TextArena:
    """The tasks of one game."""

    def __init__(
        self,
        name: str,
        *,
        players: int | None = None,
        opponent: str = "random",
        val_opponent: str = "random",
        seat: int | None = None,
        max_calls: int = 64,
        **options: Any,
    ) -> None:
        self._name = name.removesuffix("-raw")
        self._options = options
        self._opponents: dict[Split, str] = {"train": opponent, "val": val_opponent}
        self._seat = seat
        self._max_calls = max_calls
        own = _OwnRandom(0)
        try:
            game = own(textarena.make, f"{self._name}-raw", **options)
            self._players = players or _fewest(game, own)
            own(game.reset, num_players=self._players, seed=0)
        except LookupError as cause:
            hint = " in NLTK's corpora: python -m nltk.downloader all" if name.startswith(WORDS) else f": {cause}"
            raise ConfigError(f"env textarena:{name}: its words are not here{hint}") from cause
        except Exception as cause:
            raise ConfigError(f"env textarena:{name}: {type(cause).__name__}: {cause}") from cause

    def tasks(self, split: Split, limit: int, seed: int) -> Iterator[JSON]:
        for one in seeds(split, limit, seed):
            seat = one % self._players if self._seat is None else self._seat
            others = {"opponent": self._opponents[split]} if self._players > 1 else {}
            yield {"seed": one, "seat": seat, **others}

    async def play(self, task: JSON, llm: LLM) -> EpisodeResult:
        game = _Game(self._name, self._players, task, self._options)
        opponents: dict[int, Opponent] = {}
        for seat in {*range(self._players)} - {task["seat"]}:
            chance = random_opponent(task["seed"] + seat + llm.seed)
            opponents[seat] = chance if task["opponent"] == "random" else model_opponent(llm, task["opponent"])
        return await play_episode(game, llm, max_calls=self._max_calls, opponents=opponents)

    def close(self) -> None:
        """Nothing outlives an episode."""


class _Game:
    """One episode. ``-raw`` games tell each seat what is new alone."""

    system = ""
    tools = ()

    def __init__(self, name: str, players: int, task: JSON, options: dict[str, Any]) -> None:
        self._own = _OwnRandom(task["seed"])
        self._task = task
        self._players = players
        self._game = self._own(textarena.make, f"{name}-raw", **options)
        self._rewards: dict[int, Any] = {}
        self._told: dict[int, Any] = {}
        self._over = False

    async def start(self) -> Observation:
        self._own(self._game.reset, num_players=self._players, seed=self._task["seed"])
        return self._news()

    async def act(self, action: Action) -> tuple[Observation, None]:
        self._over, _ = self._own(self._game.step, action.text)
        if self._over:
            rewards, told = self._own(self._game.close)
            self._rewards, self._told = rewards or {}, told or {}
            return Observation(text="", over=True), None
        return self._news(), None

    def result(self) -> EpisodeResult:
        seat = self._task["seat"]
        reward = self._rewards.get(seat, 0.0)
        told = self._told.get(seat) or {}
        # Some games give the reason as reward after invalid moves; many pay partial progress to who lost.
        number = float(reward) if isinstance(reward, int | float) else 0.0
        fouled = bool(told.get("invalid_move"))
        return EpisodeResult(reward=number, success=number >= 1 and not fouled, metrics={"invalid_move": float(fouled)})

    def _news(self) -> Observation:
        seat, seen = self._game.get_observation()
        echo = textarena.ObservationType.PLAYER_ACTION
        news = [text for sender, text, kind in seen if not (sender == seat and kind is echo)]
        return Observation(text="\n".join(news), seat=int(seat))


class _OwnRandom:
    """A generator of an episode's own in place of the process-wide one, which games seed and draw from in every call."""

    lock = threading.Lock()

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()

    def __call__(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with self.lock, contextlib.redirect_stdout(sys.stderr):
            outer = random.getstate()
            random.setstate(self._state)
            try:
                return call(*arguments, **named)
            finally:
                self._state = random.getstate()
                random.setstate(outer)


def _fewest(game: Any, own: _OwnRandom) -> int:
    """The smallest number of seats that the game takes."""
    for players in range(1, 16):
        with contextlib.suppress(AssertionError, ValueError):
            own(game.reset, num_players=players, seed=0)
            return players
    raise ValueError("no number of players fits; give players")
