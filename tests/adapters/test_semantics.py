"""What spans say they are, convention by convention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from span_samples import a_span, agent, tool

from agentlightning.adapters.semantics import agent_of, error_of, model_of, role_of, tool_use, usage_of

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    (
        *("gen_ai.operation.name", "openinference.span.kind", "gen_ai.agent.name", "metadata", "graph.node.id"),
        *("gen_ai.tool.name", "gen_ai.tool.call.arguments", "gen_ai.tool.call.result", "gen_ai.output", "output.value"),
        "gen_ai.usage.input_tokens",
    )
)


@pytest.mark.parametrize(
    ("attributes", "role"),
    [
        ({"gen_ai.operation.name": "chat"}, "model"),
        ({"gen_ai.operation.name": "execute_tool"}, "tool"),
        ({"gen_ai.operation.name": "invoke_agent"}, "agent"),
        ({"gen_ai.operation.name": "create_agent"}, "other"),
        ({"openinference.span.kind": "LLM"}, "model"),
        ({"openinference.span.kind": "CHAIN"}, "chain"),
        ({"gen_ai.tool.name": "search"}, "tool"),
        ({"gen_ai.operation.name": 7}, "other"),
        ({}, "other"),
    ],
)
def test_each_convention_says_what_a_span_is(attributes: dict[str, Any], role: str) -> None:
    assert role_of(a_span("x", attributes=attributes)) == role


@pytest.mark.parametrize(
    ("name", "attributes", "expected"),
    [
        ("x", {"gen_ai.agent.name": "writer"}, "writer"),
        ("x", {"agl.agent": "ours", "gen_ai.agent.name": "theirs"}, "ours"),
        ("x", {"agent_name": "pydantic"}, "pydantic"),
        ("x", {"metadata": '{"langgraph_node": "writer"}'}, "writer"),
        (
            "x",
            {"metadata": '{"langgraph_checkpoint_ns": "researcher:5f|agent:09", "langgraph_node": "agent"}'},
            "researcher",
        ),
        ("x", {"metadata": "no JSON"}, None),
        ("ToolCallingAgent.run", {"openinference.span.kind": "AGENT"}, "ToolCallingAgent"),
        ("Researcher._execute_core", {"openinference.span.kind": "AGENT", "graph.node.id": "Researcher"}, "Researcher"),
        ("invoke_agent planner", {"gen_ai.operation.name": "invoke_agent"}, "planner"),
        ("x", {"gen_ai.agent.name": ["a list"]}, None),
    ],
)
def test_a_span_names_its_agent_in_the_words_of_its_framework(
    name: str, attributes: dict[str, Any], expected: str | None
) -> None:
    assert agent_of(replace(a_span("1", attributes=attributes), name=name)) == expected


def test_a_tools_span_tells_what_it_was_asked_and_what_it_gave() -> None:
    span = tool(
        "1",
        attributes={
            "gen_ai.tool.name": "add",
            "gen_ai.tool.call.arguments": '{"a": 1}',
            "gen_ai.tool.call.result": "42",
            "gen_ai.tool.call.id": "call_1",
        },
    )
    use = tool_use(span)
    assert use is not None
    assert (use.name, use.arguments, use.result, use.call_id, use.error) == ("add", '{"a": 1}', "42", "call_1", None)
    assert tool_use(agent("planner")) is None


@pytest.mark.parametrize(
    ("recorded", "result"),
    [
        ("plain text", "plain text"),
        ('"quoted"', "quoted"),
        ('{"type": "text", "text": "inner"}', "inner"),
        ('{"content": "inner", "tool_name": "add"}', "inner"),
        ('{"rows": [1]}', '{"rows":[1]}'),
        ({"rows": [1]}, '{"rows":[1]}'),
    ],
)
def test_the_wrappers_of_frameworks_are_taken_off_a_result(recorded: Any, result: str) -> None:
    use = tool_use(tool("1", attributes={"gen_ai.tool.name": "x", "output.value": recorded}))
    assert use is not None
    assert use.result == result


def test_a_failed_tool_says_why() -> None:
    event = {"name": "exception", "attributes": {"exception.type": "ValueError", "exception.message": "no such city"}}
    assert error_of(tool("1", status="error", events=[event])) == "ValueError: no such city"
    assert error_of(tool("1", status="error", status_message="timed out")) == "timed out"
    assert error_of(tool("1", status="error")) == "error"


def test_usage_and_model_are_read_from_any_convention() -> None:
    span = a_span(
        "1", attributes={"llm.model_name": "gpt-4o", "llm.token_count.prompt": 7, "gen_ai.usage.output_tokens": 3}
    )
    assert (model_of(span), usage_of(span)) == ("gpt-4o", {"prompt_tokens": 7, "sampled_tokens": 3})
    assert usage_of(a_span("1", attributes={"gen_ai.usage.input_tokens": float("nan")})) == {}


@given(st.dictionaries(KEYS, JUNK))
def test_no_attribute_of_a_wrong_type_makes_a_reader_raise(attributes: dict[str, Any]) -> None:
    span = a_span("1", attributes=attributes, status="error", events=[{"name": "exception", "attributes": 3}])
    role_of(span), agent_of(span), tool_use(span), error_of(span), model_of(span), usage_of(span)
