"""What requests say about grammars and logits, in the words of each protocol and of vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.protocols import chat, completions, messages, responses
from agentlightning.protocols.base import ApiError, CompletionRequest
from agentlightning.records import JSON

SCHEMA: JSON = {"type": "object", "properties": {"n": {"type": "integer"}}}
HELLO = [{"role": "user", "content": "hi"}]
FUNCTION: JSON = {"name": "search", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
STRICT = {"type": "function", "function": {**FUNCTION, "strict": True}}


def chat_request(**fields: Any) -> CompletionRequest:
    return chat.parse({"model": "m", "messages": HELLO, **fields})


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        chat_request(**fields)
    return error.value


@pytest.mark.parametrize(
    ("given", "content"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            {"kind": "json_schema", "schema": SCHEMA, "field": "response_format"},
        ),
        ({"response_format": {"type": "json_object"}}, {"kind": "json_object", "field": "response_format"}),
        ({"guided_json": SCHEMA}, {"kind": "json_schema", "schema": SCHEMA, "field": "guided_json"}),
        (
            {"structured_outputs": {"regex": "a+"}},
            {"kind": "regex", "pattern": "a+", "field": "structured_outputs.regex"},
        ),
        ({"guided_choice": ["a", "b"]}, {"kind": "choice", "choices": ["a", "b"], "field": "guided_choice"}),
        (
            {"structured_outputs": {"grammar": 'start: "a"'}},
            {"kind": "lark", "lark": 'start: "a"', "field": "structured_outputs.grammar"},
        ),
        (
            {"structured_outputs": {"json_object": True, "backend": "guidance"}},
            {"kind": "json_object", "field": "structured_outputs.json_object"},
        ),
    ],
)
def test_a_form_of_the_content_is_read(given: JSON, content: JSON) -> None:
    request = chat_request(**given)
    assert (request.grammar, request.unsupported) == ({"content": content}, {})


def test_every_protocol_has_its_own_name_for_a_schema() -> None:
    form = {"type": "json_schema", "schema": SCHEMA, "name": "s"}
    by_field = {
        "text.format": responses.parse({"model": "m", "input": "hi", "text": {"format": form}}),
        "output_format": messages.parse({"model": "m", "messages": HELLO, "max_tokens": 9, "output_format": form}),
        "response_format": completions.parse({"model": "m", "prompt": "hi", "response_format": form}),
    }
    for field, request in by_field.items():
        assert request.grammar == {"content": {"kind": "json_schema", "schema": SCHEMA, "field": field}}


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("required", {"required": True, "names": None, "field": "tool_choice"}),
        (
            {"type": "function", "function": {"name": "search"}},
            {"required": True, "names": ["search"], "one": True, "field": "tool_choice"},
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
            {"required": False, "names": ["search"], "field": "tool_choice"},
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "search"}]},
            {"required": True, "names": ["search"], "field": "tool_choice"},
        ),
    ],
)
def test_a_tool_choice_that_forces_or_narrows_is_a_grammar(choice: Any, wanted: JSON) -> None:
    assert chat_request(tools=[TOOL], tool_choice=choice).grammar == {"tool_call": wanted}


def test_any_and_a_named_tool_of_messages_are_grammars() -> None:
    def of(choice: JSON) -> JSON:
        tool = {"name": "search", "input_schema": SCHEMA}
        data = {"model": "m", "messages": HELLO, "max_tokens": 9, "tools": [tool], "tool_choice": choice}
        return messages.parse(data).grammar

    assert of({"type": "any"}) == {"tool_call": {"required": True, "names": None, "field": "tool_choice"}}
    named = {"required": True, "names": ["search"], "one": True, "field": "tool_choice"}
    assert of({"type": "tool", "name": "search"}) == {"tool_call": named}
    assert of({"type": "auto"}) == {}


def test_a_strict_tool_is_a_grammar_that_forces_no_call() -> None:
    wanted = {"required": False, "names": None, "field": "tools[1].function.strict"}
    assert chat_request(tools=[TOOL, STRICT]).grammar == {"tool_call": wanted}
    assert chat_request(tools=[TOOL]).grammar == {}
    assert chat_request(tools=[STRICT], tool_choice="none").grammar == {}


@pytest.mark.parametrize(
    ("given", "logits"),
    [
        ({"presence_penalty": 0.5, "frequency_penalty": 0}, {"presence_penalty": 0.5}),
        ({"repetition_penalty": 1, "min_p": 0}, {}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"top_k": -1}, {}),
        ({"top_k": 20, "min_p": 0.1}, {"top_k": 20, "min_p": 0.1}),
        ({"logit_bias": {"07": -100, "9": 0}}, {"logit_bias": {"7": -100.0}}),
    ],
)
def test_what_is_done_to_the_logits_is_read_without_what_is_neutral(given: JSON, logits: JSON) -> None:
    request = chat_request(**given)
    assert (request.logits, request.unsupported) == (logits, {})


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(2000)}}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"stop": ["x"] * 1025}, "stop"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"top_k": 1.5}, "top_k"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_name(given: JSON, param: str) -> None:
    assert refusal(**given).param == param
