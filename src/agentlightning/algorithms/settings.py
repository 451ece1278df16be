"""Checks of an algorithm's settings: they name the setting, what was expected and what was given.

The algorithms' tables drive it when they are made, from Python or from TOML. Knows no setting by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from agentlightning.errors import ConfigError


def require(holds: bool, name: str, expected: str, got: object) -> None:
    """ConfigError, one sentence, where it does not hold."""
    if not holds:
        raise ConfigError(f"algorithm.{name}: expected {expected}, got {got!r}")


def require_one_of(known: Collection[str | None], name: str, got: object) -> None:
    names = sorted(each for each in known if each is not None)
    # a table or list from TOML is equal to none of them, but cannot be looked up in a set
    require(any(got == each for each in known), name, f"one of {', '.join(names)}", got)


def require_number(name: str, got: object, least: float = -math.inf, most: float = math.inf) -> None:
    if math.isfinite(most):
        expected = f"a number from {least:g} to {most:g}"
    else:
        expected = f"a number of at least {least:g}" if math.isfinite(least) else "a number"
    require(is_number(got, least, most), name, expected, got)


def require_whole(name: str, got: object, least: int) -> None:
    holds = isinstance(got, int) and not isinstance(got, bool) and got >= least
    require(holds, name, f"a whole number of at least {least}", got)


def is_number(got: object, least: float = -math.inf, most: float = math.inf) -> bool:
    """True for a finite number within the bounds; booleans are none."""
    return isinstance(got, int | float) and not isinstance(got, bool) and math.isfinite(got) and least <= got <= most
