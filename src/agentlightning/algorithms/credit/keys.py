"""Keys under which a credit rule takes two calls for the same: state, action, agent. By default by tokens."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import Any

from agentlightning.errors import ConfigError, boundary
from agentlightning.runtime.code_loader import load_function
from agentlightning.training_types import Trajectory, Transition

Key = Callable[[Transition], Hashable]
NAMES_OF_CALLS = frozenset({"id", "tool_call_id", "call_id"})
"""Keys of messages whose values are drawn anew for each tool call."""


def prompt_key(transition: Transition) -> Hashable:
    """Hash of the prompt's tokens: the state that the call was made in."""
    return _digest(transition.prompt_ids)


def observation_key(transition: Transition) -> Hashable:
    """Hash of the agent, the conversation's first messages, and those since the call before. Texts are compared without
    white space, tool calls without their ids, calls recorded without messages by tokens."""
    first = transition.path[0]
    parts: list[Any] = [first] if first is transition else [first, transition]
    shown = [_normalised(part.messages) if first.messages else part.suffix_ids for part in parts]
    text = json.dumps([transition.agent, shown], ensure_ascii=False, sort_keys=True)
    return blake2b(text.encode(), digest_size=16).digest()


def answer_key(transition: Transition) -> Hashable:
    """Hash of the sampled tokens: the action."""
    return _digest(transition.sampled_ids)


def user_key(spec: str) -> Key:
    """The key function that ``file.py:name`` names. ConfigError where there is none; AgentError where it fails."""
    function = load_function(spec, ("transition",), "key function")

    def key(transition: Transition) -> Hashable:
        with boundary(f"key function {spec!r}"):
            value = function(transition)
        try:
            hash(value)
        except TypeError as cause:
            raise ConfigError(
                f"key function {spec!r}: expected a hashable value, got {type(value).__name__}"
            ) from cause
        return value  # type: ignore[no-any-return]

    return key


def places(trajectory: Trajectory) -> list[Hashable]:
    """The agent of each call: its name where it is known, else the call's place among those without a name."""
    unnamed = 0
    found: list[Hashable] = []
    for transition in trajectory.transitions:
        if transition.agent is not None:
            found.append(transition.agent)
        else:
            found.append(unnamed)
            unnamed += 1
    return found


def _normalised(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, dict):
        return {key: _normalised(each) for key, each in value.items() if key not in NAMES_OF_CALLS}
    return [_normalised(each) for each in value] if isinstance(value, list | tuple) else value


def _digest(ids: Sequence[int]) -> bytes:
    return blake2b(array("q", ids).tobytes(), digest_size=16).digest()
