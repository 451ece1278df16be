"""Requests of Anthropic Messages: understood, refused, and passed on."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaFields
from anthropic.types.message_create_params import MessageCreateParamsStreaming as Fields
from hypothesis import strategies as st
from random_requests import anything
from sampled_answers import CALL_ID

from agentlightning.protocols import messages
from agentlightning.protocols.base import ApiError, CompletionRequest

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
RESULT = {"type": "search_result", "title": "t", "source": "https://s", "content": [{"type": "text", "text": "found"}]}
IMAGE = {"type": "image", "source": {"type": "url", "url": "u"}}
THINKING = {"type": "adaptive"}


def parse(**given: Any) -> CompletionRequest:
    return messages.parse({"model": "m", "max_tokens": 9, "messages": HI, **given})


def refusal(**given: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        parse(**given)
    assert refused.value.status == 400
    assert refused.value.message.startswith(f"{refused.value.param}: ")
    return refused.value


def stream() -> Any:
    return messages.stream(parse(stream=True, thinking=THINKING), CALL_ID, "m", 5, 3)


def test_a_conversation_becomes_messages_of_the_one_form() -> None:
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "thinking", "thinking": "h", "signature": "s"},
                {"type": "thinking", "thinking": "m", "signature": "s"},
                {"type": "text", "text": "I look."},
                TOOL_USE,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
        {"role": "assistant", "content": [TOOL_USE]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}]},
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": []},
        {"role": "user", "content": []},
    ]
    assert parse(messages=conversation).messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "", "is_error": True},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


@pytest.mark.parametrize("in_a_result", [False, True])
def test_documents_and_search_results_are_text(in_a_result: bool) -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}, "title": "t"}
    blocks = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "b"}]}}
    given = [plain, blocks, RESULT, {"type": "text", "text": "Sum up."}]
    text = (
        "<document>\ntitle: t\na\n</document>\n"
        "<document>\nb\n</document>\n"
        "<search_result>\ntitle: t\nsource: https://s\nfound\n</search_result>\n"
        "Sum up."
    )
    if in_a_result:
        given = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": given}]
    (message,) = parse(messages=[{"role": "user", "content": given}]).messages
    assert message["content"] == text


NO_EFFECT: dict[str, Any] = {
    "metadata": {"user_id": "u"},
    "service_tier": "auto",
    "inference_geo": "eu",
    "cache_control": {"type": "ephemeral"},
    "diagnostics": {"previous_message_id": "msg_1"},
    "speed": "fast",
    "thinking": {"type": "disabled"},
    "billing_policy": {"type": "billing_policy"},
    "fallbacks": "default",
    "fallback_credit_token": "t",
}
GRAMMAR = {"top_k", "output_config", "output_format", "tool_choice"}
"""Fields that say how to decode."""

NOT_OURS: dict[str, Any] = {
    "mcp_servers": [{"type": "url"}],
    "compaction": {"type": "enabled"},
}
REFUSED: dict[str, Any] = {
    "container": "c",
}
HONOURED = {
    "model", "max_tokens", "messages", "system", "stop_sequences", "stream", "temperature", "top_p", "tools",
    "context_management", "output_config", "thread",
}  # fmt: skip
HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters that the SDK sends as headers."""


def test_every_field_that_the_sdk_documents_stands_in_a_table_here() -> None:
    documented = Fields.__annotations__.keys() | BetaFields.__annotations__.keys()
    assert documented - HEADERS <= HONOURED | GRAMMAR | NO_EFFECT.keys() | NOT_OURS.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", NO_EFFECT)
def test_what_changes_nothing_is_accepted(name: str) -> None:
    assert parse(**{name: NO_EFFECT[name]}) == parse(**{name: None}) == parse()


def test_effort_is_accepted_and_recorded_and_what_else_is_configured_is_collected() -> None:
    assert parse(output_config={"effort": "high"}).not_applied == {"output_config.effort": "high"}
    assert parse(output_config={"depth": 3}).unsupported == {"output_config.depth": 3}
    assert refusal(output_config={"effort": 1}).param == "output_config.effort"


