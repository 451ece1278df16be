"""Plug-ins of LightningRL besides credit rules: advantages and aggregations that it calls, losses that the learner calls.

Each is a function whose keyword-only arguments are its settings, checked before anything starts; whatever it returns is
checked before anything is trained on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Literal

from agentlightning.algorithms.advantage import PerToken
from agentlightning.algorithms.credit.rule import Credit
from agentlightning.algorithms.settings import NamedPart, function_settings
from agentlightning.errors import ConfigError, boundary
from agentlightning.runtime.code_loader import check_signature, load_plugin
from agentlightning.training_types import Trajectory

FunctionKind = Literal["advantage", "loss", "aggregation"]
SIGNATURES: Mapping[FunctionKind, tuple[str, ...]] = MappingProxyType(
    {"advantage": ("groups", "credits"), "loss": ("logprobs", "tokens"), "aggregation": ("trajectories",)}
)
"""Positional arguments of each kind."""


def plugin_settings(kind: FunctionKind, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The plug-in's settings, checked as its function declares them. ConfigError, too, where there is no such function."""
    function = load_plugin(kind, name, ())
    check_signature(function, SIGNATURES[kind], f"algorithm.{kind} {name!r}", settings=True)
    return function_settings(function, given, kind)


def check_part(kind: FunctionKind, part: object, built_in: Collection[str]) -> None:
    """ConfigError if a part without a table is neither built in nor code, or has a setting that it does not know."""
    if not isinstance(part, NamedPart):
        return
    if part.type not in built_in:
        load_plugin(kind, part.type, built_in)
        plugin_settings(kind, part.type, part.settings)
    elif part.settings:
        raise ConfigError(f"algorithm.{kind}.{next(iter(part.settings))}: no such setting; {part.type!r} has none")


def plugin_advantages(
    part: NamedPart, groups: Sequence[Sequence[Trajectory]], credits: Sequence[Sequence[Credit]]
) -> list[list[PerToken]]:
    """``(groups, credits, *, settings)``: all groups of a step and the credit of each rollout's calls, to a list per group
    of a list per rollout of one number per call, or one per sampled token. Returns the rollouts of all groups."""
    what = f"advantage {part.type!r}"
    settings = plugin_settings("advantage", part.type, part.settings)
    with boundary(what):
        returned = load_plugin("advantage", part.type, ())(groups, credits, **settings)
    _require(what, returned, len(groups), "groups")
    found: list[list[PerToken]] = []
    for group, rows in zip(groups, returned, strict=True):
        _require(what, rows, len(group), f"rollouts of group {group[0].group_id if group else ''}")
        found += [_of_calls(what, trajectory, row) for trajectory, row in zip(group, rows, strict=True)]
    return found


def plugin_weights(part: NamedPart, trajectories: Sequence[Trajectory]) -> list[list[PerToken]]:
    """``(trajectories, *, settings)``: the rollouts that count in a minibatch, to a list per rollout of one weight per call,
    for each of its sampled tokens, or one per token. The loss is the sum of weight × loss over tokens."""
    what = f"aggregation {part.type!r}"
    settings = plugin_settings("aggregation", part.type, part.settings)
    with boundary(what):
        returned = load_plugin("aggregation", part.type, ())(trajectories, **settings)
    _require(what, returned, len(trajectories), "rollouts")
    return [_of_calls(what, trajectory, row) for trajectory, row in zip(trajectories, returned, strict=True)]


@contextmanager
def own_code(algorithm: object) -> Iterator[None]:
    """Whatever an algorithm of the user's own raises becomes an AgentError that names its class."""
    kind = type(algorithm)
    ours = kind.__module__.startswith("agentlightning.")
    with nullcontext() if ours else boundary(f"algorithm.type {kind.__name__!r}"):
        yield


def _of_calls(what: str, trajectory: Trajectory, row: Any) -> list[PerToken]:
    _require(what, row, len(trajectory.transitions), f"calls of rollout {trajectory.rollout_id}")
    found: list[PerToken] = []
    for call, value in zip(trajectory.transitions, row, strict=True):
        if _is_list(value):
            _require(what, value, len(call.sampled_ids), f"sampled tokens of call {call.call_id}")
        numbers = list(value) if _is_list(value) else [value]
        if not all(isinstance(one, int | float) and math.isfinite(one) for one in numbers):
            raise ConfigError(f"{what}: expected finite numbers for call {call.call_id}, got {value!r:.80}")
        found.append([float(one) for one in numbers] if _is_list(value) else float(value))
    return found


def _require(what: str, returned: Any, count: int, each: str) -> None:
    if not _is_list(returned) or len(returned) != count:
        got = len(returned) if _is_list(returned) else type(returned).__name__
        raise ConfigError(f"{what}: expected a list with one entry for each of {count} {each}, got {got}")


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
