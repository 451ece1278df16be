"""Keys under which a credit rule takes two calls for the same: state, action, agent. By default by tokens."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b

from agentlightning.errors import ConfigError, boundary
from agentlightning.runner.user_code import load
from agentlightning.training_types import Trajectory, Transition

Key = Callable[[Transition], Hashable]


def prompt_key(transition: Transition) -> Hashable:
    """Hash of the prompt's tokens: the state that the call was made in."""
    return _digest(transition.prompt_ids)


def answer_key(transition: Transition) -> Hashable:
    """Hash of the sampled tokens: the action."""
    return _digest(transition.sampled_ids)


def user_key(spec: str) -> Key:
    """The key function that ``file.py:name`` names. ConfigError where there is none; AgentError where it fails."""
    function = load(spec, ("transition",), "key function")

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


def _digest(ids: Sequence[int]) -> bytes:
    return blake2b(array("q", ids).tobytes(), digest_size=16).digest()
