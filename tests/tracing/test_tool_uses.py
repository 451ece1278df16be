from __future__ import annotations

from dataclasses import replace

import pytest
from attempts import SECOND, Conversation, tool, tool_span, user

from agentlightning.tracing.tool_uses import MAX_ANCESTORS, call_steps, says_error

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


def test_what_a_tool_gave_is_what_messages_say_and_else_what_its_span_says() -> None:
    attempt = asked()
    attempt.call(tool("a", "sunny"), text="Sunny.")
    spans = [tool_span("weather", 2.1, number=at, call_id=one, call_result="rain") for at, one in enumerate("ab")]
    assert [use.result for use in call_steps(attempt.calls, spans)[0].tool_calls] == ["sunny", "rain"]


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
    for depth, owner in ((MAX_ANCESTORS - 10, 0), (MAX_ANCESTORS + 10, 1)):
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
    again = [*first.messages, first.completion, tool("a", "Error: gone"), tool("b", "KeyError: x")]
    attempt.call(*again, text="So?", parent=None)
    assert ends(attempt)[0] == [("weather", False), ("weather", True)]


def test_a_result_is_found_in_a_history_that_could_not_be_continued() -> None:
    attempt = asked()
    first = attempt.calls[0]
    attempt.call(*first.messages, first.completion, tool("a", "sunny"), tool("b", "sunny"), text="So?", parent=None)
    assert ends(attempt)[0] == [("weather", False), ("weather", False)]


def test_ids_that_are_empty_are_none_and_results_come_in_the_order_of_the_questions_unless_they_are_named() -> None:
    attempt = Conversation()
    attempt.call(user("?"), asks=[("", "weather", OSLO), ("", "clock", "{}"), ("", "map", "{}")])
    attempt.call(tool("", "Error: no", name="clock"), tool("", "sunny"), tool("", "Error: no"), text="Hm.")
    assert ends(attempt)[0] == [("weather", False), ("clock", True), ("map", True)]


def test_two_tools_of_one_answer_with_one_id_have_a_result_each() -> None:
    attempt = Conversation()
    attempt.call(user("?"), asks=[("a", "weather", OSLO), ("a", "clock", "{}")])
    attempt.call(tool("a", "sunny"), tool("a", "Error: no"), text="Hm.")
    assert ends(attempt)[0] == [("weather", False), ("clock", True)]


def test_ids_that_each_answer_begins_anew_mean_the_answer_before() -> None:
    attempt = Conversation()
    for result in ("?", "Error: no", "sunny"):
        attempt.call(user("?") if result == "?" else tool("call_0", result), asks=[("call_0", "weather", OSLO)])
    assert ends(attempt) == [[("weather", True)], [("weather", False)], [("weather", None)]]
    late = tool_span("weather", 5.1, call_id="call_0", failed=True)
    assert ends(attempt, late) == [[("weather", True)], [("weather", True)], [("weather", None)]]


def test_ids_that_each_answer_begins_anew_are_told_apart_where_two_instrumentations_tell_of_each() -> None:
    attempt = Conversation()
    attempt.call(user("?"), asks=[("call_0", "weather", OSLO)])
    attempt.call(user("?"), asks=[("call_0", "weather", OSLO)])
    twice = [tool_span("weather", 2.1, number=at, call_id="call_0", failed=True) for at in (1, 2)]
    assert ends(attempt, *twice) == [[("weather", True)], [("weather", None)]]


def test_a_result_is_of_no_call_that_came_after_it() -> None:
    attempt = Conversation()
    attempt.call(tool("b", "Error: of another attempt"), text="Hm.")
    attempt.call(user("?"), asks=[("b", "weather", OSLO)])
    assert ends(attempt) == [[], [("weather", None)]]


def test_tools_that_ask_for_the_same_are_told_of_in_the_order_in_which_they_ran() -> None:
    attempt = Conversation()
    attempt.call(user("?"), asks=[("a", "weather", OSLO), ("b", "weather", OSLO)])
    spans = [tool_span("weather", 2.7, number=1), tool_span("weather", 2.1, number=2, failed=True)]
    assert ends(attempt, *spans) == [[("weather", True), ("weather", False)]]


def test_a_tool_of_another_name_is_not_the_one_that_was_asked_for() -> None:
    attempt = Conversation()
    attempt.call(user("?"), asks=[("a", "weather", OSLO)])
    log = tool_span("log", 2.1, call_arguments=OSLO, failed=True)
    assert ends(attempt, log) == [[("weather", None), ("log", True)]]


