"""Settings of runs as flat tables, and where they differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

HOST = frozenset({"store.url", "engine.listen", "engine.advertise", "engine.vllm.weights_host"})
"""Settings of a host, which say nothing of what is learned."""
SEED = "trainer.seed"


def flat_settings(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name.

    >>> flat_settings({"trainer": {"steps": 5}, "algorithm": {}})
    {'trainer.steps': 5}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat_settings(value, f"{name}.")
        elif name not in HOST:
            found[name] = value
    return found


def differing(settings: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Settings that are not the same in all, by name, each with its values in their order; None where one has none."""
    names = sorted({name for one in settings for name in one})
    rows = [(name, [one.get(name) for one in settings]) for name in names]
    return [(name, values) for name, values in rows if len({_key(value) for value in values}) > 1]


def without_seed(settings: Mapping[str, Any]) -> str:
    """A key that runs have in common which differ by their seed alone."""
    return _key({name: value for name, value in settings.items() if name != SEED})


def _key(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS, default=str).decode()
