"""Model calls of spans under the GenAI conventions: one for each that was made, and nothing made up."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from agentlightning.adapters.span_tree import SpanTree
from agentlightning.records import JSON, Span
from agentlightning.traces.episode import ModelCall
from agentlightning.traces.episodes import (
    DETAILS,
    chat_message,
    chat_messages,
    chat_tools,
    model_calls,
)
from build import span

ASK: list[JSON] = [{"role": "user", "content": "What year is it?"}]
SAID = {"role": "assistant", "parts": [{"type": "text", "content": "2025"}], "finish_reason": "stop"}


def model(name: str, parent: str | None = None, at: int = 1, prompt: Any = ASK, answer: Any = SAID, **own: Any) -> Span:
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": json.dumps(prompt), **own}
    attributes["gen_ai.output.messages"] = json.dumps([answer])
    return span(id=name, parent_id=parent, attributes=attributes, started_ns=at, finished_ns=at + 1, trace_id="t")


def agent(name: str, parent: str | None = None) -> Span:
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name}
    return span(id=name, parent_id=parent, attributes=attributes, started_ns=0, finished_ns=1000, trace_id="t")


def calls_of(*spans: Span) -> list[ModelCall]:
    return model_calls(SpanTree(spans))


def test_a_span_gives_the_prompt_the_answer_the_model_the_agent_and_the_usage() -> None:
    tools = [{"type": "function", "name": "clock", "parameters": {"type": "object"}}]
    own = {"gen_ai.request.model": "gpt", "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 1}
    own |= {"gen_ai.tool.definitions": json.dumps(tools), "gen_ai.response.finish_reasons": ["length"]}
    own |= {"gen_ai.system_instructions": json.dumps([{"type": "text", "content": "Be short."}])}
    [call] = calls_of(agent("writer"), model("one", "writer", **own))
    assert call.messages == [{"role": "system", "content": "Be short."}, *ASK]
    assert call.completion == {"role": "assistant", "content": "2025"}
    assert call.tools == [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    assert (call.model, call.agent, call.finish_reason) == ("gpt", "writer", "length")
    assert (call.usage, call.missing) == ({"prompt_tokens": 3, "sampled_tokens": 1}, None)


def test_messages_may_stand_in_an_event_of_the_span() -> None:
    whole = model("one")
    details = {"name": DETAILS, "attributes": dict(whole.attributes)}
    moved = replace(whole, attributes={"gen_ai.operation.name": "chat"}, events=[details])
    assert calls_of(moved) == calls_of(whole)


def test_a_call_that_layers_of_a_framework_recorded_is_one_and_calls_stand_in_order_of_time() -> None:
    spans = [model("outer", at=1), model("late", "outer", 9), model("early", "outer", 2)]
    assert [call.span_id for call in calls_of(*spans)] == ["early", "late"]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (replace(model("one"), status="error"), "the call failed"),
        (model("one", prompt=[*ASK, {"content": "no role"}]), "its prompt was not recorded"),
        (model("one", answer={"role": "assistant", "parts": []}), "its answer was not recorded"),
        (model("one", answer={"role": "user", "content": "hi"}), "its answer was not recorded"),
    ],
)
def test_a_call_that_cannot_be_learned_from_says_why(broken: Span, why: str) -> None:
    assert [call.missing for call in calls_of(broken)] == [why]


def test_parts_become_messages_of_chat_completions() -> None:
    wanted = {"type": "tool_call", "id": "c", "name": "add", "arguments": {"a": 1}}
    asked = {"role": "assistant", "parts": [{"type": "reasoning", "content": "hm"}, wanted]}
    function = {"name": "add", "arguments": '{"a":1}'}
    assert chat_message(asked) == [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
            "reasoning_content": "hm",
        }
    ]
    results = [{"type": "tool_call_response", "id": name, "response": value} for name, value in (("c", "2"), ("d", 3))]
    assert chat_message({"role": "tool", "parts": results}) == [
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "tool", "content": "3", "tool_call_id": "d"},
    ]
    image = {"type": "uri", "uri": "https://h/a.png"}
    assert chat_message({"role": "user", "parts": ["look: ", image]}) == [
        {"role": "user", "content": [{"type": "text", "text": "look: "}, image]}
    ]
    plain = {"role": "tool", "content": "2", "tool_call_id": "c", "name": None}
    assert chat_message(plain) == [{"role": "tool", "content": "2", "tool_call_id": "c"}]


@pytest.mark.parametrize("junk", [None, 3, "text", [], {}, [3], [{"role": "wizard", "content": "x"}]])
def test_what_is_no_conversation_and_no_tools_is_nothing(junk: Any) -> None:
    assert chat_messages(junk) is None
    assert chat_tools(junk) is None
