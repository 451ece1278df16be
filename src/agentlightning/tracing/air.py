"""AIR: automatic intermediate rewards, judged by declarative rules over the record of one attempt.

A worker drives it when an attempt ends (`runner.air`). The same calls
and spans give the same rewards with the same ids, in whatever order spans came and however often it is asked. Pure: knows no
store and no clock, and of a user's own rules only the functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.adapters.trajectories import JUDGE
from agentlightning.config.air import AirConfig, AirRuleConfig
from agentlightning.errors import AgentError, ConfigError, RewardError, boundary
from agentlightning.records import Call, Reward, Span
from agentlightning.store.rules import reward_number
from agentlightning.tracing.agent_names import name_calls
from agentlightning.tracing.rules import BUILT_IN, Scores
from agentlightning.tracing.tool_uses import CallStep, call_steps

PREFIX = "air."
"""A rule's rewards have its name after this."""
MAX_RULE_REWARD = 1.0
"""The rewards of one rule over a rollout stay within ± this, whatever the number of calls."""

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
        id=f"{call.id}.{PREFIX}{name}",
        run_id=call.run_id,
        rollout_id=call.rollout_id,
        attempt=call.attempt,
        value=value,
        name=f"{PREFIX}{name}",
        call_id=call.id,
        source="air",
        created_ns=call.finished_ns,
    )


def _number(said: Any, name: str) -> float:
    try:
        return reward_number(said)
    except RewardError:
        raise AgentError(f"air.rules.{name}: expected a finite number or None, got {said!r:.80}") from None
