"""Games of two servers of the tests: OpenEnv's own (openenv_server.py), and ours of the same wire (openenv_wire.py)."""

from __future__ import annotations

import itertools
from typing import Any

NUMBERS = 8
GUESSES = 4
RESETS = itertools.count()


class Guessing:
    """A number to guess, which the seed draws: the opening says in which half it is."""

    rewarded = True

    def reset(self, seed: int) -> dict[str, Any]:
        self._number = seed % NUMBERS
        self._guesses = 0
        return {"hint": "below" if self._number < NUMBERS // 2 else "above", "half": NUMBERS // 2}

    def guess(self, number: int) -> tuple[dict[str, Any], float | None, bool]:
        """Observation, reward, done."""
        self._guesses += 1
        hit = number == self._number
        hint = "right" if hit else "higher" if self._number > number else "lower"
        return {"hint": hint}, float(hit) if self.rewarded else None, hit or self._guesses == GUESSES


class Unrewarded(Guessing):
    """Gives no reward."""

    rewarded = False


class Careless(Guessing):
    """Drops the seed."""

    def reset(self, seed: int) -> dict[str, Any]:
        return super().reset(next(RESETS) * NUMBERS // 2)


class Broken(Guessing):
    """Fails in a step."""

    def guess(self, number: int) -> tuple[dict[str, Any], float | None, bool]:
        raise RuntimeError("the disk is full")


TYPED: dict[str, tuple[type[Guessing], int]] = {
    "guessing": (Guessing, 8),
    "unrewarded": (Unrewarded, 8),
    "careless": (Careless, 8),
    "broken": (Broken, 8),
    "small": (Guessing, 2),
}
"""By path: the game, and how many sessions its server has. Under /tools is `Guessing` by MCP."""
