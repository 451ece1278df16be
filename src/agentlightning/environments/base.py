"""`Environment`: the interface, its names, and how one is found.

An environment is named ``KIND:REST?option=value``, where KIND is built in or an entry point of the group
agentlightning.environments, or ``file.py:Class?option=value``. Knows nothing of workers and configuration.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from inspect import iscoroutinefunction, signature, unwrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import parse_qsl, quote

import orjson

from agentlightning.errors import AgentLightningError, ConfigError, DataError, MissingExtraError, VerifierError
from agentlightning.records import JSON
from agentlightning.runtime.code_loader import installed_plugins, load_code, load_plugin

if TYPE_CHECKING:
    from agentlightning.runner.agent import LLM

Split = Literal["train", "val"]
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "gymnasium": "agentlightning.environments.gymnasium:Gymnasium",
        "harbor": "agentlightning.environments.harbor:Harbor",
        "openenv": "agentlightning.environments.openenv:OpenEnv",
        "reasoning-gym": "agentlightning.environments.reasoning_gym:ReasoningGym",
        "scienceworld": "agentlightning.environments.scienceworld:ScienceWorld",
        "tau2": "agentlightning.environments.tau2:Tau2",
        "textarena": "agentlightning.environments.textarena:TextArena",
        "textworld": "agentlightning.environments.textworld:TextWorld",
        "verifiers": "agentlightning.environments.verifiers:Verifiers",
    }
)
"""The kinds that come with this package."""
SEEDS_PER_RUN = 1_000_000
VAL_SEEDS = 1 << 30
"""First seed of held-out tasks: no training task of any run seed has one beyond it."""
READABLE = "/:,.=?!'[]{}\" "
"""Characters of an option's value that stand as they are in a name."""
UNREWARDED = "unrewarded"
"""A metric: 1 where the environment gave no reward in the whole episode, which then counts as 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """Result of one episode."""

    reward: float
    success: bool | None = None
    """True where the task was solved, which a reward above 0 does not say; None where the environment does not know."""
    steps: Sequence[tuple[str, float]] = ()
    """Rewards of single steps: the id of the model call that acted, and its reward."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Recorded beside the reward, by name: ``invalid``, ``truncated``."""


class Environment(Protocol):
    """A source of tasks that can be played. It is made once in each worker, which plays many tasks at a time.

    One with an attribute ``remote_agent = True`` asks the model from inside a container: the checks, whose model listens on
    loopback, then open none of its tasks.
    """

    def tasks(self, split: Split, limit: int, seed: int) -> Iterable[JSON]:
        """At most `limit` rows that `play` takes, the same ones every time; no row of one split equals one of the other."""
        ...

    async def play(self, task: JSON, llm: LLM) -> EpisodeResult | float:
        """Play a task with the model at ``llm.base_url``.

        InfrastructureError where something other than the model failed, VerifierError where the reward could not be
        computed: neither counts as a reward of 0.
        """
        ...

    # close(self) -> None, if it has one, ends what it started, as its worker ends.


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentName:
    """A parsed name."""

    kind: str
    """The entry point; empty for a class of a file."""
    rest: str
    """The text between the kind and the options, or ``file.py:Class``."""
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, name: str, options: Mapping[str, Any] | None = None) -> EnvironmentName:
        """A name, and options given beside it. Values are JSON where they can be, else texts. ConfigError for an unknown
        kind."""
        whole, _, query = name.partition("?")
        own = {key: _value(text) for key, text in parse_qsl(query, keep_blank_values=True)}
        kind, colon, rest = whole.partition(":")
        known = kinds()
        if ".py:" in whole:
            kind, rest = "", whole
        elif not colon or kind not in known:
            raise ConfigError(f"env: expected KIND:REST with one of {', '.join(known)}, or file.py:Class, got {name!r}")
        return cls(kind=kind, rest=rest, options={**own, **(options or {})})

    def __str__(self) -> str:
        text = f"{self.kind}:{self.rest}" if self.kind else self.rest
        query = "&".join(f"{key}={_text(value)}" for key, value in self.options.items())
        return f"{text}?{query}" if query else text


def kinds() -> list[str]:
    """Names of all kinds that are known here."""
    return sorted({*BUILT_IN, *installed_plugins("environment")})


