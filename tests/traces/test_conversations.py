"""Text calls as records, and records as rows for other trainers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from agentlightning.adapters.conversations import conversations, full_messages, preference_row
from agentlightning.records import JSON, Call
from agentlightning.traces.episode import ModelCall
from agentlightning.traces.episodes import conversation
from agentlightning.traces.importer import call_records
from build import rollout


def user(text: str) -> JSON:
    return {"role": "user", "content": text}


def said(text: str) -> JSON:
    return {"role": "assistant", "content": text}


def records(calls: list[ModelCall]) -> list[Call]:
    return call_records(calls, rollout(), 1, lambda place: f"call-{place:04}")


def talk(*messages: JSON, **fields: Any) -> list[Call]:
    return records(conversation(messages, **fields))


def test_a_call_that_continues_another_holds_only_what_is_new() -> None:
    first, second = talk(user("a"), said("b"), user("c"), said("d"))
    assert (first.parent_id, first.messages, first.completion) == (None, [user("a")], said("b"))
    assert (second.parent_id, second.messages, second.completion) == (first.id, [user("c")], said("d"))


def test_calls_with_other_tools_do_not_continue_each_other() -> None:
    tools: list[JSON] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    one = conversation([user("a"), said("b")], tools)
    two = conversation([user("a"), said("b"), user("c"), said("d")])[1:]
    assert [call.parent_id for call in records([*one, *two])] == [None, None]
    assert [call.tools for call in records([*one, *two])] == [tools, None]


def test_an_answer_may_be_repeated_without_its_reasoning() -> None:
    thought = ModelCall(messages=[user("a")], completion={**said("b"), "reasoning_content": "hm"})
    later = ModelCall(messages=[user("a"), said("b"), user("c")], completion=said("d"))
    assert records([thought, later])[1].parent_id == "call-0000"


def test_branches_are_rows_of_their_own_and_beginnings_are_not() -> None:
    calls = [*conversation([user("a"), said("b"), user("c"), said("d")])]
    calls += conversation([user("a"), said("b"), user("e"), said("f")])[1:]
    rows = [[one["content"] for one in row["messages"]] for row in conversations(records(calls))]
    assert rows == [["a", "b", "c", "d"], ["a", "b", "e", "f"]]


def test_a_preference_row_begins_where_the_two_part() -> None:
    better = talk(user("a"), said("b"), user("c"), said("good"))
    worse = talk(user("a"), said("b"), user("c"), said("bad"))
    assert preference_row(better, worse) == {
        "prompt": [user("a"), said("b"), user("c")],
        "chosen": [said("good")],
        "rejected": [said("bad")],
    }


def test_no_preference_is_made_of_other_questions_equal_answers_or_several_conversations() -> None:
    good = talk(user("a"), said("good"))
    assert preference_row(good, talk(user("z"), said("bad"))) is None
    assert preference_row(good, good) is None
    assert preference_row(good, talk(user("a"), said("good"), user("more"), said("x"))) is None
    # the environment said something else: not a choice of the model's
    assert (
        preference_row(
            talk(user("a"), said("b"), user("1"), said("c")), talk(user("a"), said("b"), user("2"), said("d"))
        )
        is None
    )
    # the user said something else, or the tools were others
    assert preference_row(talk(user("a"), said("b")), talk(user("a"), user("more"), said("c"))) is None
    tools: list[JSON] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert preference_row(good, talk(user("a"), said("bad"), tools=tools)) is None
    both = records([*conversation([user("a"), said("b")]), *conversation([user("z"), said("y")])])
    assert preference_row(good, both) is None


@given(st.lists(st.tuples(st.sampled_from("us"), st.sampled_from("xy")), max_size=8), st.integers(0, 8))
def test_full_prompts_are_those_that_were_recorded(drawn: list[tuple[str, str]], fork: int) -> None:
    messages = [user("start"), *(user(text) if role == "u" else said(text) for role, text in drawn)]
    branch = [*messages[: fork + 1], user("branch"), said("end")]
    calls = [*conversation(messages), *conversation(branch)]
    stored = records(calls)
    assert [prompt for prompt, _ in full_messages(stored)] == [call.messages for call in calls]
    assert sum(len(one.messages) for one in stored) <= sum(len(call.messages or ()) for call in calls)
