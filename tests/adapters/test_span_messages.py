"""Prompts, answers and tools of model calls, by each convention that records them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from span_samples import a_span
from test_semantics import JUNK

from agentlightning.adapters.span_messages import completion_of, finish_reason_of, flattened, prompt_of, tools_of
from agentlightning.records import JSON, Span

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
PROMPT: list[JSON] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "call_1"},
]
"""What each sample below says, in the form of Chat Completions."""


def spans() -> dict[str, Span]:
    """The prompt, and the answer "Two.", in every convention."""
    genai = [
        {"role": "user", "parts": [{"type": "text", "content": "1+1?"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "call_1", "name": "add", "arguments": {"a": 1}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "call_1", "response": "2"}]},
    ]
    system = [{"type": "text", "content": "Be short."}]
    said = [{"role": "assistant", "parts": [{"type": "text", "content": "Two."}], "finish_reason": "stop"}]
    own = {
        "gen_ai.input.messages": json.dumps(genai),
        "gen_ai.system_instructions": json.dumps(system),
        "gen_ai.output.messages": json.dumps(said),
    }
    vercel = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "1+1?"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool-call", "toolCallId": "call_1", "toolName": "add", "input": {"a": 1}}],
        },
        {
            "role": "tool",
            "content": [{"type": "tool-result", "toolCallId": "call_1", "output": {"type": "text", "value": "2"}}],
        },
    ]
    events = [
        {"name": "gen_ai.system.message", "attributes": {"content": "Be short."}},
        {"name": "gen_ai.user.message", "attributes": {"content": "1+1?"}},
        {"name": "gen_ai.assistant.message", "attributes": {"tool_calls": json.dumps([CALL])}},
        {"name": "gen_ai.tool.message", "attributes": {"content": "2", "id": "call_1"}},
        {"name": "gen_ai.choice", "attributes": {"index": 0, "message": json.dumps({"content": "Two."})}},
    ]
    listed = [{"event.name": one["name"], **one["attributes"]} for one in events]
    langchain = [
        [
            {"lc": 1, "type": "constructor", "id": ["langchain", "SystemMessage"], "kwargs": {"content": "Be short."}},
            {"lc": 1, "type": "constructor", "id": ["langchain", "HumanMessage"], "kwargs": {"content": "1+1?"}},
            {
                "lc": 1,
                "type": "constructor",
                "id": ["langchain", "AIMessage"],
                "kwargs": {"content": "", "additional_kwargs": {"tool_calls": [CALL]}},
            },
            {
                "type": "constructor",
                "lc": 1,
                "id": ["x", "ToolMessage"],
                "kwargs": {"content": "2", "tool_call_id": "call_1"},
            },
        ]
    ]
    generated = {"generations": [[{"text": "Two.", "message": {"kwargs": {"content": "Two.", "type": "ai"}, "lc": 1}}]]}
    return {
        "gen_ai": a_span("1", attributes=own),
        "gen_ai event": a_span(
            "1", events=[{"name": "gen_ai.client.inference.operation.details", "attributes": own}], attributes={}
        ),
        "plain messages in gen_ai": a_span(
            "1", attributes={"gen_ai.input.messages": json.dumps(PROMPT), "gen_ai.output": "Two."}
        ),
        "message events": a_span("1", events=events),
        "pydantic-ai": a_span("1", attributes={"events": json.dumps(listed)}),
        "openinference": a_span("1", attributes=openinference()),
        "input.value": a_span(
            "1",
            attributes={
                "input.value": json.dumps({"messages": PROMPT}),
                "output.value": '{"role":"assistant","content":"Two."}',
            },
        ),
        "langchain": a_span(
            "1", attributes={"input.value": json.dumps({"messages": langchain}), "output.value": json.dumps(generated)}
        ),
        "traceloop": a_span("1", attributes=traceloop()),
        "vercel": a_span("1", attributes={"ai.prompt.messages": json.dumps(vercel), "ai.response.text": "Two."}),
    }


def openinference() -> dict[str, Any]:
    own: dict[str, Any] = {}
    for place, message in enumerate(PROMPT):
        prefix = f"llm.input_messages.{place}.message."
        own |= {prefix + "role": message["role"]}
        own |= {prefix + "content": message["content"]} if message["content"] else {}
        own |= {prefix + "tool_call_id": "call_1"} if message["role"] == "tool" else {}
        if "tool_calls" in message:
            call = prefix + "tool_calls.0.tool_call."
            own |= {call + "id": "call_1", call + "function.name": "add", call + "function.arguments": '{"a":1}'}
    text = "llm.output_messages.0.message.contents.0.message_content."
    return own | {"llm.output_messages.0.message.role": "assistant", text + "type": "text", text + "text": "Two."}


def traceloop() -> dict[str, Any]:
    own: dict[str, Any] = {}
    for place, message in enumerate(PROMPT):
        prefix = f"gen_ai.prompt.{place}."
        own |= {prefix + "role": message["role"]}
        own |= {prefix + "content": message["content"]} if message["content"] else {}
        own |= {prefix + "tool_call_id": "call_1"} if message["role"] == "tool" else {}
        if "tool_calls" in message:
            call = prefix + "tool_calls.0."
            own |= {call + "id": "call_1", call + "name": "add", call + "arguments": '{"a":1}'}
    return own | {"gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "Two."}


@pytest.mark.parametrize("convention", list(spans()))
def test_every_convention_tells_the_same_prompt_and_answer(convention: str) -> None:
    span = spans()[convention]
    read = prompt_of(span)
    assert read is not None
    assert [{**one, "content": one["content"] or None} for one in read] == PROMPT
    assert completion_of(span) == {"role": "assistant", "content": "Two."}


@pytest.mark.parametrize(
    ("recorded", "arguments"),
    [
        ([{"tool.name": "add", "tool.args": '{"a":1}'}], '{"a":1}'),
        ([{"tool.name": "add", "tool.args": {"a": 1}}], '{"a":1}'),
        ([{"name": "add", "arguments": '{"a":1}'}], '{"a":1}'),
        ([CALL], '{"a":1}'),
        ({"message": {"content": "", "type": "ai", "additional_kwargs": {"tool_calls": [CALL]}}}, '{"a":1}'),
        ({"role": "assistant", "additional_kwargs": {"tool_calls": [CALL]}, "blocks": [{"text": ""}]}, '{"a":1}'),
    ],
)
def test_answers_of_any_agent_are_tool_calls_in_the_shapes_of_seven_frameworks(recorded: Any, arguments: str) -> None:
    answer = completion_of(a_span("1", attributes={"gen_ai.output": json.dumps(recorded)}))
    assert answer is not None
    [call] = answer["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": arguments}
    assert not answer["content"]


def test_a_structured_answer_is_text_and_no_tool_call() -> None:
    said = json.dumps({"steps": [{"name": "add"}]})
    assert completion_of(a_span("1", attributes={"gen_ai.output": said})) == {"role": "assistant", "content": said}


def test_arguments_that_one_convention_lacks_are_taken_from_another() -> None:
    prefix = "llm.output_messages.0.message.tool_calls.0.tool_call."
    attributes = {
        prefix + "id": "call_1",
        prefix + "function.name": "add",
        "output.value": json.dumps({"role": "assistant", "content": None, "tool_calls": [CALL]}),
    }
    answer = completion_of(a_span("1", attributes=attributes))
    assert answer is not None
    assert answer["tool_calls"] == [CALL]


def test_half_a_conversation_is_none() -> None:
    broken = json.dumps([PROMPT[0], {"role": "spirit", "content": "boo"}])
    assert prompt_of(a_span("1", attributes={"gen_ai.input.messages": broken})) is None


def test_tools_are_read_in_one_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    expected = [{"type": "function", "function": {"name": "add", "parameters": schema, "description": "Adds."}}]
    flat = {"name": "add", "description": "Adds.", "parameters": schema}
    wrapped = {"type": "function", "function": flat}
    for attributes in (
        {"gen_ai.tool.definitions": json.dumps([{"type": "function", **flat}])},
        {"llm.tools.0.tool.json_schema": json.dumps(wrapped)},
        {"llm.invocation_parameters": json.dumps({"model": "x", "tools": [wrapped]})},
        {
            "llm.request.functions.0.name": "add",
            "llm.request.functions.0.description": "Adds.",
            "llm.request.functions.0.parameters": json.dumps(schema),
        },
    ):
        assert tools_of(a_span("1", attributes=attributes)) == expected


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"gen_ai.response.finish_reasons": ["length"]}, "length"),
        ({"gen_ai.response.finish_reasons": '["max_tokens"]'}, "length"),
        ({"ai.response.finishReason": "tool-calls"}, "tool_calls"),
        ({"gen_ai.completion.0.finish_reason": "end_turn"}, "stop"),
        ({}, "stop"),
    ],
)
def test_why_an_answer_ended_is_said_in_our_words(attributes: dict[str, Any], reason: str) -> None:
    assert finish_reason_of(a_span("1", attributes=attributes), None) == reason


def test_a_flattened_list_may_lack_entries_and_costs_no_memory_for_them() -> None:
    own = {"m.0.role": "a", "m.7.role": "b", "m.99999999.role": "c", "m.-1.role": "d", "m.٣.role": "e", "m.2": "f"}
    assert flattened(own, "m.") == [{"role": "a"}, {"role": "b"}]


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "gen_ai.input.messages",
                "gen_ai.output.messages",
                "gen_ai.system_instructions",
                "gen_ai.output",
                "llm.input_messages.0.message.role",
                "llm.input_messages.0.message.tool_calls.0.tool_call.function.name",
                "gen_ai.prompt.0.role",
                "gen_ai.completion.0.tool_calls.0.name",
                "ai.prompt.messages",
                "ai.response.toolCalls",
                "input.value",
                "output.value",
                "events",
                "llm.invocation_parameters",
                "llm.tools.0.tool.json_schema",
                "gen_ai.response.finish_reasons",
            ]
        ),
        JUNK | JUNK.map(lambda value: json.dumps(value)) | st.just([{"role": "user", "content": 3, "tool_calls": [3]}]),
    )
)
def test_no_attribute_makes_a_reader_raise(attributes: dict[str, Any]) -> None:
    span = a_span("1", attributes=attributes, events=[{"name": "gen_ai.choice", "attributes": attributes}])
    answer = completion_of(span)
    for message in [*(prompt_of(span) or []), *([answer] if answer is not None else [])]:
        assert message["role"] in ("system", "user", "assistant", "tool")
        json.dumps(message)
    tools_of(span), finish_reason_of(span, answer)
