from __future__ import annotations

from dataclasses import replace

import pytest
from attempts import Conversation, tool, tool_span, user

from agentlightning.tracing.tool_uses import call_steps, says_error

OSLO = '{"city": "Oslo"}'


def asked() -> Conversation:
    """Two tools asked for in one call, one of which fails."""
    attempt = Conversation()
    attempt.call(user("?"), asks=[("a", "weather", OSLO), ("b", "weather", '{"city": "Atlantis"}')])
    return attempt


def ends(attempt: Conversation, *spans: object, **settings: object) -> list[list[tuple[str, bool | None]]]:
    """By call: each tool and whether it failed."""
    found = call_steps(attempt.calls, spans, **settings)  # type: ignore[arg-type]
    return [[(use.name, use.failed) for use in step.tool_calls] for step in found]


def test_what_a_tool_gave_stands_in_the_next_calls_messages() -> None:
    attempt = asked()
    attempt.call(tool("b", "ValueError: no such city"), tool("a", "sunny"), text="Sunny.")
    assert ends(attempt) == [[("weather", False), ("weather", True)], []]
    marked = asked()
    marked.call(tool("a", "no", is_error=True), text="Hm.")  # by the protocol's own mark
    assert ends(marked)[0][0] == ("weather", True)
    marked.calls[0] = replace(marked.calls[0], finish_reason="abandoned")
    assert ends(marked) == [[]]


def test_a_span_and_a_message_of_one_tool_are_one_use() -> None:
    attempt = asked()
    attempt.call(tool("a", "sunny"), tool("b", "ValueError: no such city"), text="Sunny.")
    spans = [
        tool_span("weather", 2.1, number=1, call_id="a", call_result="sunny"),
        tool_span("weather", 2.2, number=2, call_id="b", failed=True),
    ]
    assert ends(attempt, *spans) == ends(attempt, *reversed(spans)) == ends(attempt)
    alone = tool_span("weather", 2.1, call_id="a", failed=True)  # the span alone tells of the failure
    assert ends(attempt, alone)[0][0] == ("weather", True)
    told = [tool_span("weather", 2.1, number=at, call_id=one, call_result="rain") for at, one in enumerate("abc")]
    uses = call_steps(attempt.calls, told)[0].tool_calls
    assert [use.result for use in uses] == ["sunny", "ValueError: no such city", "rain"]


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


def test_of_agents_that_work_side_by_side_the_one_in_the_same_part_of_the_trace_led_to_the_tool() -> None:
    attempt = Conversation()
    attempt.call(user("left"), text="left", span_id="left")
    attempt.call(user("right"), text="right", parent=None, span_id="right")
    within = tool_span("sql", 9, number=1, parent_id="left")
    assert ends(attempt, within) == [[("sql", None)], []]


def test_two_instrumentations_of_one_tool_are_one_use() -> None:
    attempt = Conversation()
    attempt.call(user("?"), text="select 1")
    outer = tool_span("sql", 3, number=1)
    told_more = tool_span("sql", 3.1, number=2, call_arguments="select 1", parent_id=outer.id)
    assert ends(attempt, outer, told_more) == [[("sql", None)]]
    assert ends(attempt, outer, tool_span("sql", 4, number=3)) == [[("sql", None), ("sql", None)]]
    one, other = tool_span("sql", 3, number=1), tool_span("sql2", 3, number=2)
    cycle = [replace(one, parent_id=other.id), replace(other, parent_id=one.id)]
    assert ends(attempt, *cycle) == [[("sql", None), ("sql2", None)]]


def test_a_history_that_is_sent_again_whole_counts_once() -> None:
    attempt = asked()
    attempt.call(tool("a", "sunny"), tool("b", "KeyError: x"), text="Sunny.")
    first = attempt.calls[0]
    again = [*first.messages, first.completion, tool("a", "Error: gone"), tool("b", "KeyError: x")]
    attempt.call(*again, text="So?", parent=None)
    assert ends(attempt)[0] == [("weather", False), ("weather", True)]