def test_a_request_to_an_external_model_keeps_what_only_that_model_reads() -> None:
    given = [
        {"role": "user", "content": [{"type": "text", "text": "what?"}, IMAGE]},
        {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s"}]},
    ]
    data = {"model": "claude", "messages": given, "tools": [{"type": "web_search_20250305", "name": "w"}], "top_k": 3}
    request = messages.parse({**data, "system": [IMAGE], "max_tokens": -1, "stream": True}, trained=False)
    tools = [{"type": "function", "function": {"name": "w"}}]
    kept = [{"role": "system", "content": [IMAGE]}, *given]
    assert request == CompletionRequest(model="claude", messages=kept, tools=tools, stream=True)


block = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "document", "search_result"])},
    optional=dict.fromkeys(
        ("text", "thinking", "id", "name", "input", "tool_use_id", "content", "source", "title", "citations"),
        anything(),
    ),
)
message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": st.lists(block, max_size=2) | anything(),
    }
)


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_only_anthropics_service_could_do_is_collected(name: str) -> None:
    assert parse(**{name: NOT_OURS[name]}).unsupported == {name: NOT_OURS[name]}


OTHER_APIS: dict[str, tuple[Any, Any]] = {
    "n": (2, 1),
    "seed": (3, None),
    "stop": (["x"], []),
    "logprobs": (True, False),
    "logit_bias": ({"5": 1}, {}),
    "presence_penalty": (0.5, 0),
    "repetition_penalty": (1.1, 1.0),
    "min_tokens": (2, 0),
    "bad_words": (["no"], []),
    "response_format": ({"type": "json_object"}, {"type": "text"}),
    "guided_choice": (["a"], None),
}


@pytest.mark.parametrize("name", OTHER_APIS)
def test_fields_of_other_apis_that_would_change_the_response_are_collected(name: str) -> None:
    changes, neutral = OTHER_APIS[name]
    assert parse(**{name: changes}).unsupported == {name: changes}
    assert parse(**{name: neutral}) == parse()


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_continue_something_at_anthropic_is_refused(name: str) -> None:
    assert list(parse(**{name: REFUSED[name]}).refused) == [name]


def test_tools_that_anthropic_runs_are_collected_by_path() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    request = parse(tools=[search, TOOL])
    assert (request.tools, request.unsupported) == ([FUNCTION], {"tools[0]": search})


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"model": 1}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [*HI, {"role": "assistant", "content": " "}]}, "messages"),
        ({"system": 1}, "system"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": 1.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "adaptive", "display": 1}}, "thinking.display"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use"),
        ({"tools": TOOL}, "tools"),
        ({"tools": [{"type": 1, "name": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL, {"input_schema": {}}]}, "tools[1].name"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "description": 1}]}, "tools[0].description"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    assert refusal(**given).param == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": ""}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": ["hi"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": "what?"}, IMAGE]}, "messages[0].content[1].source.url"),
        ({"role": "user", "content": [TOOL_USE]}, "messages[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]},
            "messages[0].content[0].content[0].source.url",
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": 1}]},
            "messages[0].content[0].tool_use_id",
        ),
        (
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "is_error": "no"}]},
            "messages[0].content[0].is_error",
        ),
        ({"role": "user", "content": [{"type": "document", "source": PDF}]}, "messages[0].content[0].source"),
        ({"role": "user", "content": [{**RESULT, "content": None}]}, "messages[0].content[0].content"),
        ({"role": "user", "content": [{**RESULT, "content": [RESULT]}]}, "messages[0].content[0].content[0]"),
        ({"role": "assistant", "content": [{**TOOL_USE, "input": 1}]}, "messages[0].content[0].input"),
        ({"role": "assistant", "content": [{**TOOL_USE, "id": 1}]}, "messages[0].content[0].id"),
        ({"role": "assistant", "content": [{"type": "server_tool_use", "id": "s"}]}, "messages[0].content[0]"),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": 1}]}, "messages[0].content[0]"),
    ],
)
def test_a_message_that_the_policy_cannot_read_is_refused_by_its_path(message: Any, param: str) -> None:
    assert refusal(messages=[message, *HI]).param == param
