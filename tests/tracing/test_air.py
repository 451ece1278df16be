from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attempts import Conversation, tool, tool_span, user
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.config.agent import AirConfig
from agentlightning.config.base import parse_settings
from agentlightning.errors import AgentError, ConfigError
from agentlightning.records import Reward
from agentlightning.tracing.air import Air, CustomRule, air_of

OSLO = '{"city": "Oslo"}'


def air(rules: dict[str, Any], own: CustomRule | None = None, **table: Any) -> Air:
    def load(spec: str) -> CustomRule:
        assert own is not None, spec
        return own

    made = air_of(parse_settings(AirConfig, {"rules": rules, **table}, "air"), load)
    assert made is not None
    return made


def values(rewards: list[Reward]) -> dict[str, float]:
    """By rule and call."""
    return {f"{reward.name} {reward.call_id}": reward.value for reward in rewards}


def loop(errors: int) -> Conversation:
    """As many calls whose tool fails, and one that ends it."""
    attempt = Conversation()
    news = user("?")
    for at in range(errors):
        attempt.call(news, asks=[(str(at), "weather", OSLO)])
        news = tool(str(at), "Error: no")
    attempt.call(news, text="I give up.")
    return attempt


def test_a_rule_gives_each_call_its_weight_times_its_score() -> None:
    attempt = Conversation()
    attempt.call(user("?"), asks=[("a", "weather", OSLO), ("b", "weather", "{}")])
    attempt.call(tool("a", "sunny"), tool("b", "Error: no city"), text="Sunny.")
    rules = {"tool_error": -0.2, "tool_success": {"weight": 0.1}, "invalid_arguments": -1}
    assert values(air(rules).rewards(attempt.calls)) == {
        "air.tool_error call-0": -0.1,
        "air.tool_success call-0": 0.05,
        "air.invalid_arguments call-0": -0.5,
    }


def test_a_rules_sum_over_a_rollout_stays_within_its_bound_and_may_come_back_from_it() -> None:
    """A rule of one's own sees the step and those before it."""

    def up_then_down(step: Any, earlier: Any) -> float | None:
        return (3.0 if len(earlier) == 0 else -1.0) if step.tool_calls else None

    rewards = air({"tool_error": -0.4}).rewards(loop(5).calls)
    assert [reward.value for reward in rewards] == pytest.approx([-0.4, -0.4, -0.2])
    rewards = air({"mine": {"run": "file.py:x", "weight": 0.5}}, up_then_down).rewards(loop(3).calls)
    assert [reward.value for reward in rewards] == [1.0, -0.5, -0.5]


def test_the_settings_of_a_table_reach_the_rules() -> None:
    attempt = Conversation()
    attempt.call(user("?"), text="select 1", sampled_ids=[1] * 6)
    attempt.call(user("it failed"), text="select 2", sampled_ids=[1] * 3)
    tokens = air({"tokens": {"weight": -0.5, "budget": 4}})
    assert values(tokens.rewards(attempt.calls)) == {"air.tokens call-0": -0.25}
    assert air({"tool_error": -1}).rewards(attempt.calls) == []
    told = air({"tool_error": -1}, text_tool_error="failed")
    assert values(told.rewards(attempt.calls)) == {"air.tool_error call-0": -1.0}
    assert air({"tool_error": -1}, text_tool_error="no such text").rewards(attempt.calls) == []


def test_a_judge_is_no_agent_and_a_reward_is_of_its_calls_attempt_and_time() -> None:
    attempt = loop(2)
    attempt.calls = [replace(call, attempt=3) for call in attempt.calls]
    attempt.call(user("?"), asks=[("x", "weather", OSLO)], parent=None, agent="agl.judge")
    attempt.call(tool("x", "Error: no"), text="It is bad.", agent="agl.judge")
    rewards = air({"tool_error": -0.2}).rewards(attempt.calls)
    assert [(reward.call_id, reward.attempt, reward.created_ns) for reward in rewards] == [
        (call.id, 3, call.finished_ns) for call in attempt.calls[:2]
    ]


