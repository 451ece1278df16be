"""Gymnasium: the kind ``gymnasium:ID?option=value``: toy-text, MiniGrid and BabyAI, and others with numbered actions.

Gymnasium has no language: rules, action words and the picture in words are ours. Options go to ``gymnasium.make``. Maps of
FrozenLake are drawn here, since the seed of its reset draws none; a map belongs to the split that its content's hash says.
"""

from __future__ import annotations

import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from agentlightning.environments.base import EpisodeResult, Split, seeds
from agentlightning.environments.player import Action, Observation, UnreadableActionError, play_episode
from agentlightning.errors import ConfigError
from agentlightning.records import JSON
from agentlightning.runner.agent import LLM

MAX_CALLS = 100
"""Calls of an episode whose environment sets no limit itself."""
HELD_OUT = 5
"""One map of so many is held out."""
ACTIONS: Mapping[str, str] = MappingProxyType(
    {
        "FrozenLake": "left down right up",
        "FrozenLake8x8": "left down right up",
        "CliffWalking": "up right down left",
        "CliffWalkingSlippery": "up right down left",
        "Taxi": "south north east west pickup dropoff",
        "Blackjack": "stick hit",
        "MiniGrid": "left right forward pickup drop toggle done",
    }
)
"""Words of the numbered actions."""
RULES: Mapping[str, str] = MappingProxyType(
    {
        "FrozenLake": "Walk from S to G over frozen cells F, without falling into a hole H. <> marks your place.",
        "CliffWalking": "Walk to T without stepping on the cliff C. x is your place.",
        "Taxi": "You drive the taxi <>. Pick the passenger up and drop them off at their destination. | are walls.",
        "Blackjack": "Get closer to 21 than the dealer without going over it.",
        "MiniGrid": "Fulfil the mission. left and right turn you; forward moves you; toggle opens doors and boxes.",
    }
)
COLOURED = re.compile(r"\x1b\[4\dm(.)\x1b\[0m|\x1b\[[0-9;]*m")
"""A cell with a background, which is the player's, or another colour."""


class Gymnasium:
    """The tasks of one environment: a map or a seed each."""

    def __init__(self, name: str, **options: Any) -> None:
        if find_spec("minigrid") is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of its packages, while they are compiled
                import minigrid  # noqa: F401  # registers MiniGrid and BabyAI
        self._name = name
        self._options = options
        self._family = name.rpartition("/")[2].rpartition("-")[0]
        grid = name.startswith(("MiniGrid-", "BabyAI-"))
        self._family = "MiniGrid" if grid else self._family
        self._draws_maps = self._family.startswith("FrozenLake") and not {"desc", "map_name"} & options.keys()
        try:
            made = self._make({})
            made.close()
        except (gymnasium.error.Error, TypeError, AssertionError) as cause:
            raise ConfigError(f"env gymnasium:{name}: {cause}") from cause
        if not isinstance(made.action_space, gymnasium.spaces.Discrete):
            raise ConfigError(f"env gymnasium:{name}: expected numbered actions, got {made.action_space}")

    def tasks(self, split: Split, limit: int, seed: int) -> Iterator[JSON]:
        if not self._draws_maps:
            yield from ({"seed": one} for one in seeds(split, limit, seed))
            return
        size, known = 8 if "8x8" in self._name else 4, set[str]()
        for one in seeds(split, 100 * limit, seed):
            rows = generate_random_map(size=size, seed=one)
            drawn = "".join(rows)
            if drawn in known or (zlib.crc32(drawn.encode()) % HELD_OUT == 0) != (split == "val"):
                continue
            known.add(drawn)
            yield {"seed": one, "desc": rows}
            if len(known) == limit:
                return

    async def play(self, task: JSON, llm: LLM) -> EpisodeResult:
        game = self._make({"desc": task["desc"]} if "desc" in task else {})
        try:
            return await play_episode(_Game(game, self._family, task["seed"]), llm, max_calls=MAX_CALLS)
        finally:
            game.close()

    def close(self) -> None:
        """Nothing outlives an episode."""

    def _make(self, more: dict[str, Any]) -> Any:
        kind = gymnasium.spec(self._name).entry_point
        text = (
            {"render_mode": "ansi"} if self._family in ACTIONS and self._family not in ("Blackjack", "MiniGrid") else {}
        )
        assert kind is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return gymnasium.make(self._name, **{**text, **self._options, **more})