def test_ids_that_are_empty_are_none_and_results_come_in_the_order_of_the_questions_unless_they_are_named() -> None:
    attempt = Conversation()
    attempt.call(user("?"), asks=[("", "weather", OSLO), ("", "clock", "{}"), ("", "map", "{}")])
    attempt.call(tool("", "Error: no", name="clock"), tool("", "sunny"), tool("", "Error: no"), text="Hm.")
    assert ends(attempt)[0] == [("weather", False), ("clock", True), ("map", True)]


def test_ids_that_each_answer_begins_anew_mean_the_answer_before() -> None:
    attempt = Conversation()
    for result in ("?", "Error: no", "sunny"):
        attempt.call(user("?") if result == "?" else tool("call_0", result), asks=[("call_0", "weather", OSLO)])
    assert ends(attempt) == [[("weather", True)], [("weather", False)], [("weather", None)]]
    late = tool_span("weather", 5.1, call_id="call_0", failed=True)
    assert ends(attempt, late) == [[("weather", True)], [("weather", True)], [("weather", None)]]


def test_a_result_is_of_no_call_that_came_after_it() -> None:
    attempt = Conversation()
    attempt.call(tool("b", "Error: of another attempt"), text="Hm.")
    attempt.call(user("?"), asks=[("b", "weather", OSLO)])
    assert ends(attempt) == [[], [("weather", None)]]


def test_a_users_reply_is_a_tools_only_where_the_settings_say_so() -> None:
    attempt = Conversation()
    attempt.call(user("?"), text="select 1")
    attempt.call(user("error: no such table"), text="select 2")
    attempt.call(user("42"), text="Answer: 42")
    assert ends(attempt) == [[], [], []]
    assert ends(attempt, user_replies=True) == [[("", True)], [("", False)], []]


def test_a_tool_that_is_an_agent_may_call_itself() -> None:
    attempt = Conversation()
    outer = tool_span("delegate", 2.5, number=1)
    attempt.call(user("?"), asks=[("a", "delegate", "{}")])
    attempt.call(user("part"), asks=[("b", "delegate", '{"part": 1}')], parent=None, span_id=outer.id)
    by_id = tool_span("delegate", 5.5, number=2, call_id="b", failed=True, parent_id=outer.id)
    assert ends(attempt, replace(outer, attributes={**outer.attributes, "gen_ai.tool.call.id": "a"}), by_id) == [
        [("delegate", None)],
        [("delegate", True)],
    ]
    without = tool_span("delegate", 5.5, number=2, failed=True, parent_id=outer.id)
    assert ends(attempt, outer, without) == [[("delegate", None)], [("delegate", True)]]


def test_seconds_are_from_the_answer_to_the_next_call_of_the_conversation() -> None:
    attempt = asked()
    attempt.call(user("aside"), text="an aside", parent=None)
    attempt.call(tool("a", "sunny"), text="Sunny.", parent="call-0")
    assert [step.seconds for step in call_steps(attempt.calls)] == [5.0, None, None]


@pytest.mark.parametrize(
    "text",
    [
        *("Error: x", "sqlite3.OperationalError: no such column", "Exception('x')", "CUSTOM.Error(3)"),
        *("Traceback (most recent call last):\n  …", "Error executing tool x: y", "Tool 'nope' not found"),
        *("Function nope does not exist.", "Unknown tool name: 'nope'.", "1 validation error for search\nquery"),
        *(
            '{"error": "no such city"}',
            '{"isError": true, "content": []}',
            '{"success": false}',
            ' {"status": "error"}',
        ),
    ],
)
def test_errors_as_frameworks_write_them(text: str) -> None:
    assert says_error(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "sunny", "Errors: 0", "Error rates fell", "Tool use in the wild: the index was not found", "{", "[1, 2]"),
        *('{"error": null}', '{"error": "", "success": true, "status": "ok"}', '{"errors": 3}', "no errors"),
    ],
)
def test_texts_that_only_speak_of_errors_are_none(text: str) -> None:
    assert not says_error(text)
