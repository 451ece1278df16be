from __future__ import annotations

from dataclasses import replace

import pytest
from attempts import SECOND, Conversation, tool, tool_span, user

from agentlightning.tracing.steps import MOST_ANCESTORS, says_error, steps

OSLO = '{"city": "Oslo"}'


def asked() -> Conversation:
    """Two tools asked for in one call, one of which fails."""
    attempt = Conversation()
    attempt.call(user("?"), asks=[("a", "weather", OSLO), ("b", "weather", '{"city": "Atlantis"}')])
    return attempt


def ends(attempt: Conversation, *spans: object, **settings: object) -> list[list[tuple[str, bool | None]]]:
    """By call: each tool and whether it failed."""
    found = steps(attempt.calls, spans, **settings)  # type: ignore[arg-type]
    return [[(use.name, use.failed) for use in step.uses] for step in found]


def test_what_a_tool_gave_stands_in_the_next_calls_messages() -> None:
    attempt = asked()
    attempt.call(tool("b", "ValueError: no such city"), tool("a", "sunny"), text="Sunny.")
    assert ends(attempt) == [[("weather", False), ("weather", True)], []]


def test_a_tool_of_which_nothing_is_heard_neither_failed_nor_succeeded() -> None:
    assert ends(asked()) == [[("weather", None), ("weather", None)]]


def test_a_protocols_own_mark_of_failure_counts() -> None:
    attempt = asked()
    attempt.call(tool("a", "no", is_error=True), text="Hm.")
    assert ends(attempt)[0][0] == ("weather", True)


def test_a_span_and_a_message_of_one_tool_are_one_use() -> None:
    attempt = asked()
    attempt.call(tool("a", "sunny"), tool("b", "ValueError: no such city"), text="Sunny.")
    spans = [
        tool_span("weather", 2.1, number=1, call_id="a", call_result="sunny"),
        tool_span("weather", 2.2, number=2, call_id="b", failed=True),
    ]
    assert ends(attempt, *spans) == ends(attempt)


def test_a_failure_that_only_the_span_tells_counts() -> None:
    attempt = asked()
    attempt.call(tool("a", "nothing found"), tool("b", "sunny"), text="Sunny.")
    assert ends(attempt, tool_span("weather", 2.1, call_id="a", failed=True))[0] == [
        ("weather", True),
        ("weather", False),
    ]


def test_a_span_without_an_id_is_known_by_what_was_asked() -> None:
    attempt = asked()
    span = tool_span("weather", 2.1, failed=True, call_arguments='{"city":"Atlantis"}')
    assert ends(attempt, span)[0] == [("weather", None), ("weather", True)]


def test_a_tool_that_only_a_span_tells_of_belongs_to_the_call_before_it() -> None:
    attempt = Conversation()
    attempt.call(user("?"), text="select 1")
    attempt.call(user("again"), text="select 2")
    assert ends(attempt, tool_span("sql", 2.5, failed=True)) == [[("sql", True)], []]
    assert ends(attempt, tool_span("sql", 5.5, failed=True)) == [[], [("sql", True)]]


def test_a_tool_before_the_first_call_belongs_to_nobody() -> None:
    attempt = Conversation()
    attempt.call(user("?"), text="hello")
    assert ends(attempt, tool_span("sql", 0.5)) == [[]]


def test_of_agents_that_work_side_by_side_the_one_in_the_same_part_of_the_trace_led_to_the_tool() -> None:
    attempt = Conversation()
    attempt.call(user("left"), text="left", span_id="left")
    attempt.call(user("right"), text="right", parent=None, span_id="right")
    within = tool_span("sql", 9, number=1, parent_id="left")
    assert ends(attempt, within) == [[("sql", False)], []]


def test_a_cycle_of_spans_ends() -> None:
    attempt = Conversation()
    attempt.call(user("?"), text="select 1", span_id="elsewhere")
    one, other = tool_span("sql", 3, number=1), tool_span("sql2", 3, number=2)
    cycle = [replace(one, parent_id=other.id), replace(other, parent_id=one.id)]
    assert ends(attempt, *cycle) == [[("sql", False), ("sql2", False)]]