class _Game:
    """One episode."""

    tools = ()

    def __init__(self, game: Any, family: str, seed: int) -> None:
        self._game = game
        self._family = family
        self._seed = seed
        count = int(game.action_space.n)
        self._words = ACTIONS.get(family, "").split()[:count] or [str(number) for number in range(count)]
        self._total = 0.0
        self._last = 0.0
        self._ended = self._cut = False

    @property
    def system(self) -> str:
        rules = RULES.get(self._family.removesuffix("8x8").removesuffix("Slippery"), self._family)
        choice = ", ".join(f"[{word}]" for word in self._words)
        return f"{rules} Reply with one action in square brackets: {choice}."

    async def start(self) -> Observation:
        seen, _ = self._game.reset(seed=self._seed)
        return Observation(text=self._words_for(seen))

    async def act(self, action: Action) -> tuple[Observation, float]:
        found = [word for word in re.findall(r"[\w]+", action.text.lower()) if word in self._words]
        bracketed = [word for word in re.findall(r"\[(\w+)\]", action.text.lower()) if word in self._words]
        if not found:
            raise UnreadableActionError(f"Expected one of: {', '.join(f'[{word}]' for word in self._words)}.")
        chosen = (bracketed or found)[-1]
        seen, reward, self._ended, self._cut, _ = self._game.step(self._words.index(chosen))
        self._last = float(reward)
        self._total += self._last
        return Observation(text=self._words_for(seen), over=self._ended or self._cut), self._last

    def result(self) -> EpisodeResult:
        walked = self._family.startswith("CliffWalking")  # ends at its goal alone, and pays -1 for each step
        solved = self._ended and (walked or self._last > 0)
        return EpisodeResult(reward=self._total, success=bool(solved), metrics={"out_of_steps": float(self._cut)})

    def _words_for(self, seen: Any) -> str:
        if self._family == "MiniGrid":
            return describe_grid(seen)
        if self._family == "Blackjack":
            return f"Your sum is {seen[0]}{' with a usable ace' if seen[2] else ''}; the dealer shows {seen[1]}."
        picture = self._game.render() if self._game.render_mode == "ansi" else None
        if not isinstance(picture, str):
            return f"Observation: {seen}"
        lines = COLOURED.sub(lambda cell: f"<{cell[1]}>" if cell[1] else "", picture).strip("\n").splitlines()
        return "\n".join(line for line in lines if not re.fullmatch(r"\s*\(.*\)\s*", line))  # the last action's name


def describe_grid(seen: Mapping[str, Any]) -> str:
    """Describes a MiniGrid observation, from the agent's place: the agent stands at the middle of the last row."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT, STATE_TO_IDX

    states = {number: name for name, number in STATE_TO_IDX.items()}
    image = seen["image"]
    width, depth = image.shape[0], image.shape[1]
    things, walls = [], []
    for x in range(width):
        for y in range(depth):
            kind, colour, state = (int(number) for number in image[x, y])
            name, ahead, aside = IDX_TO_OBJECT[kind], depth - 1 - y, x - width // 2
            if name in ("unseen", "empty", "floor", "agent") or (ahead, aside) == (0, 0):
                continue
            if name == "wall":
                walls += [ahead] if aside == 0 else []
                continue
            named = (
                f"{states[state]} {IDX_TO_COLOR[colour]} {name}" if name == "door" else f"{IDX_TO_COLOR[colour]} {name}"
            )
            things.append((ahead, aside, named))
    here = image[width // 2, depth - 1]
    carried, its_colour = IDX_TO_OBJECT[int(here[0])], IDX_TO_COLOR[int(here[1])]
    told = [f"Mission: {seen['mission']}", f"You face {('east', 'south', 'west', 'north')[int(seen['direction'])]}."]
    if carried not in ("empty", "unseen", "agent"):
        told.append(f"You carry a {its_colour} {carried}.")
    told += [f"A {named} is {_place(ahead, aside)}." for ahead, aside, named in sorted(things)]
    if walls:
        told.append(f"A wall is {min(walls)} ahead.")
    return "\n".join(told)


def _place(ahead: int, aside: int) -> str:
    parts = [f"{ahead} ahead"] if ahead else []
    parts += [f"{abs(aside)} to the {'left' if aside < 0 else 'right'}"] if aside else []
    return " and ".join(parts)