def open_environment(name: str | EnvironmentName) -> Environment:
    """The environment of this name, in this process.

    ConfigError for an unknown kind or option; MissingExtraError where its package is not installed here.
    """
    parsed = EnvironmentName.parse(name) if isinstance(name, str) else name
    try:
        factory = _factory(parsed)
        arguments = (parsed.rest,) if parsed.kind else ()
        _check_options(factory, arguments, parsed)
        made: Environment = factory(*arguments, **parsed.options)
    except ModuleNotFoundError as cause:
        raise MissingExtraError(cause.name or parsed.kind, "env") from cause
    except (AgentLightningError, KeyboardInterrupt, SystemExit):
        raise
    except Exception as cause:
        raise ConfigError(f"env {parsed}: cannot be made: {type(cause).__name__}: {cause}") from cause
    _check_methods(made, parsed)
    return made


def task_rows(environment: Environment, split: Split, limit: int, seed: int) -> list[JSON]:
    """The rows of a split, as the store gives them back. DataError where they are no JSON objects."""
    rows = environment.tasks(split, limit, seed)
    if not isinstance(rows, Iterable):
        raise DataError(f"env: tasks({split!r}): expected a list of dicts, got {rows!r:.100}")
    made = list(rows)
    if wrong := [row for row in made if not isinstance(row, dict)]:
        raise DataError(f"env: tasks({split!r}): expected dicts, got {wrong[0]!r:.100}")
    try:
        return [orjson.loads(orjson.dumps(row)) for row in made]
    except TypeError as cause:
        raise DataError(f"env: tasks({split!r}): expected JSON: {cause}") from cause


def episode_result(played: Any) -> EpisodeResult:
    """The result that `play` returned. VerifierError where its reward is no finite number."""
    result = played if isinstance(played, EpisodeResult) else EpisodeResult(reward=played)
    if (
        isinstance(result.reward, bool)
        or not isinstance(result.reward, int | float)
        or not math.isfinite(result.reward)
    ):
        raise VerifierError(
            f"env: play: expected a finite number or an EpisodeResult with one, got {result.reward!r:.200}"
        )
    return result


def close_environment(environment: Environment) -> None:
    """End what an environment started."""
    close = getattr(environment, "close", None)
    if close is not None:
        close()


def seeds(split: Split, limit: int, seed: int) -> range:
    """Seeds of a split's tasks, which those of the other split and of another run's seed never meet.

    They are 31 bits, as most generators take them; limit: at most `SEEDS_PER_RUN`.
    """
    start = (seed % 1000) * SEEDS_PER_RUN + (VAL_SEEDS if split == "val" else 0)
    return range(start, start + limit)


def out_of_limits(error: str) -> bool:
    """True for a gateway's error that ends the model's part and is no failure: the prompt fills the context, or the
    attempt's limits are used up."""
    return "context_length_exceeded" in error or "insufficient_quota" in error


def _factory(name: EnvironmentName) -> Any:
    if name.kind in BUILT_IN:
        module, _, attribute = BUILT_IN[name.kind].partition(":")
        return getattr(import_module(module), attribute)
    return load_plugin("environment", name.kind, kinds()) if name.kind else load_code(name.rest, "env")


def _check_methods(made: Any, name: EnvironmentName) -> None:
    for method, arguments in (("tasks", ("split", "limit", "seed")), ("play", ("task", "llm"))):
        found, wanted = getattr(made, method, None), f"{method}({', '.join(arguments)})"
        if not callable(found):
            raise ConfigError(f"env {name}: has no method {wanted}")
        try:
            signature(found).bind(*arguments)
        except TypeError as cause:
            raise ConfigError(f"env {name}: expected a method {wanted}: {cause}") from None
    if not iscoroutinefunction(unwrap(made.play)):
        raise ConfigError(f"env {name}: expected async def play(task, llm), got a plain function")


def _check_options(factory: Any, arguments: Sequence[str], name: EnvironmentName) -> None:
    try:
        taken = signature(factory)
    except (TypeError, ValueError):
        return  # a class of C has none
    try:
        taken.bind(*arguments, **name.options)
    except TypeError as cause:
        known = [one for one in taken.parameters.values() if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)]
        takes = ", ".join(one.name for one in known[len(arguments) :]) or "none"
        raise ConfigError(f"env {name}: {cause}; its options: {takes}") from None


def _value(text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    return text


def _text(value: Any) -> str:
    """A text that `_value` reads as this value: a text that would be read as JSON is quoted."""
    plain = isinstance(value, str) and _value(value) == value
    return quote(value if plain else json.dumps(value, separators=(",", ":")), safe=READABLE)