def test_a_chain_of_spans_is_followed_only_so_far() -> None:
    attempt = Conversation()
    attempt.call(user("left"), text="left", span_id="0")
    attempt.call(user("right"), text="right", parent=None, span_id="elsewhere")
    for depth, owner in ((MOST_ANCESTORS - 10, 0), (MOST_ANCESTORS + 10, 1)):
        chain = [
            replace(tool_span("node", 0), id=str(at), parent_id=str(at - 1), attributes={}) for at in range(1, depth)
        ]
        found = ends(attempt, *chain, tool_span("sql", 9, parent_id=str(depth - 1)))
        assert found[owner] == [("sql", False)]


def test_two_instrumentations_of_one_tool_are_one_use() -> None:
    attempt = Conversation()
    attempt.call(user("?"), text="select 1")
    outer, inner = tool_span("sql", 3, number=1), tool_span("sql", 3.1, number=2)
    told_more = tool_span("sql", 3.1, number=2, call_arguments="select 1", parent_id=outer.id)
    assert ends(attempt, outer, told_more) == [[("sql", False)]]
    assert ends(attempt, outer, inner) == [[("sql", False)]]
    assert ends(attempt, outer, tool_span("sql", 4, number=3)) == [[("sql", False), ("sql", False)]]


def test_a_history_that_is_sent_again_whole_counts_once() -> None:
    attempt = asked()
    attempt.call(tool("a", "sunny"), tool("b", "KeyError: x"), text="Sunny.")
    first = attempt.calls[0]
    again = [*first.messages, first.answer, tool("a", "Error: gone"), tool("b", "KeyError: x")]
    attempt.call(*again, text="So?", parent=None)
    assert ends(attempt)[0] == [("weather", False), ("weather", True)]


def test_a_result_is_found_in_a_history_that_could_not_be_continued() -> None:
    attempt = asked()
    first = attempt.calls[0]
    attempt.call(*first.messages, first.answer, tool("a", "sunny"), tool("b", "sunny"), text="So?", parent=None)
    assert ends(attempt)[0] == [("weather", False), ("weather", False)]


def test_a_users_reply_is_a_tools_only_where_the_settings_say_so() -> None:
    attempt = Conversation()
    attempt.call(user("?"), text="select 1")
    attempt.call(user("error: no such table"), text="select 2")
    attempt.call(user("42"), text="Answer: 42")
    assert ends(attempt) == [[], [], []]
    assert ends(attempt, user_replies=True) == [[("", True)], [("", False)], []]


def test_an_abandoned_call_led_to_nothing() -> None:
    attempt = asked()
    attempt.calls[0] = replace(attempt.calls[0], finish_reason="abandoned")
    assert ends(attempt) == []


def test_the_order_of_spans_means_nothing() -> None:
    attempt = asked()
    spans = [tool_span("weather", 2.1 + at / 10, number=at, failed=at % 2 == 0) for at in range(4)]
    assert ends(attempt, *spans) == ends(attempt, *reversed(spans))


def test_seconds_are_from_the_answer_to_the_next_call_of_the_conversation() -> None:
    attempt = asked()
    attempt.call(user("aside"), text="an aside", parent=None)
    attempt.call(tool("a", "sunny"), text="Sunny.", parent="call-0")
    assert [step.seconds for step in steps(attempt.calls)] == [5.0, None, None]


def test_a_clock_that_runs_backwards_takes_no_time() -> None:
    attempt = asked()
    attempt.call(tool("a", "sunny"), text="Sunny.", started_ns=SECOND)
    assert steps(attempt.calls)[0].seconds == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "Error: x",
        "error",
        "sqlite3.OperationalError: no such column",
        "Exception('x')",
        "Traceback (most recent call last):\n  …",
        "An error occurred while running the tool. Please try again. Error: x",
        "Error executing tool x: y",
        "Tool 'nope' not found",
        '{"error": "no such city"}',
        '{"isError": true, "content": []}',
        '{"success": false}',
    ],
)
def test_errors_as_frameworks_write_them(text: str) -> None:
    assert says_error(text)


@pytest.mark.parametrize(
    "text",
    ["", "sunny", "Errors: 0", "Error rates fell", '{"error": null}', '{"errors": 3}', "no errors", "[1, 2]", "{"],
)
def test_texts_that_only_speak_of_errors_are_none(text: str) -> None:
    assert not says_error(text)
