from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from attempts import SECOND, Conversation, tool, tool_span, user

from agentlightning.tracing.air import BUILT_IN
from agentlightning.tracing.tool_uses import call_steps

OSLO = '{"city": "Oslo"}'


def scores(rule: str, attempt: Conversation, *spans: Any, budget: float = 0.0, **settings: Any) -> list[float | None]:
    return BUILT_IN[rule].score(call_steps(attempt.calls, spans, **settings), budget)


def answered(*results: str) -> Conversation:
    """One call that asks for as many tools as there are results, and one that reads them."""
    attempt = Conversation()
    attempt.call(user("?"), asks=[(str(at), "weather", OSLO) for at in range(len(results))])
    attempt.call(*(tool(str(at), text) for at, text in enumerate(results)), text="Done.")
    return attempt


def test_errors_and_successes_are_shares_of_the_tools_whose_end_is_known() -> None:
    attempt = Conversation()
    attempt.call(user("?"), asks=[("a", "weather", OSLO), ("b", "weather", OSLO), ("c", "weather", OSLO)])
    attempt.call(tool("a", "Error: no"), tool("b", "sunny"), text="Hm.")
    assert scores("tool_error", attempt) == [0.5, None]
    assert scores("tool_success", attempt) == [0.5, None]
    none = re.compile("^s.*y$")
    assert scores("tool_error", answered("Error: no", "sunny"), error_pattern=none) == [0.5, None]


@pytest.mark.parametrize(
    ("name", "arguments", "share"),
    [
        ("weather", OSLO, 1.0),
        ("weather", '{"city": "Oslo", "days": 0}', 0.0),
        ("weather", '{"city": "Os', 0.0),
        ("weather", "", 0.0),
        ("forecast", OSLO, 0.0),
    ],
)
def test_arguments_are_checked_against_the_tools_of_the_prompt(name: str, arguments: str, share: float) -> None:
    attempt = Conversation()
    attempt.call(user("?"), asks=[("a", name, arguments)])
    assert scores("valid_arguments", attempt) == [share]
    assert scores("invalid_arguments", attempt) == [1.0 - share]


def test_arguments_for_tools_that_say_or_are_nothing_can_only_be_no_object() -> None:
    attempt = Conversation()
    here = {"name": "here", "parameters": {"type": "object", "properties": {}}}
    tools: list[Any] = [{"type": "function", "function": one} for one in ({"name": "now"}, here)]
    attempt.call(user("?"), asks=[("a", "now", ""), ("b", "here", ""), ("c", "here", "{}")], tools=tools)
    attempt.call(user("?"), asks=[("a", "weather", OSLO)], tools=None, parent=None)  # they are not recorded
    attempt.call(user("?"), asks=[("b", "weather", OSLO), ("c", "weather", "{")], parent=None, tools=[])
    assert scores("valid_arguments", attempt) == [1.0, None, 0.0]
    assert scores("calls", attempt, budget=2) == [0.0, 0.0, 1.0]


def test_asking_again_for_what_failed_is_a_retry_and_asking_for_something_else_is_none() -> None:
    attempt = Conversation()
    attempt.call(user("?"), asks=[("a", "weather", '{"city": "Atlantis"}')])
    attempt.call(tool("a", "Error: no"), asks=[("b", "weather", '{"city":"Atlantis"}'), ("c", "weather", OSLO)])
    attempt.call(tool("b", "Error: no"), tool("c", "sunny"), asks=[("d", "weather", OSLO)])
    assert scores("retry", attempt) == [0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    "other",
    [
        {"news": tool("a", "busy"), "asks": [("b", "weather", "{}")]},
        {"news": tool("a", "busy"), "asks": [("b", "weather", OSLO)], "text": "Once more."},
        {"news": tool("a", "Busy"), "asks": [("b", "weather", OSLO)]},
        {"news": user("busy"), "asks": [("b", "weather", OSLO)]},
    ],
)
def test_other_news_another_text_or_another_question_repeats_nothing(other: dict[str, Any]) -> None:
    attempt = Conversation()
    attempt.call(user("?"), text="Hm.", request_hash="")  # hashes that are not known are not equal
    attempt.call(tool("a", "busy"), asks=[("a", "weather", OSLO)], request_hash="")
    attempt.call(other.pop("news"), **other, request_hash="")
    assert scores("repeated_state", attempt) == [0.0, 0.0, 0.0]


