"""TextWorld: the kind ``textworld:?option=value``: text adventures that are generated, a game for each seed.

Options: nb_rooms, nb_objects, quest_length, max_calls. A game is compiled when it is first played, into a cache that all
processes share; its row holds a digest of its world and its solution, so that equal games are seen as equal tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import textworld
import textworld.generator

from agentlightning.environments.base import EpisodeResult, Split, seeds
from agentlightning.environments.player import Action, Observation, UnreadableActionError, play_episode, text_command
from agentlightning.errors import ConfigError, InfrastructureError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM

SYSTEM = (
    "You play a text adventure. Reply with one command: look, inventory, goal, wait, go DIRECTION, examine THING, "
    "take THING, take THING from THING, drop THING, put THING on THING, insert THING into THING, open THING, close THING, "
    "lock THING with KEY, unlock THING with KEY, eat THING."
)
OF_THE_INTERPRETER = ("quit", "q", "restart", "restore", "save", "undo", "oops", "script", "transcript", "verify")
"""Commands that ask back, or touch files."""
STATUS_LINE = re.compile(r"\n>[^\n]*\Z")
"""The prompt that ends what the game says, and its status line."""


class TextWorld:
    """Games of one size. The reward is the share of the score; success is a game that is won."""

    def __init__(
        self, rest: str, *, nb_rooms: int = 3, nb_objects: int = 4, quest_length: int = 3, max_calls: int = 30
    ) -> None:
        if rest:
            raise ConfigError(f"env textworld: expected only options after the colon, got {rest!r}")
        self._size = {"nb_rooms": nb_rooms, "nb_objects": nb_objects, "quest_length": quest_length}
        self._max_calls = max_calls
        self._generator = threading.Lock()
        """TextWorld's grammars, which also read games, and random numbers are the process's."""
        try:
            self._game(0)
        except Exception as cause:
            raise ConfigError(f"env textworld: {self._size}: {type(cause).__name__}: {cause}") from cause

    def tasks(self, split: Split, limit: int, seed: int) -> Iterator[JSON]:
        for one in seeds(split, limit, seed):
            game = self._game(one)
            facts = sorted(str(fact) for fact in game.world.facts)
            content = "\n".join([*facts, *game.metadata["walkthrough"]])
            yield {"seed": one, "game": hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}

    async def play(self, task: JSON, llm: LLM) -> EpisodeResult:
        game = _Episode(await asyncio.to_thread(self._compiled, task["seed"]), self._generator)
        try:
            return await play_episode(game, llm, max_calls=self._max_calls)
        finally:
            game.close()

    def close(self) -> None:
        """Nothing outlives an episode."""

    def _game(self, seed: int) -> Any:
        with self._generator:
            return textworld.generator.make_game(self._options(seed))

    def _options(self, seed: int) -> Any:
        options = textworld.GameOptions()
        options.seeds = seed
        for option, value in self._size.items():
            setattr(options, option, value)
        return options

    def _compiled(self, seed: int) -> Path:
        """The game's file, made where it is not there."""
        size = "-".join(str(value) for value in self._size.values())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentlightning" / "textworld"
        folder = cache / f"{textworld.__version__}-{size}-{seed}"
        with self._generator:
            if not folder.exists():
                _compile(self._options(seed), folder)
        return folder / "game.z8"


def _compile(options: Any, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix="."))
    options.path = str(made / "game.z8")
    try:
        textworld.generator.compile_game(textworld.generator.make_game(options), options)
        with contextlib.suppress(FileExistsError, OSError):  # another process was quicker
            made.rename(folder)
        if not folder.exists():
            raise InfrastructureError(f"env textworld: {folder} could not be written")
    except Exception as cause:
        raise InfrastructureError(f"env textworld: a game could not be compiled: {cause}") from cause
    finally:
        shutil.rmtree(made, ignore_errors=True)


class _Episode:
    """One episode. A reply's last line is the command."""

    system = SYSTEM
    tools = ()

    def __init__(self, game: Path, reading: threading.Lock) -> None:
        self._path = game
        self._reading = reading
        self._game: Any = None
        self._state: Any = None
        self._score = 0.0

    async def start(self) -> Observation:
        await asyncio.to_thread(self._open)
        return Observation(text=f"{self._state.objective}\n\n{self._state.description.strip()}")

    async def act(self, action: Action) -> tuple[Observation, float]:
        command, before = text_command(action), self._score
        if command.lower().split()[0] in OF_THE_INTERPRETER:
            raise UnreadableActionError("That is no command of the game.")
        self._state, score, over = await asyncio.to_thread(self._game.step, command)
        self._score = score / (self._state.max_score or 1)
        seen = STATUS_LINE.sub("", self._state.feedback.rstrip()).strip()
        return Observation(text=re.sub(r"\n{3,}", "\n\n", seen), over=bool(over)), self._score - before

    def result(self) -> EpisodeResult:
        return EpisodeResult(
            reward=self._score, success=bool(self._state.won), metrics={"lost": float(self._state.lost)}
        )

    def close(self) -> None:
        if self._game is not None:
            self._game.close()

    def _open(self) -> None:
        wanted = ("score", "max_score", "won", "lost", "objective", "description")
        infos = textworld.EnvInfos(**dict.fromkeys(wanted, True))
        with self._reading:
            self._game = textworld.start(str(self._path), request_infos=infos)
            self._state = self._game.reset()