def test_what_a_rule_of_ones_own_does_to_its_steps_no_other_rule_sees() -> None:
    def spoils(step: Any, earlier: Any) -> float:
        step.tool_calls.clear()
        return 0.0

    rules = {"mine": {"run": "file.py:x", "weight": 1.0}, "tool_error": -0.2}
    assert values(air(rules, spoils).rewards(loop(1).calls)) == {"air.tool_error call-0": -0.2}


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (lambda step, earlier: 1 / 0, r"air\.rules\.mine failed: ZeroDivisionError"),
        (lambda step, earlier: "much", r"air\.rules\.mine: expected a finite number or None, got 'much'"),
        (lambda step, earlier: 10**400, r"air\.rules\.mine: expected a finite number or None, got 1000"),
        (lambda step, earlier: np.array([1, 2]), r"air\.rules\.mine: expected a finite number or None, got array"),
        (lambda step, earlier: sys.exit(3), r"air\.rules\.mine failed: SystemExit: 3"),
    ],
)
def test_a_rule_of_ones_own_that_fails_is_named(own: CustomRule, sentence: str) -> None:
    with pytest.raises(AgentError, match=sentence):
        air({"mine": {"run": "file.py:x", "weight": 0.1}}, own).rewards(loop(1).calls)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"rules": {"tool_eror": -1}}, "air.rules.tool_eror: no such rule; expected one of tool_error"),
        ({"rules": {"tool_error": 0}}, "air.rules.tool_error.weight: expected a number other than 0"),
        *(
            ({"rules": {rule: 0.5}}, f"air.rules.{rule}.weight: expected a number below 0")
            for rule in ("tool_error", "invalid_arguments", "retry", "repeated_state", "truncated")
        ),
        *(
            ({"rules": {rule: {"weight": 0.5, "budget": 1}}}, f"air.rules.{rule}.weight: expected a number below 0")
            for rule in ("latency", "tokens", "calls")
        ),
        *(
            ({"rules": {rule: -0.5}}, f"air.rules.{rule}.weight: expected a number above 0")
            for rule in ("tool_success", "valid_arguments")
        ),
        ({"rules": {"tool_error": {"weight": -1, "budget": 3}}}, "budget: has no effect on tool_error"),
        ({"rules": {"latency": -1}}, "air.rules.latency.budget: is required; expected a number of seconds"),
        ({"rules": {"tool_error": {"weight": -1, "run": "a.py:b"}}}, "is a rule of the system's"),
        ({"rules": {"mine": {"weight": -1, "run": "a.py:b", "budget": 1}}}, "has no effect on a rule of your own"),
        ({"rules": {"tool_success": True}}, "tool_success: expected a weight, or a table with weight, got True"),
        ({"rules": {"a/b": -1}}, "rules: a/b: expected a name of small letters"),
        ({"rules": {"tool_error": {"wieght": -1}}}, "did you mean 'weight'"),
        ({"text_tool_error": "("}, "text_tool_error: expected a regular expression"),
    ],
)
def test_a_setting_that_is_wrong_or_ignored_is_an_error(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        air_of(parse_settings(AirConfig, table, "air"), lambda spec: lambda step, earlier: 0.0)
    assert sentence in str(raised.value)


# --- properties -----------------------------------------------------------------------------------------------------------

RULES: dict[str, Any] = {
    "tool_error": -0.3,
    "tool_success": 0.2,
    "invalid_arguments": -0.4,
    "retry": -0.25,
    "repeated_state": -0.5,
    "calls": {"weight": -0.1, "budget": 2},
    "latency": {"weight": -0.1, "budget": 0.5},
}
TEXTS = st.sampled_from(["sunny", "Error: no", '{"error": "x"}', ""])
ASKS = st.lists(
    st.tuples(st.sampled_from(["weather", "nope"]), st.sampled_from([OSLO, "{", '{"city": 1}'])), max_size=3
)


@st.composite
def attempts(draw: st.DrawFn) -> tuple[Conversation, list[Any]]:
    """A conversation, and a span for each tool that ran, which tells the same as the messages."""
    attempt, news = Conversation(), [user("?")]
    spans: list[Any] = []
    for at in range(draw(st.integers(1, 5))):
        asks = [(f"{at}.{place}", name, arguments) for place, (name, arguments) in enumerate(draw(ASKS))]
        attempt.call(*news, asks=asks, text=draw(st.sampled_from(["a", "b"])))
        news = [user("go on")]
        for ident, name, arguments in asks:
            text = draw(TEXTS)
            news.append(tool(ident, text))
            told = {"call_id": ident, "call_arguments": arguments, "call_result": text}
            spans.append(tool_span(name, 3 * at + 2.1, number=len(spans) + 1, **told))
    attempt.call(*news, text="done")
    return attempt, spans


@given(attempts())
@settings(max_examples=40, deadline=None)
def test_a_rules_sum_is_never_beyond_its_bound(drawn: tuple[Conversation, list[Any]]) -> None:
    judge = air(RULES)
    rewards = judge.rewards(drawn[0].calls, drawn[1])
    for name in judge.config.rules:
        assert abs(math.fsum(one.value for one in rewards if one.name == f"air.{name}")) <= 1.0 + 1e-9


@given(attempts(), st.randoms())
@settings(max_examples=40, deadline=None)
def test_what_messages_and_spans_both_tell_counts_once_in_whatever_order_spans_came(
    drawn: tuple[Conversation, list[Any]], rng: Any
) -> None:
    attempt, spans = drawn
    judge = air(RULES)
    assert judge.rewards(attempt.calls, rng.sample(spans, len(spans))) == judge.rewards(attempt.calls)


ANYTHING = st.none() | st.integers(-5, 5) | st.text(max_size=3) | st.lists(st.integers(), max_size=2)


KEYS = st.sampled_from(
    [f"gen_ai.{key}" for key in ("operation.name", "tool.name", "tool.call.id")] + ["input.value", "x"]
)


@given(
    attempts(),
    st.lists(
        st.tuples(
            st.dictionaries(KEYS, ANYTHING | st.sampled_from(["execute_tool", "0.0"])),
            st.integers(-(10**18), 10**18),
            st.integers(-(10**18), 10**18),
            st.integers(0, 4),
            st.none() | st.integers(0, 4),
        ),
        max_size=5,
    ),
)
@settings(max_examples=40, deadline=None)
def test_broken_spans_raise_nothing_and_leave_what_messages_tell(
    drawn: tuple[Conversation, list[Any]], broken: list[tuple[Any, int, int, int, int | None]]
) -> None:
    attempt, _ = drawn
    spans = [
        replace(
            tool_span("odd", 0, number=ident),
            attributes=attributes,
            started_ns=started,
            finished_ns=finished,
            parent_id=None if parent is None else f"rollout.1.{parent:016x}",
        )
        for attributes, started, finished, ident, parent in broken
    ]
    told = {"invalid_arguments": -0.4, "repeated_state": -0.5}
    assert air(told).rewards(attempt.calls, spans) == air(told).rewards(attempt.calls)
    air(RULES).rewards(attempt.calls, spans)
