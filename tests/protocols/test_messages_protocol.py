"""Anthropic Messages on the wire: what is accepted, what is refused, what comes out."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic, APIStatusError
from anthropic.types import Message, MessageTokensCount, ModelInfo
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaFields
from anthropic.types.message_create_params import MessageCreateParamsStreaming as Fields
from hypothesis import given
from hypothesis import strategies as st
from random_requests import anything, requests
from sampled_answers import CALL_ID, answer, broken, choices, events, objects, said, streamed

from agentlightning.protocols import messages
from agentlightning.protocols.base import ApiError, Choice, CompletionRequest, Delta, WireFormat, assistant_message
from agentlightning.rendering.graph import normal

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
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


# --- requests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        ({}, {"model": "m", "max_tokens": 9, "stop": (), "stream": False, "tools": None, "n": 1, "messages": HI}),
        ({"stop_sequences": ["x", "y"], "stream": True}, {"stop": ("x", "y"), "stream": True}),
        ({"temperature": 1, "top_p": 0.5}, {"forced": {"temperature": 1, "top_p": 0.5}}),
        ({"tools": [TOOL]}, {"tools": [FUNCTION], "parse_tools": True, "one_tool_call": False}),
        ({"tools": [{**TOOL, "type": "custom", "cache_control": {}, "strict": False}]}, {"tools": [FUNCTION]}),
        ({"tools": []}, {"tools": None, "parse_tools": False}),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tools": [FUNCTION], "parse_tools": False}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"parse_tools": True, "one_tool_call": True, "unsupported": {}},
        ),
        ({"system": "be"}, {"messages": [{"role": "system", "content": "be"}, *HI]}),
        (
            {"system": [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}]},
            {"messages": [{"role": "system", "content": "ab"}, *HI]},
        ),
    ],
)
def test_a_request_is_understood(given: dict[str, Any], understood: dict[str, Any]) -> None:
    request = parse(**given)
    assert {name: getattr(request, name) for name in understood} == understood


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
    "thread": {"type": "continue", "previous_message_id": "msg_1"},
}
HONOURED = {
    "model", "max_tokens", "messages", "system", "stop_sequences", "stream", "temperature", "top_p", "tools",
    "context_management", "output_config",
}  # fmt: skip
HEADERS = {"betas", "user_profile_id", "workspace_id"}
"""Parameters that the SDK sends as headers."""


def test_every_field_that_the_sdk_documents_stands_in_a_table_here() -> None:
    documented = Fields.__annotations__.keys() | BetaFields.__annotations__.keys()
    assert documented - HEADERS <= HONOURED | GRAMMAR | NO_EFFECT.keys() | NOT_OURS.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", NO_EFFECT)
def test_what_changes_nothing_is_accepted_and_its_kind_is_checked(name: str) -> None:
    assert parse(**{name: NO_EFFECT[name]}) == parse(**{name: None}) == parse()
    assert (refusal(**{name: 1}).param or "").startswith(name)


def test_effort_is_collected_and_the_format_beside_it_is_a_grammar() -> None:
    schema = {"type": "object"}
    request = parse(output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}})
    assert (request.unsupported, request.not_applied) == ({}, {"output_config.effort": "low"})
    assert request.grammar == {"content": {"kind": "json_schema", "schema": schema, "field": "output_config.format"}}


def test_effort_is_accepted_and_recorded_and_what_else_is_configured_is_collected() -> None:
    assert parse(output_config={"effort": "high"}).not_applied == {"output_config.effort": "high"}
    assert parse(output_config={"depth": 3}).unsupported == {"output_config.depth": 3}
    assert refusal(output_config={"effort": 1}).param == "output_config.effort"


def test_examples_of_a_tools_input_are_collected() -> None:
    tools = [TOOL, {**TOOL, "input_examples": [{"a": 1}]}, {**TOOL, "input_examples": []}]
    assert parse(tools=tools).unsupported == {"tools[1].input_examples": [{"a": 1}]}


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_only_anthropics_service_could_do_is_collected(name: str) -> None:
    assert parse(**{name: NOT_OURS[name]}).unsupported == {name: NOT_OURS[name]}


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
        ({"role": "assistant", "content": [{**TOOL_USE, "input": "{}"}]}, "messages[0].content[0].input"),
        ({"role": "assistant", "content": [{**TOOL_USE, "id": 1}]}, "messages[0].content[0].id"),
        ({"role": "assistant", "content": [{"type": "server_tool_use", "id": "s"}]}, "messages[0].content[0]"),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": 1}]}, "messages[0].content[0]"),
    ],
)
def test_a_message_that_the_policy_cannot_read_is_refused_by_its_path(message: Any, param: str) -> None:
    assert refusal(messages=[message, *HI]).param == param


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


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_an_external_request_with_a_block_that_is_no_object_is_refused(role: str) -> None:
    with pytest.raises(ApiError) as refused:
        messages.parse({"messages": [{"role": role, "content": [{"type": "text"}, 1]}]}, trained=False)
    assert refused.value.param == "messages[0].content[1]"


block = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image"])},
    optional=dict.fromkeys(("text", "thinking", "id", "name", "input", "tool_use_id", "content"), anything()),
)
message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": st.lists(block, max_size=2) | anything(),
    }
)


@given(
    data=requests("system", "stop_sequences", *NO_EFFECT, *sorted(GRAMMAR), *NOT_OURS),
    given_messages=st.lists(message, min_size=1, max_size=2) | anything(),
    trained=st.booleans(),
)
def test_random_requests_are_understood_or_refused(data: dict[str, Any], given_messages: Any, trained: bool) -> None:
    try:
        request = messages.parse({"max_tokens": 9, **data, "messages": given_messages}, trained)
    except ApiError as refused:
        message, param = refused.message, refused.param
        assert message.startswith(f"{param}")
    else:
        assert all(isinstance(one["role"], str) for one in request.messages)


# --- answers ------------------------------------------------------------------------------------------------------------

REASONED = said("I look.", "hm", (("f", '{"a": 1}'),))


def heard(data: bytes) -> Message:
    """What the SDK makes of a stream."""
    reply = httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=data)
    with Anthropic(api_key="k", http_client=httpx2.Client(transport=httpx2.MockTransport(lambda _: reply))) as client:
        asked: Any = {"model": "m", "max_tokens": 9, "messages": HI}
        with client.messages.stream(**asked) as parts:
            return parts.get_final_message()


def test_the_body_of_an_answer_has_a_block_for_every_part_and_the_counts() -> None:
    body = json.loads(messages.body(parse(thinking=THINKING), answer(REASONED, cached_tokens=2)))
    Message.model_validate(body)
    assert body == {
        "id": f"msg_{CALL_ID}",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": CALL_ID},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call_0", "name": "f", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "output_tokens": 4,
            "cache_read_input_tokens": 2,
            "cache_creation_input_tokens": 0,
        },
    }


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (said("a"), "end_turn"),
        (said("a", finish="length"), "max_tokens"),
        (said(None, None, (("f", "{"),), "length"), "max_tokens"),
        (REASONED, "tool_use"),
        (Choice(content="a", stop="x"), "stop_sequence"),
    ],
)
def test_the_reason_to_stop_is_said_in_the_protocols_words(choice: Choice, reason: str) -> None:
    whole = json.loads(messages.body(parse(thinking=THINKING), answer(choice)))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, choice.stop)
    (last,) = [event for event in events(streamed(stream(), choice)) if event["type"] == "message_delta"]
    assert last["delta"] == {"stop_reason": reason, "stop_sequence": choice.stop}


@given(choice=choices(objects | broken), pieces=st.integers(1, 4))
def test_a_stream_put_together_by_the_sdk_is_the_whole_body(choice: Choice, pieces: int) -> None:
    whole = Message.model_validate_json(messages.body(parse(thinking=THINKING), answer(choice, cached_tokens=1)))
    together = heard(streamed(stream(), choice, pieces, cached_tokens=1)).to_dict()
    assert {name: value for name, value in together.items() if name != "stop_details"} == whole.to_dict()


@given(choice=choices(objects | broken), pieces=st.integers(1, 4))
def test_blocks_open_grow_and_close_one_after_the_other(choice: Choice, pieces: int) -> None:
    found = events(streamed(stream(), choice, pieces))
    kinds = [event["type"] for event in found]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    opened = -1
    grows = {
        "thinking": {"thinking_delta", "signature_delta"},
        "text": {"text_delta"},
        "tool_use": {"input_json_delta"},
    }
    is_open = False
    for event in found[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            opened, is_open, kind = opened + 1, True, event["content_block"]["type"]
        else:
            assert is_open
            is_open = event["type"] == "content_block_delta"
            assert is_open is False or event["delta"]["type"] in grows[kind]
        assert event["index"] == opened
    assert not is_open
    assert opened + 1 == len(json.loads(messages.body(parse(thinking=THINKING), answer(choice)))["content"])


@pytest.mark.parametrize("given_fields", [{}, {"thinking": {"type": "disabled"}}])
def test_thinking_that_was_not_asked_for_is_not_given(given_fields: Any) -> None:
    request = parse(**given_fields)
    whole = json.loads(messages.body(request, answer(REASONED)))["content"]
    found = events(streamed(messages.stream(request, CALL_ID, "m", 5, 3), REASONED))
    kinds = [event["content_block"]["type"] for event in found if event["type"] == "content_block_start"]
    assert kinds == [block["type"] for block in whole] == ["text", "tool_use"]


@given(choice=choices(objects | broken), pieces=st.integers(1, 4))
def test_what_an_agent_sends_back_of_an_answer_is_the_message_that_was_recorded(choice: Choice, pieces: int) -> None:
    whole = json.loads(messages.body(parse(thinking=THINKING), answer(choice)))["content"]
    streamed_content = json.loads(heard(streamed(stream(), choice, pieces)).to_json())["content"]
    for content in (whole, streamed_content):
        _, sent_back, _ = parse(messages=[*HI, {"role": "assistant", "content": content}, *HI]).messages
        assert normal(sent_back) == normal(assistant_message(choice))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1, "b": {"c": ["}", ","]}}', {"a": 1, "b": {"c": ["}", ","]}}),
        ("{}", {}),
        ("", {"_arguments": ""}),
        ("[1]", {"_arguments": "[1]"}),
        ("{\"a\": 'x'}", {"_arguments": "{\"a\": 'x'}"}),
        ('{"a": 1, "b": "cut', {"a": 1, "_arguments": '{"a": 1, "b": "cut'}),
        ('{"a": 1,}', {"a": 1, "_arguments": '{"a": 1,}'}),
        ('{"_arguments": "mine"}', {"_arguments": '{"_arguments": "mine"}'}),
    ],
)
def test_arguments_that_are_no_object_are_shown_as_text_and_come_back_as_they_were(arguments: str, shown: Any) -> None:
    choice = said(None, None, (("f", arguments),))
    (block,) = heard(streamed(stream(), choice, 5)).content
    assert block.to_dict()["input"] == shown
    _, sent_back, _ = parse(messages=[*HI, {"role": "assistant", "content": [block.to_dict()]}, *HI]).messages
    assert normal(sent_back) == normal(assistant_message(choice))


def test_an_input_that_only_looks_like_ours_is_taken_as_it_is() -> None:
    given = {"a": 2, "_arguments": '{"a": 1, "b'}
    block = {**TOOL_USE, "input": given}
    _, message, _ = parse(messages=[*HI, {"role": "assistant", "content": [block]}, *HI]).messages
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == given


def test_a_tools_input_comes_a_member_at_a_time() -> None:
    choice = said(None, None, (("f", '{"a": 1, "b": "x, y"}'),))
    deltas = [event["delta"] for event in events(streamed(stream(), choice, 20)) if "delta" in event][:-1]
    assert [delta["partial_json"] for delta in deltas] == ['{"a": 1', ', "b": "x, y"}']


def test_a_delta_that_says_nothing_is_no_event() -> None:
    assert stream().delta(0, Delta(logprobs=())) == b""


def test_a_failed_stream_is_an_error_that_the_sdk_raises() -> None:
    begun = stream()
    data = begun.first() + begun.delta(0, Delta(content="x")) + begun.failed(ApiError("gone", status=503))
    assert events(data)[-1] == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}
    with pytest.raises(APIStatusError, match="gone"):
        heard(data)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"), (502, "api_error")],
)
def test_an_error_has_the_protocols_own_type(status: int, kind: str) -> None:
    said = json.loads(messages.error(ApiError("no", status=status)))
    assert said == {"type": "error", "error": {"type": kind, "message": "no"}}


def test_counts_and_models_have_the_shapes_of_the_sdk() -> None:
    assert MessageTokensCount.model_validate_json(messages.count(7)).input_tokens == 7
    listed = json.loads(messages.models(["a", "b"], 5))
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a", "b", False)
    assert [ModelInfo.model_validate(entry).id for entry in listed["data"]] == ["a", "b"]
    assert json.loads(messages.models([], 5))["first_id"] is None
    assert ModelInfo.model_validate_json(messages.model("a", 5)).id == "a"


# --- external models -----------------------------------------------------------------------------------------------------


@given(choice=choices(objects), pieces=st.integers(1, 4))
def test_a_reader_finds_the_same_message_in_a_whole_answer_and_in_its_events(choice: Choice, pieces: int) -> None:
    whole, parts = messages.reader(), messages.reader()
    whole.whole(json.loads(messages.body(parse(thinking=THINKING), answer(choice, cached_tokens=2))))
    for event in events(streamed(stream(), choice, pieces, cached_tokens=2)):
        parts.event(event)
    for one in (whole, parts):
        assert normal(one.message) == normal(assistant_message(choice))
        assert (one.finish_reason, one.prompt_tokens, one.sampled_tokens) == (choice.finish_reason, 3, 4)


LOOSE = ("type", "content", "content_block", "delta", "text", "usage", "input", "input_tokens", "stop_reason", "id")
KINDS = ("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "ping")


@given(
    data=st.dictionaries(st.sampled_from(LOOSE), anything(LOOSE), max_size=4), kinds=st.lists(st.sampled_from(KINDS))
)
def test_a_reader_never_raises(data: dict[str, Any], kinds: list[str]) -> None:
    reader = messages.reader()
    reader.whole(data)
    for kind in kinds:
        reader.event({**data, "type": kind})
    assert reader.message["role"] == "assistant"


def test_the_module_is_a_wire_format() -> None:
    wire: WireFormat = messages
    assert wire.NAME == "messages"