def test_the_same_news_and_the_same_answer_are_a_repeated_state() -> None:
    attempt = Conversation()
    attempt.call(user("?"), asks=[("a", "weather", OSLO)])
    attempt.call(tool("a", "busy"), asks=[("b", "weather", OSLO)])
    attempt.call(tool("b", "busy"), asks=[("c", "weather", '{"city":"Oslo"}')])
    attempt.call(tool("c", "sunny"), text="Sunny.")
    assert scores("repeated_state", attempt) == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("first", "second", "score"),
    [
        ({}, {"text": "two"}, 1.0),  # the same prompt, whatever is answered
        ({"id": "call"}, {"id": "call.1"}, 0.0),  # several answers to one prompt
        ({"agent": "writer"}, {"agent": "checker"}, 0.0),
    ],
)
def test_the_same_prompt_again_is_a_repeated_state_of_one_agent(
    first: dict[str, str], second: dict[str, str], score: float
) -> None:
    attempt = Conversation()
    attempt.call(user("?"), request_hash="same", **{"text": "one", **first})  # type: ignore[arg-type]
    attempt.call(user("?"), parent=None, request_hash="same", **{"text": "one", **second})  # type: ignore[arg-type]
    assert scores("repeated_state", attempt) == [0.0, score]


def test_an_answer_that_was_cut_is_truncated() -> None:
    attempt = answered("sunny")
    attempt.calls[0] = replace(attempt.calls[0], finish_reason="tool_calls")
    attempt.calls[1] = replace(attempt.calls[1], finish_reason="length")
    assert scores("truncated", attempt) == [0.0, 1.0]


def test_tokens_are_those_of_the_answer_or_what_an_external_model_says() -> None:
    attempt = Conversation()
    attempt.call(user("?"), text="a", sampled_ids=[1] * 5)
    attempt.call(user("?"), text="b", sampled_ids=[], logprobs=[], policy="", usage={"sampled_tokens": 6})
    assert scores("tokens", attempt, budget=4) == [0.25, 0.5]


@pytest.mark.parametrize(("tokens", "score"), [(0, 0.0), (3, 0.0), (4, 0.0), (5, 0.25), (8, 1.0), (9, 1.0)])
def test_a_budget_costs_nothing_up_to_and_with_its_last_token_and_all_at_twice_of_it(tokens: int, score: float) -> None:
    attempt = Conversation()
    attempt.call(user("?"), text="a", sampled_ids=[1] * tokens, logprobs=[-1.0] * tokens)
    assert scores("tokens", attempt, budget=4) == [score]
    waited = Conversation()
    waited.call(user("?"), text="a")  # ends at 2 s
    waited.call(user("more"), text="b", started_ns=(2 + tokens) * SECOND, finished_ns=20 * SECOND)
    assert scores("latency", waited, budget=4) == [score, None]


def test_failures_of_which_spans_tell_alone_count_for_the_rules() -> None:
    attempt = Conversation()
    attempt.call(user("?"), text="select 1")
    attempt.call(user("?"), text="select 1")
    spans = [tool_span("sql", at, number=at, failed=True, call_arguments="select 1") for at in (3, 6)]
    assert scores("tool_error", attempt, *spans) == [1.0, 1.0]
    assert scores("retry", attempt, *spans) == [None, 1.0]
    assert scores("valid_arguments", attempt, *spans) == [None, None]