def test_an_answer_that_is_noted_after_the_next_call_began_is_still_the_one_before_it() -> None:
    attempt = asked()
    attempt.call(tool("b", "ValueError: no such city"), tool("a", "sunny"), text="Sunny.")
    first, second = attempt.calls
    attempt.calls = [second, replace(first, finished_ns=6 * SECOND)]
    assert ends(attempt) == [[], [("weather", False), ("weather", True)]]
    assert [step.tools for step in call_steps(attempt.calls)] == [first.tools, first.tools]


def test_equal_answers_of_a_history_that_is_sent_again_are_told_apart_by_their_order() -> None:
    attempt, history = Conversation(), [user("?")]
    for reply in ("error: no such table", "42", ""):
        attempt.call(*history, text="select 1" if reply else "42.", parent=None)
        history += [attempt.calls[-1].completion, user(reply)]
    assert ends(attempt, user_replies=True) == [[("", True)], [("", False)], []]
    assert [step.seconds for step in call_steps(attempt.calls)] == [2.0, 2.0, None]


def test_an_answer_that_stands_in_a_prompt_more_often_than_it_was_given_is_an_example_first() -> None:
    attempt, answer = Conversation(), {"role": "assistant", "content": "select 1"}
    attempt.call(user("example"), answer, user("error: no"), user("?"), text="select 1")
    again = [user("example"), answer, user("error: no"), user("?"), answer, user("42")]
    attempt.call(*again, text="42.", parent=None)
    assert ends(attempt, user_replies=True) == [[("", False)], []]


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
        [("delegate", False)],
        [("delegate", True)],
    ]
    without = tool_span("delegate", 5.5, number=2, failed=True, parent_id=outer.id)
    assert ends(attempt, outer, without) == [[("delegate", False)], [("delegate", True)]]


def test_a_clock_that_is_behind_does_not_take_a_tool_from_the_call_that_asked_for_it() -> None:
    attempt = Conversation()
    for at, city in enumerate(("Oslo", "Bergen", "Rome")):
        attempt.call(user("?"), asks=[(str(at), "weather", f'{{"city": "{city}"}}')])
    spans = [
        tool_span("weather", 3 * at + 1.5, number=at, failed=at == 1, call_arguments=f'{{"city":"{city}"}}')
        for at, city in enumerate(("Oslo", "Bergen", "Rome"))  # each half a second before its call had ended
    ]
    for told in (spans, spans[1:], spans[2:]):
        found = [step[0][1] for step in ends(attempt, *told)]
        assert found == [None] * (3 - len(told)) + [False, True, False][3 - len(told) :]


def test_what_a_second_instrumentation_tells_is_not_taken_for_another_tool_of_the_answer() -> None:
    attempt = asked()  # Oslo and Atlantis
    one, again = (tool_span("weather", 2.1, number=at, failed=True, call_arguments=OSLO) for at in (1, 2))
    assert ends(attempt, one, again) == [[("weather", True), ("weather", None)]]


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
    assert [step.seconds for step in call_steps(attempt.calls)] == [5.0, None, None]


def test_of_two_calls_that_go_on_from_one_the_first_to_begin_ends_its_wait() -> None:
    attempt = asked()
    attempt.call(tool("a", "sunny"), text="Sunny.", started_ns=9 * SECOND, finished_ns=10 * SECOND)
    attempt.call(tool("a", "sunny"), text="So.", parent="call-0", started_ns=3 * SECOND, finished_ns=11 * SECOND)
    assert call_steps(attempt.calls)[0].seconds == 1.0


def test_a_clock_that_runs_backwards_takes_no_time() -> None:
    attempt = asked()
    attempt.call(tool("a", "sunny"), text="Sunny.", started_ns=SECOND)
    assert call_steps(attempt.calls)[0].seconds == 0.0


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
        "Function nope does not exist.",
        "Tool with name nope was not found",
        "tool nope is not a valid tool, try search",
        "Unknown tool name: 'nope'. Available tools: search",
        "1 validation error for search\nquery\n  Field required",
        '{"error": "no such city"}',
        '{"isError": true, "content": []}',
        '{"success": false}',
        ' {"status": "error"}',
        "CUSTOM.Error(3)",
    ],
)
def test_errors_as_frameworks_write_them(text: str) -> None:
    assert says_error(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sunny",
        "Errors: 0",
        "Error rates fell",
        "Tool use in the wild: the index was not found",
        "Unknown toolmakers of Oslo",
        '{"error": null}',
        '{"error": "", "success": true, "status": "ok"}',
        '{"errors": 3}',
        "no errors",
        "[1, 2]",
        "{",
    ],
)
def test_texts_that_only_speak_of_errors_are_none(text: str) -> None:
    assert not says_error(text)
