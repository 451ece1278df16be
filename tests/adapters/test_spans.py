"""Model calls of spans: one for each that was made, with the prompt that it read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from span_samples import a_span, agent, model, tool

from agentlightning.adapters import spans as adapter
from agentlightning.adapters.semantics import ToolUse
from agentlightning.adapters.span_tree import SpanTree
from agentlightning.adapters.spans import ModelCall
from agentlightning.records import JSON, Span

ASK: list[JSON] = [{"role": "user", "content": "What year is it?"}]


def model_calls(spans: list[Span]) -> list[ModelCall]:
    return adapter.model_calls(SpanTree(spans))


def tool_uses(spans: list[Span]) -> list[ToolUse]:
    return adapter.tool_uses(SpanTree(spans))


def asked(name: str, at: int, answer: Any, prompt: list[JSON] | None = None, parent: str = "agent") -> Span:
    attributes = {"gen_ai.output": answer if isinstance(answer, str) else json.dumps(answer)}
    attributes |= {"gen_ai.input.messages": json.dumps(prompt)} if prompt is not None else {}
    return model(name, parent, at, attributes={"gen_ai.operation.name": "chat", **attributes})


def ran(
    name: str, at: int, result: str | None, label: str = "clock", call_id: str | None = None, **fields: Any
) -> Span:
    own: dict[str, Any] = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": label}
    own |= {"gen_ai.tool.call.result": result} if result is not None else {}
    own |= {"gen_ai.tool.call.id": call_id} if call_id is not None else {}
    own |= {"gen_ai.tool.call.arguments": fields.pop("arguments")} if "arguments" in fields else {}
    return tool(name, fields.pop("parent", "agent"), at, attributes=own, **fields)


def wants(*names: str) -> list[JSON]:
    return [{"tool.name": name, "tool.args": "{}"} for name in names]


def test_a_call_that_three_layers_recorded_is_one() -> None:
    spans = [
        a_span(
            "outer", "agent", 1, openinference__span__kind="LLM", output__value='{"role":"assistant","content":"Hi"}'
        ),
        a_span("middle", "outer", 2, openinference__span__kind="LLM"),
        a_span("inner", "middle", 3, openinference__span__kind="LLM", llm__model_name="gpt"),
    ]
    [call] = model_calls(spans)
    assert (call.span_id, call.model, call.completion) == ("inner", "gpt", {"role": "assistant", "content": "Hi"})


def test_two_calls_within_one_span_of_a_model_are_two() -> None:
    spans = [model("outer", None, 1), asked("one", 2, "a", ASK, "outer"), asked("two", 3, "b", ASK, "outer")]
    assert [call.span_id for call in model_calls(spans)] == ["one", "two"]


def test_calls_know_their_agent_and_stand_in_order_of_time() -> None:
    spans = [asked("late", 9, "b", ASK), agent("agent"), asked("early", 2, "a", ASK)]
    assert [(call.span_id, call.agent) for call in model_calls(spans)] == [("early", "agent"), ("late", "agent")]


def test_a_prompt_that_was_not_recorded_is_put_together_from_what_was() -> None:
    spans = [
        agent("agent"),
        asked("one", 1, wants("clock"), ASK),
        ran("tool", 3, "2025"),
        asked("two", 5, "It is 2025."),
    ]
    first, second = model_calls(spans)
    assert (first.mended, second.mended) == (False, True)
    call = {"id": "call_one_0", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    assert second.messages == [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2025", "tool_call_id": "call_one_0"},
    ]


def test_results_are_matched_by_the_id_of_the_tool_call_before_its_name() -> None:
    answer = [{"id": "a", "name": "clock", "arguments": "{}"}, {"id": "b", "name": "clock", "arguments": "{}"}]
    spans = [
        agent("agent"),
        asked("one", 1, answer, ASK),
        ran("second", 3, "for b", call_id="b"),
        ran("first", 4, "for a", call_id="a"),
        asked("two", 6, "done"),
    ]
    messages = model_calls(spans)[1].messages
    assert messages is not None
    assert [(one["tool_call_id"], one["content"]) for one in messages if one["role"] == "tool"] == [
        ("a", "for a"),
        ("b", "for b"),
    ]


def test_of_two_tools_of_one_name_each_gets_the_result_of_its_own_arguments_in_whatever_order_they_ran() -> None:
    answer = [{"name": "add", "arguments": '{"a": 1, "b": 2}'}, {"name": "add", "arguments": {"a": 3}}]
    spans = [
        agent("agent"),
        asked("one", 1, answer, ASK),
        ran("second", 3, "for 3", "add", arguments='{"a":3}'),
        ran("first", 4, "for 1 and 2", "add", arguments='{"b":2,"a":1}'),
        asked("two", 6, "done"),
    ]
    messages = model_calls(spans)[1].messages
    assert messages is not None
    assert [one["content"] for one in messages if one["role"] == "tool"] == ["for 1 and 2", "for 3"]


def test_tools_that_nothing_tells_apart_gave_their_results_in_the_order_in_which_they_ran() -> None:
    spans = [
        agent("agent"),
        asked("one", 1, wants("clock", "clock"), ASK),
        ran("first", 3, "2025"),
        ran("second", 4, "2026"),
        asked("two", 6, wants("clock")),
        ran("third", 7, "2027"),
        asked("three", 9, "done"),
    ]
    tools = [{"name": "clock", "parameters": {"type": "object"}}]
    spans[1].attributes["gen_ai.tool.definitions"] = json.dumps(tools)
    _, second, third = model_calls(spans)
    assert (second.messages, third.messages) != (None, None)
    assert [one["content"] for one in second.messages or () if one["role"] == "tool"] == ["2025", "2026"]
    assert [one["content"] for one in third.messages or () if one["role"] == "tool"] == ["2025", "2026", "2027"]
    assert [call.tools for call in (second, third)] == [[{"type": "function", "function": tools[0]}]] * 2


def test_a_tool_that_had_not_ended_when_the_next_call_began_was_not_read_by_it() -> None:
    late = ran("tool", 3, "2025")
    spans = [agent("agent"), asked("one", 1, wants("clock"), ASK), late, asked("two", 5, "It is 2025.")]
    assert model_calls(spans)[1].mended
    assert not model_calls([replace(span, finished_ns=6 * 10**9) if span is late else span for span in spans])[1].mended


def test_a_failed_tool_gave_its_error() -> None:
    spans = [
        agent("agent"),
        asked("one", 1, wants("clock"), ASK),
        ran("tool", 3, None, status="error", status_message="no clock"),
        asked("two", 5, "I cannot tell."),
    ]
    messages = model_calls(spans)[1].messages
    assert messages is not None
    assert messages[-1]["content"] == "Error: no clock"


def test_what_is_not_recorded_is_not_guessed() -> None:
    unknown_result = [agent("agent"), asked("one", 1, wants("clock"), ASK), asked("two", 5, "It is 2025.")]
    unknown_question = [agent("agent"), asked("one", 1, "Hello.", ASK), asked("two", 5, "It is 2025.")]
    no_result = [*unknown_result[:2], ran("tool", 3, None), unknown_result[2]]
    others = [*unknown_result[:2], ran("tool", 3, "2025", parent=None), unknown_result[2]]  # outside the agent
    for spans in (unknown_result, unknown_question, no_result, others):
        assert [call.missing for call in model_calls(spans)] == [None, "its prompt was not recorded"]
        third = asked("three", 8, "And so on.")
        assert model_calls([*spans, third])[-1].messages is None  # nor anything after it


def test_a_tool_that_ran_before_the_question_is_no_answer_to_it() -> None:
    spans = [agent("agent"), ran("tool", 1, "1999"), asked("one", 3, wants("clock"), ASK), asked("two", 6, "…")]
    assert model_calls(spans)[1].messages is None


def test_the_calls_of_two_agents_are_not_mixed() -> None:
    spans = [
        agent("agent"),
        agent("other", "agent", 2, 8),
        asked("one", 1, wants("clock"), ASK),
        asked("theirs", 3, "mine", ASK, "other"),
        ran("tool", 4, "2025"),
        asked("two", 9, "It is 2025."),
    ]
    calls = {call.span_id: call for call in model_calls(spans)}
    assert calls["two"].messages is not None
    assert len(calls["two"].messages) == 3
    assert calls["theirs"].messages == ASK


def test_a_call_says_that_its_prompt_was_put_together() -> None:
    spans = [agent("agent"), asked("one", 1, wants("clock"), ASK), ran("tool", 3, "2025"), asked("two", 5, "2025.")]
    assert [call.mended for call in model_calls(spans)] == [False, True]


def test_a_call_that_failed_or_gave_nothing_cannot_be_learned_from() -> None:
    whole = ModelCall(span_id="1", messages=ASK, completion={"role": "assistant", "content": "Hi"})
    assert whole.missing is None
    failed = asked("1", 0, "Hi", ASK)
    failed = Span(**{**{name: getattr(failed, name) for name in Span.__slots__}, "status": "error"})
    assert [call.missing for call in model_calls([failed])] == ["the call failed"]
    assert [call.missing for call in model_calls([asked("1", 0, "", ASK)])] == ["its answer was not recorded"]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), min_size=1, max_size=6), st.randoms())
def test_the_order_of_arrival_means_nothing(drawn: list[tuple[int, bool, bool]], random: Any) -> None:
    spans = [agent("agent")]
    for place, (_, wanted, has) in enumerate(drawn):
        prompt = ASK if place == 0 or has else None
        spans.append(asked(f"call{place}", 10 * place + 1, wants("clock") if wanted else "text", prompt))
        spans.append(ran(f"tool{place}", 10 * place + 5, str(place)))
    shuffled = list(spans)
    random.shuffle(shuffled)
    assert model_calls(shuffled) == model_calls(spans)
    assert tool_uses(shuffled) == tool_uses(spans)
    assert len(model_calls(spans)) == len(drawn)
