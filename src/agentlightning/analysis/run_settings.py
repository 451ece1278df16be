"""Run settings: configurations of stored runs as flat tables: their differences, seeds of one experiment.

Comparisons of runs and suggestions draw on it. Pure.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import orjson

from agentlightning.algorithms.lightning_rl import LightningRL
from agentlightning.algorithms.settings import as_table
from agentlightning.errors import AgentLightningError
from agentlightning.records import JSON, Run
from agentlightning.runtime.code_loader import only_named_code

SEED = "trainer.seed"
IGNORED = frozenset({"store.url", "engine.listen", "engine.advertise", "engine.sampler.weights", "monitor.tags"})
"""Settings of a host, and names, which say nothing about what is learned."""
IGNORED_TABLES = ("alerts.",)
"""Tables about who is told of a run."""
TAGS = "tags"
"""Key of a run's summary with the tags that were set later."""
MAX_WHOLE = 2.0**53
"""Up to here a float and the whole number that it is are the same; far above, no JSON has the latter."""
LOG_RANGE = 10.0
"""Positive numbers that span this factor, such as learning rates, are compared by their logarithms."""

FlatSettings = dict[str, Any]
"""Values by dotted name. Lists are values."""


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting that is not the same in all runs."""

    name: str
    values: list[Any]
    """By run, in their order; None where a run does not have it."""


def flat_settings(config: JSON) -> FlatSettings:
    """The settings of a run by dotted name, the defaults of LightningRL included: a record has only what was given. Of an
    algorithm that cannot be made any more, or that names code, what was given.

    >>> flat_settings({"trainer": {"steps": 5}, "algorithm": {"type": "sft"}})
    {'trainer.steps': 5, 'algorithm.type': 'sft'}
    """
    algorithm = config.get("algorithm")
    if isinstance(algorithm, Mapping) and algorithm.get("type", "lightning_rl") == "lightning_rl":
        given = {name: value for name, value in algorithm.items() if name not in ("type", "schedule")}
        with contextlib.suppress(AgentLightningError), only_named_code():
            config = {**config, "algorithm": {"type": "lightning_rl", **algorithm, **as_table(LightningRL(**given))}}
    found = _flat(config, "").items()
    return {name: value for name, value in found if name not in IGNORED and not name.startswith(IGNORED_TABLES)}


def tags_of(run: Run) -> list[str]:
    """The tags of a run: those that ``agl runs tag`` set, else those that it was configured with."""
    monitor = run.config.get("monitor")
    given = run.summary.get(TAGS, monitor.get("tags") if isinstance(monitor, Mapping) else None)
    return [str(tag) for tag in given] if isinstance(given, list) else []


def _flat(value: Any, name: str) -> FlatSettings:
    if not isinstance(value, Mapping) or (not value and name):
        return {name: value}
    found: FlatSettings = {}
    for key, one in value.items():
        found |= _flat(one, f"{name}.{key}" if name else key)
    return found


def differing(settings: Sequence[FlatSettings]) -> list[SettingDifference]:
    """The settings that are not the same in all of them, by name."""
    names = sorted({name for one in settings for name in one})
    rows = [SettingDifference(name, [one.get(name) for one in settings]) for name in names]
    return [row for row in rows if len({setting_key(value) for value in row.values}) > 1]


def without_seed(settings: FlatSettings) -> str:
    """A key that runs of one experiment share, which differ by their seed alone."""
    return setting_key({name: value for name, value in settings.items() if name != SEED})


def setting_key(value: Any) -> str:
    """A key of a value; 1 and 1.0 are one value, as they are in a configuration."""
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_WHOLE:
        value = int(value)
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=str).decode()


def is_number(value: object) -> TypeGuard[float]:
    """True for a number that can be more or less; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
