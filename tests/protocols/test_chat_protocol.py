"""Requests of OpenAI Chat Completions: understood, refused, and passed on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from random_requests import anything

from agentlightning.protocols import chat
from agentlightning.protocols.base import (
    ApiError,
    CompletionRequest,
)

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def parse(**given: Any) -> CompletionRequest:
    return chat.parse({"messages": MESSAGES, **given})


def refusal(**given: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        parse(**given)
    assert refused.value.status == 400
    assert refused.value.message.startswith(f"{refused.value.param}: ")
    return refused.value


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        ({}, {"model": "", "stop": (), "stream": False, "max_tokens": None, "tools": None, "n": 1, "seed": None}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "y"]}, {"stop": ("x", "y")}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"n": 3, "seed": -1}, {"n": 3, "seed": -1}),
        ({"stream": True, "stream_options": {"include_usage": True}}, {"stream": True, "include_usage": True}),
        ({"tools": TOOLS}, {"parse_tools": True, "one_tool_call": False}),
        ({"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False}, {"one_tool_call": True}),
        ({"tools": TOOLS, "tool_choice": "none"}, {"parse_tools": False, "tools": TOOLS}),
        ({"tools": []}, {"tools": None, "parse_tools": False}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": True, "top_logprobs": 20}),
        ({"temperature": 0.3, "top_p": 1}, {"forced": {"temperature": 0.3, "top_p": 1}}),
    ],
)
def test_a_request_is_understood(given: dict[str, Any], understood: dict[str, Any]) -> None:
    request = parse(**given)
    assert {name: getattr(request, name) for name in understood} == understood


@pytest.mark.parametrize(
    "given",
    [
        {"modalities": ["text", "audio"]},
        {"bad_words": ["no"]},
        {"stop_regex": "a+"},
        {"lora_path": "x"},
        {"top_n_sigma": 1.0},
        {"mirostat": 2},
        {"chat_template": "{{ messages }}"},
    ],
)
def test_what_would_change_sampling_is_collected_with_its_value(given: dict[str, Any]) -> None:
    assert parse(**given).unsupported == given


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"n": True}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"stream": 1}, "stream"),
        ({"model": 1}, "model"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"max_completion_tokens": 6, "max_tokens": 5}, "max_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": "1"}, "top_p"),
        ({"presence_penalty": "a"}, "presence_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"custom": {"name": "f"}}]}, "tools[0]"),
        ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"verbosity": 1}, "verbosity"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort"),
        ({"include_reasoning": "no"}, "include_reasoning"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    assert refusal(**given).param == param


@pytest.mark.parametrize(
    "given",
    [{"prompt_token_ids": [1]}, {"return_hidden_states": True}, {"separate_reasoning": False}, {"no_stop_trim": True}],
)
def test_fields_of_engines_without_which_the_response_would_be_another_are_refused(given: dict[str, Any]) -> None:
    assert list(parse(**given).refused) == list(given)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"functions": [{"name": ""}]}, "functions[0].name"),
        ({"functions": [{"name": "f"}], "tools": TOOLS}, "functions"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"function_call": "required"}, "function_call"),
    ],
)
def test_the_older_form_of_tools_is_refused_by_its_own_names(given: dict[str, Any], param: str) -> None:
    assert refusal(**given).param == param


def test_the_older_form_of_tools_is_read_as_tools() -> None:
    function = TOOLS[0]["function"]
    request = parse(functions=[function], function_call={"name": function["name"]})
    assert (request.tools, request.parse_tools, request.one_tool_call) == ([TOOLS[0]], True, True)
    assert request.grammar["tool_call"]["names"] == [function["name"]]
    assert parse(functions=[function], function_call="none").parse_tools is False
    messages = [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": {"a": 1}}},
        {"role": "function", "name": "f", "content": "b"},
    ]
    called, result = parse(messages=messages).messages
    assert called["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert (result["role"], result["tool_call_id"]) == ("tool", called["tool_calls"][0]["id"])


def test_effort_and_verbosity_are_accepted_and_recorded() -> None:
    request = parse(reasoning_effort="low", verbosity="high", reasoning={"effort": "high", "exclude": True})
    assert request.not_applied == {"reasoning_effort": "low", "verbosity": "high", "reasoning.effort": "high"}
    assert (request.unsupported, request.include_reasoning) == ({}, False)
    assert parse(reasoning={"max_tokens": 5, "enabled": True}).unsupported == {"reasoning.max_tokens": 5}


def test_tools_that_are_no_functions_are_collected_by_path() -> None:
    custom = {"type": "custom", "custom": {"name": "f"}}
    request = parse(tools=[custom, *TOOLS, {"type": "web_search"}])
    assert (request.tools, request.parse_tools) == (TOOLS, True)
    assert request.unsupported == {"tools[0]": custom, f"tools[{len(TOOLS) + 1}]": {"type": "web_search"}}
    assert parse(tools=[custom]).tools is None


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": ""}, "messages[0].role"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
            "messages[0].content[0].image_url.url",
        ),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[0].content[0]"),
        ({"role": "tool", "content": "", "tool_call_id": 1}, "messages[0].tool_call_id"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call.arguments"),
        (
            {"role": "assistant", "function_call": {"name": "f"}, "tool_calls": [CALL]},
            "messages[0].function_call",
        ),
        ({"role": "assistant", "audio": {"id": "a"}}, "messages[0].audio"),
        ({"role": "assistant", "tool_calls": [{"id": "1", "type": "custom"}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": 1}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_message_that_the_policy_cannot_read_is_refused_by_its_path(message: Any, param: str) -> None:
    assert refusal(messages=[message]).param == param


def test_text_parts_and_tool_calls_are_messages_as_they_come() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
    ]
    assert parse(messages=messages).messages == messages


def test_a_request_to_an_external_model_keeps_what_only_that_model_reads() -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]
    tools = [{"type": "web_search"}]
    data = {"model": "o", "messages": messages, "tools": tools, "tool_choice": "any", "top_k": 3, "max_tokens": -1}
    request = chat.parse({**data, "stream": True, "stream_options": {"include_usage": True}}, trained=False)
    assert request == CompletionRequest(model="o", messages=messages, tools=tools, stream=True, include_usage=True)


message = st.fixed_dictionaries(
    {"role": st.sampled_from([*chat.ROLES, "function"])},
    optional=dict.fromkeys(
        ("content", "tool_calls", "tool_call_id", "name", "reasoning_content", "refusal"), anything()
    ),
)
