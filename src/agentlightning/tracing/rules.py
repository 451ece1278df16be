"""The rules of AIR: what a call did well or badly as far as the system sees by itself, a number from 0 to 1 for each call.

`air.py` drives them, over the whole record of one attempt. A rule says None where it has nothing to say of a call (no tool
was called), which earns nothing, as 0 does. Weights, bounds and signs are not known here. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import orjson

from agentlightning.tracing.tool_uses import CallStep, ToolExecution, canonical, content_text, parse_tool_calls

Scores = list[float | None]
"""One for each step."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A rule that comes with the system."""

    score: Callable[[Sequence[CallStep], float], Scores]
    """Of the steps of one attempt; the number is the rule's budget."""
    penalty: bool
    """True for a rule about what should not happen: its weight is meant to be negative."""
    budget: str | None = None
    """Unit of its budget; None: it has none."""


def tool_error(steps: Sequence[CallStep], _: float = 0.0) -> Scores:
    """Share of the call's tools that failed, of those whose end is known."""
    return [_share([use.failed for use in step.tool_calls if use.failed is not None]) for step in steps]


def tool_success(steps: Sequence[CallStep], _: float = 0.0) -> Scores:
    """Share of the call's tools that did not fail, of those whose end is known."""
    return [_share([not use.failed for use in step.tool_calls if use.failed is not None]) for step in steps]


def valid_arguments(steps: Sequence[CallStep], _: float = 0.0) -> Scores:
    """Share of the tool calls in the completion that name a tool of the prompt with arguments that fit its schema, of those
    of which that can be told."""
    judged = [[_is_valid(step, use) for use in step.tool_calls if use.asked] for step in steps]
    return [_share([valid for valid in ofone if valid is not None]) for ofone in judged]


def invalid_arguments(steps: Sequence[CallStep], _: float = 0.0) -> Scores:
    """Scores the complement of valid_arguments."""
    return [None if share is None else 1.0 - share for share in valid_arguments(steps)]


def retry(steps: Sequence[CallStep], _: float = 0.0) -> Scores:
    """Share of the call's tools that were asked for what had failed before, in the same words, in this attempt."""
    failed: set[tuple[str, str]] = set()
    scores: Scores = []
    for step in steps:
        scores.append(_share([use.key in failed for use in step.tool_calls]))
        failed |= {use.key for use in step.tool_calls if use.failed}
    return scores


def repeated_state(steps: Sequence[CallStep], _: float = 0.0) -> Scores:
    """1 where the agent was there before: the same prompt, or the same new messages and the same completion."""
    seen: dict[bytes, str] = {}
    scores: Scores = []
    for step in steps:
        request = step.call.id.partition(".")[0]  # the n completions to one prompt are not repetitions of each other
        keys = _states(step)
        scores.append(float(any(seen.get(key, request) != request for key in keys)))
        for key in keys:
            seen.setdefault(key, request)
    return scores


def truncated(steps: Sequence[CallStep], _: float = 0.0) -> Scores:
    """1 where the completion was cut at its limit of tokens."""
    return [float(step.call.finish_reason == "length") for step in steps]


def latency(steps: Sequence[CallStep], budget: float) -> Scores:
    """By how much of the budget the time from the completion to the conversation's next call was above it; 1 at most."""
    return [None if step.seconds is None else _over(step.seconds, budget) for step in steps]


def tokens(steps: Sequence[CallStep], budget: float) -> Scores:
    """By how much of the budget the completion's tokens were above it; 1 at most."""
    return [_over(step.sampled_tokens, budget) for step in steps]


def calls(steps: Sequence[CallStep], budget: float) -> Scores:
    """1 for each call after the first `budget` ones."""
    return [float(number >= budget) for number in range(len(steps))]


BUILT_IN: Mapping[str, BuiltIn] = MappingProxyType(
    {
        "tool_error": BuiltIn(tool_error, penalty=True),
        "tool_success": BuiltIn(tool_success, penalty=False),
        "valid_arguments": BuiltIn(valid_arguments, penalty=False),
        "invalid_arguments": BuiltIn(invalid_arguments, penalty=True),
        "retry": BuiltIn(retry, penalty=True),
        "repeated_state": BuiltIn(repeated_state, penalty=True),
        "truncated": BuiltIn(truncated, penalty=True),
        "latency": BuiltIn(latency, penalty=True, budget="seconds between an answer and the next call"),
        "tokens": BuiltIn(tokens, penalty=True, budget="tokens of an answer"),
        "calls": BuiltIn(calls, penalty=True, budget="calls of a rollout"),
    }
)
"""By name."""


def fits(value: Any, schema: Any) -> bool:
    """Returns whether `value` is valid under `schema`; everything is under one that is malformed or refers elsewhere.

    >>> fits({"city": "Oslo"}, {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
    True
    >>> fits({"town": "Oslo"}, {"type": "object", "properties": {}, "additionalProperties": False})
    False
    """
    import jsonschema_rs

    try:
        validator = jsonschema_rs.validator_for(schema, retriever=_refuse)
        return validator.is_valid(value)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError, TypeError):
        return True


def _refuse(uri: str) -> Any:
    raise ValueError(f"{uri} is not part of the schema")


def _share(said: Sequence[bool]) -> float | None:
    return sum(said) / len(said) if said else None


def _over(value: float, budget: float) -> float:
    return min(1.0, max(0.0, value / budget - 1.0))


def _is_valid(step: CallStep, use: ToolExecution) -> bool | None:
    """None: the prompt's tools are not recorded, and nothing else is wrong."""
    try:
        arguments = orjson.loads(use.arguments or "{}")  # a tool without parameters is often called with nothing
    except orjson.JSONDecodeError:
        return False
    if not isinstance(arguments, dict):
        return False
    if not step.tools:
        return None
    for tool in step.tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == use.name:
            return fits(arguments, function.get("parameters", True))
    return False


def _states(step: CallStep) -> list[bytes]:
    call = step.call
    news = [[message.get("role"), content_text(message.get("content"))] for message in call.messages]
    asked = [(name, canonical(arguments)) for _, name, arguments in parse_tool_calls(call.completion)]
    states: list[list[object]] = [["turn", call.agent, news, content_text(call.completion.get("content")), asked]]
    if call.request_hash:
        states.append(["prompt", call.agent, call.policy, call.request_hash])
    return [blake2b(orjson.dumps(state), digest_size=16).digest() for state in states]
