"""Namespaces and freeform tools of Responses: functions for the model, themselves for the agent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_requests import anything
from sampled_answers import answer, choices, events, objects, said, streamed

from agentlightning.protocols import responses
from agentlightning.protocols.base import Choice, CompletionRequest, assistant_message
from agentlightning.protocols.response_items import flatten
from agentlightning.rendering.graph import normal

SPAWN = {"type": "function", "name": "spawn", "description": "d", "parameters": {"type": "object"}}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "edits",
    "format": {"type": "grammar", "definition": "start: /x/"},
}
TOOLS = [{"type": "namespace", "name": "agents", "tools": [SPAWN]}, PATCH, {**SPAWN, "name": "plain"}]
HI = {"role": "user", "content": "hi"}


def parse(*items: Any, tools: Any = TOOLS) -> CompletionRequest:
    return responses.parse({"model": "m", "input": [HI, *items], "tools": tools, "stream": True})


def test_tools_of_namespaces_and_freeform_tools_are_functions_for_the_model() -> None:
    functions = [tool["function"] for tool in parse().tools or []]
    assert [one["name"] for one in functions] == ["agents__spawn", "patch", "plain"]
    assert functions[0]["parameters"] == SPAWN["parameters"]
    assert functions[1]["parameters"]["properties"]["input"]["description"].endswith("start: /x/")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "spawn", "namespace": "agents"}, ["agents__spawn"]),
        ({"type": "custom", "name": "patch"}, ["patch"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [
                    {"type": "function", "name": "spawn", "namespace": "agents"},
                    {"type": "custom", "name": "patch"},
                ],
            },
            ["agents__spawn", "patch"],
        ),
    ],
)
def test_a_tool_is_chosen_by_the_name_that_it_has_in_the_request(choice: dict[str, Any], names: list[str]) -> None:
    request = responses.parse({"model": "m", "input": [HI], "tools": TOOLS, "tool_choice": choice})
    assert request.grammar["tool_call"]["names"] == names
    assert request.echo["tool_choice"] == choice


CHOICE = said("I look.", None, (("agents__spawn", '{"a":1}'), ("patch", '{"input":"*** x\\n"}'), ("plain", "{}")))


def items_of(choice: Choice) -> list[Any]:
    return list(json.loads(responses.body(parse(), answer(choice)))["output"])


def test_calls_are_folded_back_to_the_tools_of_the_request() -> None:
    _, spawn, patch, plain = items_of(CHOICE)
    assert (spawn["type"], spawn["namespace"], spawn["name"]) == ("function_call", "agents", "spawn")
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "*** x\n")
    assert "arguments" not in patch
    assert (plain["type"], plain["name"], plain.get("namespace")) == ("function_call", "plain", None)


@pytest.mark.parametrize("pieces", [1, 3])
def test_a_stream_has_the_same_items(pieces: int) -> None:
    stream = responses.stream(parse(), "01970000-1111-7222-8333-444455556666", "m", 5, 3)
    found = events(streamed(stream, CHOICE, pieces))
    assert found[-1]["response"]["output"] == items_of(CHOICE)
    added = [event["item"] for event in found if event["type"] == "response.output_item.added"]
    assert [(one["type"], one.get("namespace")) for one in added[1:]] == [
        ("function_call", "agents"), ("custom_tool_call", None), ("function_call", None),
    ]  # fmt: skip
    (done,) = [event for event in found if event["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == "*** x\n"


def test_items_that_come_back_are_the_message_that_was_recorded() -> None:
    outputs = [
        {"type": "function_call_output", "call_id": "call_0", "output": "a"},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "b"},
    ]
    _, sent_back, *results = parse(*items_of(CHOICE), *outputs).messages
    assert normal(sent_back) == normal(assistant_message(CHOICE))
    assert [(one["role"], one["tool_call_id"], one["content"]) for one in results] == [
        ("tool", "call_0", "a"), ("tool", "call_1", "b"),
    ]  # fmt: skip


def test_the_response_repeats_the_tools_as_they_were_given() -> None:
    body = json.loads(responses.body(parse(), answer(CHOICE)))
    assert [(tool["type"], tool["name"]) for tool in body["tools"]] == [(tool["type"], tool["name"]) for tool in TOOLS]


@given(choice=choices(objects))
def test_calls_of_other_functions_are_as_they_were(choice: Choice) -> None:
    plain = json.loads(responses.body(parse(tools=None), answer(choice)))
    assert plain["output"] == items_of(choice)


@given(
    tools=st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["namespace", "custom", "function"])},
            optional=dict.fromkeys(("name", "tools", "format"), anything(("type", "name", "tools"))),
        )
        | anything(),
        max_size=3,
    ),
    items=st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["custom_tool_call", "custom_tool_call_output", "function_call"])},
            optional=dict.fromkeys(("name", "namespace", "input"), anything()),
        )
        | anything(),
        max_size=3,
    ),
)
def test_odd_shapes_are_left_to_the_parser(tools: list[Any], items: list[Any]) -> None:
    flat, folds = flatten({"tools": tools, "input": items})
    assert isinstance(flat["tools"], list)
    assert len(flat["input"]) == len(items)
    assert all(isinstance(name, str) for name in folds)
