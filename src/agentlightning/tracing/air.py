"""AIR: automatic intermediate rewards, judged by declarative rules over the record of one attempt.

A worker drives it when an attempt ends (`runner.air`). The same calls and spans give the same rewards with the same ids, in
whatever order spans came. A rule gives each call a number from 0 to 1, or None where it has nothing to say (no tool was
called), which earns nothing, as 0 does. Pure: of a user's own rules it knows only the functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import orjson

from agentlightning.adapters.trajectories import JUDGE
from agentlightning.config.agent import AirConfig, AirRuleConfig
from agentlightning.errors import AgentError, ConfigError, RewardError, boundary
from agentlightning.records import Call, Reward, Span
from agentlightning.runtime import json_text
from agentlightning.store.rules import AIR_PREFIX, reward_number
from agentlightning.tracing.tool_uses import (
    CallStep,
    ToolExecution,
    call_steps,
    canonical,
    content_text,
    name_calls,
    parse_tool_calls,
)

MAX_RULE_REWARD = 1.0
"""The rewards of one rule over a rollout stay within ± this, whatever the number of calls."""

Scores = list[float | None]
"""One for each step."""
CustomRule = Callable[[CallStep, Sequence[CallStep]], Any]
"""(step, the attempt's earlier steps) -> a number, which the weight multiplies; None where it has nothing to say."""


@dataclass(frozen=True, slots=True)
class Air:
    """The rules of a run. Make it with `air_of`."""

    config: AirConfig
    own: Mapping[str, CustomRule]
    """The functions of the rules that have one, by the rule's name."""
    pattern: re.Pattern[str] | None = None

    def rewards(self, calls: Sequence[Call], spans: Iterable[Span] = ()) -> list[Reward]:
        """The rewards that the calls of one attempt earned, by rule and call; a call that earned nothing has none.

        calls: in the order they finished; those of a judge are none of the agent's, and one without an agent has the one
        that its span is within. AgentError, which names the rule, where one of the user's own raises or gives something
        else than a finite number.
        """
        spans = list(spans)
        calls = name_calls([call for call in calls if call.agent != JUDGE], spans)

        def found() -> list[CallStep]:
            in_text = self.pattern is not None
            return call_steps(calls, spans, user_replies=in_text, error_pattern=self.pattern)

        shared = found()
        rewards: list[Reward] = []
        for name, rule in self.config.rules.items():
            # what a rule of the user's own does to its steps must not change what others see
            rewards += self._of_rule(name, rule, found() if name in self.own else shared)
        return rewards

    def _of_rule(self, name: str, rule: AirRuleConfig, found: Sequence[CallStep]) -> list[Reward]:
        rewards, total = [], 0.0
        for step, score in zip(found, self._scores(name, rule, found), strict=True):
            if not score:
                continue
            after = max(-MAX_RULE_REWARD, min(MAX_RULE_REWARD, total + rule.weight * score))
            if after != total:
                rewards.append(_reward(step.call, name, after - total))
            total = after
        return rewards

    def _scores(self, name: str, rule: AirRuleConfig, found: Sequence[CallStep]) -> Scores:
        if name not in self.own:
            return BUILT_IN[name].score(found, rule.budget or 0.0)
        scores: Scores = []
        for place, step in enumerate(found):
            with boundary(f"air.rules.{name}"):
                said = self.own[name](step, found[:place])
            scores.append(None if said is None else _number(said, name))
        return scores


def air_of(config: AirConfig, load: Callable[[str], CustomRule]) -> Air | None:
    """The rules of a configuration; None where it has none. `load` finds a rule of the user's own.

    ConfigError where a name is unknown, a budget is missing or has no effect, or a weight is 0.
    """
    if not config.rules:
        return None
    own = {}
    for name, rule in config.rules.items():
        _check(name, rule)
        if rule.run is not None:
            own[name] = load(rule.run)
    pattern = None if config.text_tool_error is None else re.compile(config.text_tool_error)
    return Air(config, own, pattern)


def _check(name: str, rule: AirRuleConfig) -> None:
    where = f"air.rules.{name}"
    if rule.weight == 0:
        raise ConfigError(f"{where}.weight: expected a number other than 0; leave the rule out")
    known = BUILT_IN.get(name)
    if rule.run is not None:
        if known is not None:
            raise ConfigError(f"{where}.run: {name!r} is a rule of the system's; give your own another name")
        if rule.budget is not None:
            raise ConfigError(f"{where}.budget: has no effect on a rule of your own")
        return
    if known is None:
        raise ConfigError(
            f"{where}: no such rule; expected one of {', '.join(BUILT_IN)}, or run = 'file.py:name' for one of your own"
        )
    if known.budget is not None and rule.budget is None:
        raise ConfigError(f"{where}.budget: is required; expected a number of {known.budget}")
    if known.budget is None and rule.budget is not None:
        having = ", ".join(one for one, rule_of in BUILT_IN.items() if rule_of.budget)
        raise ConfigError(f"{where}.budget: has no effect on {name}; rules with a budget: {having}")
    if known.penalty == (rule.weight > 0):
        expected = "below" if known.penalty else "above"
        raise ConfigError(f"{where}.weight: expected a number {expected} 0 for {name}, got {rule.weight:g}")


def _reward(call: Call, name: str, value: float) -> Reward:
    return Reward(
        id=f"{call.id}.{AIR_PREFIX}{name}",
        run_id=call.run_id,
        rollout_id=call.rollout_id,
        attempt=call.attempt,
        value=value,
        name=f"{AIR_PREFIX}{name}",
        call_id=call.id,
        source="air",
        created_ns=call.finished_ns,
    )


def _number(said: Any, name: str) -> float:
    try:
        return reward_number(said)
    except RewardError:
        raise AgentError(f"air.rules.{name}: expected a finite number or None, got {said!r:.80}") from None


# --- built-in rules ---------------------------------------------------------------------------------------------------


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
    return [_share([valid for valid in one if valid is not None]) for one in judged]


def invalid_arguments(steps: Sequence[CallStep], _: float = 0.0) -> Scores:
    """Scores the complement of valid_arguments."""
    return [None if share is None else 1.0 - share for share in valid_arguments(steps)]


def retry(steps: Sequence[CallStep], _: float = 0.0) -> Scores:
    """Share of the call's tools that were asked for what had failed before, in the same words, in this attempt. Uses that
    spans alone tell of do not dilute it."""
    failed: set[tuple[str, str]] = set()
    scores: Scores = []
    for step in steps:
        scores.append(_share([use.key in failed for use in step.tool_calls if use.key in failed or not use.only_told]))
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
    """True where `value` is valid under `schema`; everything is under one that is malformed or refers elsewhere.

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
        arguments = json_text.loads(use.arguments or "{}")  # a tool without parameters is often called with nothing
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
