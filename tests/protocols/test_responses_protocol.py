"""OpenAI Responses on the wire: what is accepted, what is refused, what comes out."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import strategies as st
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming as Fields
from openai.types.shared_params import Reasoning
from random_requests import anything

from agentlightning.protocols import responses
from agentlightning.protocols.base import (
    ApiError,
    CompletionRequest,
)

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": False}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = {"type": "input_image", "image_url": "u"}


def parse(**given: Any) -> CompletionRequest:
    return responses.parse({"model": "m", "input": "hi", **given})


def refusal(**given: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        parse(**given)
    assert refused.value.status == 400
    assert refused.value.message.startswith(f"{refused.value.param}: ")
    return refused.value


# --- requests -----------------------------------------------------------------------------------------------------------


def test_a_conversation_becomes_messages_of_the_one_form() -> None:
    conversation = [
        {"type": "message", "role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        CALL,
        {**CALL, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": "yes"},
        CALL,
        {"type": "reasoning", "id": "rs_2", "summary": []},
        CALL,
    ]
    assert parse(input=conversation).messages == [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [CALLED, {**CALLED, "id": "d"}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "tool", "tool_call_id": "d", "content": "rain"},
        {"role": "assistant", "content": "no"},
        {"role": "assistant", "content": "yes", "tool_calls": [CALLED]},
        {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    ]


@pytest.mark.parametrize(
    ("item", "reasoning"),
    [
        ({"content": [{"type": "reasoning_text", "text": "a"}, {"type": "reasoning_text", "text": "b"}]}, "ab"),
        ({"summary": [{"type": "summary_text", "text": "short"}]}, "short"),
        ({"content": None, "encrypted_content": "agl:" + base64.b64encode("mé".encode()).decode()}, "mé"),
        ({"content": [], "encrypted_content": "gAAAAB-of-another-model"}, None),
        ({"encrypted_content": "agl:not base64"}, None),
        ({"encrypted_content": "agl:é"}, None),
        ({"encrypted_content": "agl:/w=="}, None),
    ],
)
def test_reasoning_is_read_from_what_an_item_has_of_it(item: dict[str, Any], reasoning: str | None) -> None:
    items = [{"type": "reasoning", **item}, {"role": "assistant", "content": "x"}]
    (message,) = parse(input=items).messages
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, "x")


NO_EFFECT: dict[str, Any] = {
    "access_programs": {"cyber": "standard"},
    "background_options": {"completion_window": "soonest"},
    "image": {"context_compression": "auto"},
    "include": ["code_interpreter_call.outputs"],
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "auto",
    "store": False,
    "stream_options": {"include_obfuscation": False},
    "user": "u",
}
COLLECTED: dict[str, Any] = {
    "moderation": {"model": "o"},
    "typical_p": 0.5,
    "n": 2,
    "logprobs": True,
    "response_format": {"type": "json_object"},
    "max_tokens": 7,
}
NOT_OURS: dict[str, Any] = {"context_management": [{"type": "compaction"}]}
REFUSED: dict[str, Any] = {
    "background": True,
    "conversation": "conv_1",
    "prompt": {"id": "pmpt_1"},
    "enable_response_messages": True,
    "previous_input_messages": [{"role": "user", "content": "hi"}],
    "previous_response": {"id": "resp_1"},
}
HONOURED = {"input", "instructions", "max_output_tokens", "model", "parallel_tool_calls", "previous_response_id"}
HONOURED |= {
    "truncation", "reasoning", "stream", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p",
}  # fmt: skip
REASONING = {"context": "all_turns", "mode": "pro"}


def test_every_field_that_the_sdk_documents_stands_in_a_table_here() -> None:
    assert (
        Fields.__annotations__.keys()
        <= HONOURED | NO_EFFECT.keys() | COLLECTED.keys() | NOT_OURS.keys() | REFUSED.keys()
    )
    assert Reasoning.__annotations__.keys() <= REASONING.keys() | {"effort", "summary", "generate_summary"}


@pytest.mark.parametrize("name", NO_EFFECT)
def test_what_changes_nothing_is_accepted(name: str) -> None:
    given, plain = parse(**{name: NO_EFFECT[name]}), parse()
    assert (given.unsupported, given.messages, given.logprobs) == ({}, plain.messages, False)


@pytest.mark.parametrize("name", COLLECTED)
def test_what_would_change_sampling_is_collected_with_its_value(name: str) -> None:
    assert parse(**{name: COLLECTED[name]}).unsupported == {name: COLLECTED[name]}


@pytest.mark.parametrize("name", REASONING)
def test_each_wish_about_reasoning_is_collected(name: str) -> None:
    assert parse(reasoning={name: REASONING[name]}).unsupported == {f"reasoning.{name}": REASONING[name]}


def test_effort_and_verbosity_are_accepted_and_recorded() -> None:
    request = parse(text={"verbosity": "low"}, reasoning={"effort": "high"})
    assert request.not_applied == {"text.verbosity": "low", "reasoning.effort": "high"}
    assert request.unsupported == {}


def test_truncation_is_noted_for_prompts_that_do_not_fit() -> None:
    assert [parse(truncation=one).truncates for one in ("auto", "disabled", None)] == [True, False, False]
    assert refusal(truncation="some").param == "truncation"


def test_a_request_to_an_external_model_keeps_what_only_that_model_reads() -> None:
    search, asked = {"type": "web_search_call", "id": "ws_1"}, {"role": "user", "content": [IMAGE]}
    data = {"model": "o", "input": [asked, search, IMAGE], "tools": [{"type": "web_search"}], "background": True}
    assert responses.parse(
        {**data, "previous_response_id": "resp_x", "stream": True}, trained=False
    ) == CompletionRequest(
        model="o",
        messages=[asked, {"role": "assistant", "content": [search]}, {"role": "user", "content": [IMAGE]}],
        tools=[{"type": "web_search"}],
        stream=True,
        previous_id="x",
    )


NAMES = ("type", "role", "content", "text", "summary", "encrypted_content", "call_id", "name", "arguments", "id")
TYPES = ("message", "reasoning", "function_call", "function_call_output", "item_reference")
item = st.fixed_dictionaries(
    {"type": st.sampled_from(TYPES), "role": st.sampled_from(["user", "assistant"])},
    optional=dict.fromkeys(("content", "output", "summary", *NAMES[5:]), anything(NAMES)),
)


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_only_openais_service_could_do_is_collected(name: str) -> None:
    assert parse(**{name: NOT_OURS[name]}).unsupported == {name: NOT_OURS[name]}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_make_it_another_response_is_refused(name: str) -> None:
    assert list(parse(**{name: REFUSED[name]}).refused) == [name]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"model": 1}, "model"),
        ({"instructions": []}, "instructions"),
        ({"previous_response_id": 1}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"include": "all"}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"reasoning": "low"}, "reasoning"),
        ({"reasoning": {"summary": 1}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": 1}}, "reasoning.generate_summary"),
        ({"text": "json"}, "text"),
        ({"text": {"format": "json"}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": 1}}, "text.verbosity"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOL}, "tools"),
        ({"tools": [TOOL, {"type": 1}]}, "tools[1]"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"tools": [{**TOOL, "parameters": []}]}, "tools[0].parameters"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    assert refusal(**given).param == param


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "tool", "content": ""}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        (
            {"role": "user", "content": [{"type": "input_text", "text": "what?"}, IMAGE]},
            "input[0].content[1].image_url",
        ),
        ({"role": "assistant", "content": [{"type": "output_text", "text": 1}]}, "input[0].content[0]"),
        ({**CALL, "arguments": 1}, "input[0].arguments"),
        ({**CALL, "call_id": None}, "input[0].call_id"),
        ({**CALL, "name": 1}, "input[0].name"),
        ({"type": "function_call_output", "call_id": 1, "output": ""}, "input[0].call_id"),
        ({"type": "function_call_output", "call_id": "c", "output": [IMAGE]}, "input[0].output[0].image_url"),
        ({"type": "reasoning", "summary": "short"}, "input[0].summary"),
        ({"type": "reasoning", "summary": [], "content": [IMAGE]}, "input[0].content[0]"),
        ({"type": "reasoning", "summary": [], "encrypted_content": 1}, "input[0].encrypted_content"),
        ({"type": "item_reference", "id": "msg_1"}, "input[0]"),
        ({"type": "web_search_call", "id": "ws_1"}, "input[0]"),
    ],
)
def test_an_item_that_the_policy_cannot_read_is_refused_by_its_path(item: Any, param: str) -> None:
    assert refusal(input=[item]).param == param
