"""Requests of Google's generateContent: understood, refused, and passed on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from random_requests import anything
from sampled_answers import CALL_ID

from agentlightning.protocols import generate_content
from agentlightning.protocols.base import (
    ApiError,
    CompletionRequest,
)

HI = [{"role": "user", "parts": [{"text": "hi"}]}]
USER = {"role": "user", "content": "hi"}
DECLARED = {"name": "f", "description": "d", "parametersJsonSchema": {"type": "object"}}
TOOLS = [{"functionDeclarations": [DECLARED]}]
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
CALL_PART = {"functionCall": {"id": "c1", "name": "f", "args": {"a": 1}}}
IMAGE = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}
AUDIO = {"inlineData": {"mimeType": "audio/wav", "data": "AA=="}}
FILE = {"fileData": {"mimeType": "image/png", "fileUri": "https://example.org/a.png"}}


def parse(trained: bool = True, streamed: bool = False, **given: Any) -> CompletionRequest:
    body = generate_content.with_route({"contents": HI, **given}, "m", streamed)
    return generate_content.parse(body, trained)


def config(**given: Any) -> CompletionRequest:
    return parse(generationConfig=given)


def refusal(**given: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        parse(**given)
    assert refused.value.status == 400
    assert refused.value.message.startswith(f"{refused.value.param}: ")
    return refused.value


def stream(**given: Any) -> Any:
    return generate_content.stream(config(**given), CALL_ID, "m", 5, 3)


def test_a_conversation_becomes_messages_of_the_one_form() -> None:
    conversation = [
        {"parts": [{"text": "a"}, {"text": "b"}]},
        {"role": "model", "parts": [{"text": "hm", "thought": True}, {"text": "I "}]},
        {"role": "model", "parts": [{"text": "look.", "thoughtSignature": "AA=="}, CALL_PART]},
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"id": "c1", "name": "f", "response": {"output": "sunny"}}},
                {"text": "and?"},
            ],
        },
        {"role": "model", "parts": [CALL_PART, {"functionCall": {"name": "g"}}]},
        {
            "role": "function",
            "parts": [
                {"function_response": {"name": "g", "response": {"error": "no"}}},
                {"function_response": {"name": "f", "response": {"a": 1, "b": 2}}},
            ],
        },
        {"role": "model", "parts": []},
        {"role": "user", "parts": []},
    ]
    other = {"id": "call_2", "type": "function", "function": {"name": "g", "arguments": "{}"}}
    assert parse(contents=conversation).messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, other]},
        {"role": "tool", "tool_call_id": "call_2", "content": "no", "is_error": True},
        {"role": "tool", "tool_call_id": "c1", "content": '{"a":1,"b":2}'},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]


def test_a_response_of_no_known_call_keeps_its_id_or_its_name() -> None:
    result = {"name": "f", "response": {"output": [1]}}
    for part, answered in ((result, "f"), ({**result, "id": "x"}, "x")):
        (message,) = parse(contents=[{"role": "user", "parts": [{"functionResponse": part}]}]).messages
        assert message == {"role": "tool", "tool_call_id": answered, "content": "[1]"}


def test_googles_schema_becomes_json_schema() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "OBJECT": {"type": "STRING", "min_length": "1", "nullable": True},
            "list": {"type": "ARRAY", "items": {"anyOf": [{"type": "INTEGER"}, {"type": "TYPE_UNSPECIFIED"}]}},
            "one": {"type": "STRING", "format": "enum", "enum": ["a"], "nullable": True},
        },
        "propertyOrdering": ["OBJECT", "list"],
        "required": ["OBJECT"],
    }
    request = parse(tools=[{"functionDeclarations": [{"name": "f", "parameters": schema}]}])
    assert request.tools is not None
    assert request.tools[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "OBJECT": {"type": ["string", "null"], "minLength": 1},
            "list": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {}]}},
            "one": {"type": ["string", "null"], "enum": ["a", None]},
        },
        "required": ["OBJECT"],
    }


COLLECTED: dict[str, Any] = {
    "responseModalities": ["IMAGE"],
    "speechConfig": {"voice": "v"},
}


@pytest.mark.parametrize(
    ("given", "content"),
    [
        (
            {"responseMimeType": "application/json"},
            {"kind": "json_object", "field": "generationConfig.responseMimeType"},
        ),
        (
            {"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"}},
            {"kind": "json_schema", "schema": {"type": "object"}, "field": "generationConfig.responseSchema"},
        ),
        (
            {"responseJsonSchema": {"type": "array"}},
            {"kind": "json_schema", "schema": {"type": "array"}, "field": "generationConfig.responseJsonSchema"},
        ),
        (
            {"responseMimeType": "text/x.enum", "responseSchema": {"type": "STRING", "enum": ["a", "b"]}},
            {"kind": "choice", "choices": ["a", "b"], "field": "generationConfig.responseSchema"},
        ),
    ],
)
def test_a_schema_is_the_grammar_of_the_content(given: dict[str, Any], content: dict[str, Any]) -> None:
    assert config(**given).grammar == {"content": content}


@pytest.mark.parametrize("schema", [{}, {"responseSchema": {"type": "STRING"}}, {"responseSchema": {"enum": ["a", 1]}}])
def test_an_enum_as_the_type_of_the_response_needs_one(schema: dict[str, Any]) -> None:
    refused = refusal(generationConfig={"responseMimeType": "text/x.enum", **schema})
    assert (refused.param or "").startswith("generationConfig.responseSchema")


def test_penalties_and_top_k_go_to_the_logits() -> None:
    request = config(topK=5, presencePenalty=0.5, frequencyPenalty=0)
    assert (request.logits, request.unsupported) == ({"top_k": 5, "presence_penalty": 0.5}, {})


PATH = "toolConfig.functionCallingConfig"


@pytest.mark.parametrize(
    ("given", "call"),
    [
        ({"mode": "ANY"}, {"required": True, "names": None, "field": PATH}),
        ({"mode": "ANY", "allowedFunctionNames": ["f"]}, {"required": True, "names": ["f"], "field": PATH}),
        ({"mode": "VALIDATED"}, {"required": False, "names": None, "field": PATH}),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["f"]}, {"required": False, "names": ["f"], "field": PATH}),
    ],
)
def test_a_forced_function_is_the_grammar_of_the_call(given: dict[str, Any], call: dict[str, Any]) -> None:
    assert parse(tools=TOOLS, toolConfig={"functionCallingConfig": given}).grammar == {"tool_call": call}


def test_the_providers_tools_are_collected() -> None:
    request = parse(tools=[*TOOLS, {"googleSearch": {}}, {"codeExecution": {}}])
    assert request.tools == [FUNCTION]
    assert request.unsupported == {"tools[1].googleSearch": {}, "tools[2].codeExecution": {}}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"contents": None}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": 1}, "contents"),
        ({"contents": [1]}, "contents[0]"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents[0].role"),
        ({"contents": [{"parts": 1}]}, "contents[0].parts"),
        ({"contents": [{"parts": [1]}]}, "contents[0].parts[0]"),
        ({"contents": [{"parts": [{"inlineData": {"data": 1}}]}]}, "contents[0].parts[0].inlineData.data"),
        ({"contents": [{"parts": [{"inlineData": {"data": "§"}}]}]}, "contents[0].parts[0].inlineData.data"),
        ({"contents": [{"parts": [{"inline_data": []}]}]}, "contents[0].parts[0].inlineData"),
        ({"contents": [{"parts": [AUDIO]}]}, "contents[0].parts[0]"),
        ({"contents": [{"role": "model", "parts": [IMAGE]}]}, "contents[0].parts[0]"),
        ({"contents": [{"role": "model", "parts": [{"executableCode": {}}]}]}, "contents[0].parts[0]"),
        (
            {"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f", "args": []}}]}]},
            "contents[0].parts[0].functionCall.args",
        ),
        (
            {"contents": [{"parts": [{"functionResponse": {"name": "f", "parts": [FILE]}}]}]},
            "contents[0].parts[0].functionResponse.parts[0].fileData.fileUri",
        ),
        ({"systemInstruction": 1}, "systemInstruction"),
        ({"systemInstruction": {"parts": [IMAGE]}}, "systemInstruction.parts[0]"),
        ({"generationConfig": []}, "generationConfig"),
        ({"generationConfig": {"maxOutputTokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"candidateCount": 0}}, "generationConfig.candidateCount"),
        ({"generationConfig": {"temperature": 3}}, "generationConfig.temperature"),
        ({"generationConfig": {"stopSequences": [""]}}, "generationConfig.stopSequences"),
        ({"generationConfig": {"logprobs": 3}}, "generationConfig.logprobs"),
        ({"generationConfig": {"topK": "5"}}, "generationConfig.topK"),
        (
            {"generationConfig": {"thinkingConfig": {"includeThoughts": 1}}},
            "generationConfig.thinkingConfig.includeThoughts",
        ),
        ({"tools": 1}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parameters": 1}]}]},
            "tools[0].functionDeclarations[0].parameters",
        ),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}}, "toolConfig.functionCallingConfig.mode"),
    ],
)
def test_a_value_of_another_kind_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    assert refusal(**given).param == param


def test_images_are_read_in_both_alphabets_of_base64_and_stand_in_their_order() -> None:
    data = bytes([251, 255, 254, 0])
    plain, for_urls = "+//+AA==", "-__-AA"
    parts = [
        {"text": "a"},
        {"inlineData": {"mimeType": "image/png", "data": plain}},
        {"inline_data": {"mime_type": "image/png", "data": for_urls}},
    ]
    request = parse(contents=[{"parts": parts}])
    assert [image.data for image in request.images] == [data, data]
    assert [image.path for image in request.images] == [f"contents[0].parts[{at}].inlineData.data" for at in (1, 2)]
    picture = {"type": "image", "image": request.images[0].hash}
    assert request.messages == [{"role": "user", "content": [{"type": "text", "text": "a"}, picture, picture]}]


def test_a_request_to_an_external_model_keeps_what_only_that_model_reads() -> None:
    contents = [{"role": "user", "parts": [{"text": "what?"}, IMAGE]}, {"role": "model", "parts": [{"codeX": {}}]}]
    request = parse(False, True, contents=contents, tools=[*TOOLS, {"googleSearch": {}}], generationConfig={"topK": 1})
    assert request.messages == [
        {"role": "user", "content": [{"text": "what?"}, IMAGE]},
        {"role": "assistant", "content": [{"codeX": {}}]},
    ]
    assert request.tools == [{"type": "function", "function": DECLARED}, {"googleSearch": {}}]
    assert request.stream


def test_the_tokens_of_a_request_within_are_counted() -> None:
    assert generate_content.count_request({"contents": HI}) == {"contents": HI}
    assert generate_content.count_request({"generate_content_request": {"contents": HI}}) == {"contents": HI}


a_part = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("text", "thought", "functionCall", "function_response", "inlineData", "id"), anything()),
)
content = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "model", "function", "system"]),
        "parts": st.lists(a_part, max_size=2) | anything(),
    }
)
