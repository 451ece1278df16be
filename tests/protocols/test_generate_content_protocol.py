"""Google generateContent on the wire: what is accepted, what is refused, what comes out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_requests import anything, requests
from sampled_answers import CALL_ID, answer, broken, choices, deltas, objects, said, streamed

from agentlightning.protocols import generate_content
from agentlightning.protocols.base import (
    ApiError,
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    TokenLogprob,
    WireFormat,
    assistant_message,
)
from agentlightning.protocols.sse import EventReader
from agentlightning.rendering.graph import normal

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


def chunks(data: bytes) -> list[Any]:
    return [json.loads(one) for one in EventReader().feed(data)]


def put_together(data: bytes) -> list[Any]:
    """The parts of a stream, as SDKs join them: neighbouring texts of a kind are one."""
    parts: list[Any] = []
    for chunk in chunks(data):
        for part in chunk["candidates"][0]["content"]["parts"]:
            if parts and "text" in part and "text" in parts[-1] and part.get("thought") == parts[-1].get("thought"):
                parts[-1] = {**parts[-1], "text": parts[-1]["text"] + part["text"]}
            else:
                parts.append(part)
    return parts if len(parts) == 1 else [part for part in parts if part.get("text") != ""]


# --- requests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        (
            {},
            {"model": "m", "max_tokens": None, "stop": (), "stream": False, "tools": None, "n": 1, "messages": [USER]},
        ),
        ({"generationConfig": {"maxOutputTokens": 9, "candidateCount": 2}}, {"max_tokens": 9, "n": 2}),
        ({"generation_config": {"max_output_tokens": 9, "stop_sequences": ["x"]}}, {"max_tokens": 9, "stop": ("x",)}),
        ({"generationConfig": {"temperature": 1, "topP": 0.5}}, {"forced": {"temperature": 1, "top_p": 0.5}}),
        ({"generationConfig": {"seed": 3}}, {"seed": 3}),
        ({"generationConfig": {"responseLogprobs": True, "logprobs": 2}}, {"logprobs": True, "top_logprobs": 2}),
        ({"generationConfig": {"presencePenalty": 0, "responseMimeType": "text/plain"}}, {"unsupported": {}}),
        ({"tools": TOOLS}, {"tools": [FUNCTION], "parse_tools": True, "unsupported": {}}),
        ({"tools": []}, {"tools": None, "parse_tools": False}),
        (
            {"tools": TOOLS, "toolConfig": {"functionCallingConfig": {"mode": "NONE"}}},
            {"tools": [FUNCTION], "parse_tools": False},
        ),
        (
            {"tools": TOOLS, "tool_config": {"function_calling_config": {"mode": "AUTO"}}},
            {"parse_tools": True, "unsupported": {}},
        ),
        ({"systemInstruction": {"parts": [{"text": "be"}]}}, {"messages": [{"role": "system", "content": "be"}, USER]}),
        (
            {"system_instruction": {"role": "user", "parts": [{"text": "a"}, {"text": "b"}]}},
            {"messages": [{"role": "system", "content": "ab"}, USER]},
        ),
    ],
)
def test_a_request_is_understood(given: dict[str, Any], understood: dict[str, Any]) -> None:
    request = parse(**given)
    assert {name: getattr(request, name) for name in understood} == understood


def test_the_path_says_which_model_and_whether_to_stream() -> None:
    request = parse(streamed=True)
    assert (request.model, request.stream) == ("m", True)


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
        },
        "required": ["OBJECT"],
    }


@pytest.mark.parametrize(
    "given",
    [
        {"safetySettings": [{"category": "x"}]},
        {"labels": {"a": "b"}},
        {"serviceTier": "flex"},
        {"store": True},
        {"generationConfig": {"mediaResolution": "LOW"}},
        {"generationConfig": {"thinkingConfig": {"thinkingBudget": 100, "thinkingLevel": "HIGH"}}},
        {"cachedContent": ""},
    ],
)
def test_what_changes_nothing_is_accepted(given: dict[str, Any]) -> None:
    assert parse(**given) == parse()


COLLECTED: dict[str, Any] = {
    "responseModalities": ["IMAGE"],
    "speechConfig": {"voice": "v"},
}


@pytest.mark.parametrize("name", COLLECTED)
def test_what_would_change_sampling_is_collected_with_its_value(name: str) -> None:
    assert config(**{name: COLLECTED[name]}).unsupported == {f"generationConfig.{name}": COLLECTED[name]}
    assert refusal(generationConfig={name: ("x",)}).param == f"generationConfig.{name}"


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
    ],
)
def test_a_schema_is_the_grammar_of_the_content(given: dict[str, Any], content: dict[str, Any]) -> None:
    assert config(**given).grammar == {"content": content}


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
    ],
)
def test_a_forced_function_is_the_grammar_of_the_call(given: dict[str, Any], call: dict[str, Any]) -> None:
    assert parse(tools=TOOLS, toolConfig={"functionCallingConfig": given}).grammar == {"tool_call": call}


def test_a_count_of_thousands_of_digits_stays_for_the_grammar_to_refuse() -> None:
    schema = {"type": "ARRAY", "minItems": "9" * 5000}
    [content] = parse(generationConfig={"responseSchema": schema}).grammar.values()
    assert content["schema"]["minItems"] == "9" * 5000


def test_the_providers_tools_are_collected() -> None:
    request = parse(tools=[*TOOLS, {"googleSearch": {}}, {"codeExecution": {}}])
    assert request.tools == [FUNCTION]
    assert request.unsupported == {"tools[1].googleSearch": {}, "tools[2].codeExecution": {}}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"contents": None}, "contents"),
        ({"contents": []}, "contents"),
        ({"contents": "hi"}, "contents"),
        ({"contents": ["hi"]}, "contents[0]"),
        ({"contents": [{"role": "system", "parts": []}]}, "contents[0].role"),
        ({"contents": [{"parts": "hi"}]}, "contents[0].parts"),
        ({"contents": [{"parts": ["hi"]}]}, "contents[0].parts[0]"),
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
        ({"systemInstruction": "be"}, "systemInstruction"),
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
        ({"safetySettings": {}}, "safetySettings"),
        ({"tools": {}}, "tools"),
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


def test_settings_for_limits_go_by_the_names_of_chat() -> None:
    given = {"maxOutputTokens": 9, "candidateCount": 2, "temperature": 0.5, "topP": 0.9}
    assert generate_content.external_settings({"generationConfig": given}) == {
        "max_tokens": 9, "n": 2, "temperature": 0.5, "top_p": 0.9,
    }  # fmt: skip
    assert generate_content.external_settings({"generationConfig": 1}) == {}


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


@given(
    data=requests("systemInstruction", "generationConfig", "toolConfig", "safetySettings", "cachedContent"),
    contents=st.lists(content, min_size=1, max_size=2) | anything(),
    settings=st.dictionaries(
        st.sampled_from([*COLLECTED, "maxOutputTokens", "thinkingConfig"]), anything(), max_size=2
    ),
    trained=st.booleans(),
)
def test_random_requests_are_understood_or_refused(
    data: dict[str, Any], contents: Any, settings: dict[str, Any], trained: bool
) -> None:
    body = {"generationConfig": settings, **data, "contents": contents, "model": "m", "stream": False}
    try:
        request = generate_content.parse(body, trained)
    except ApiError as refused:
        message, param = refused.message, refused.param
        assert message.startswith(f"{param}")
    else:
        assert all(isinstance(one["role"], str) for one in request.messages)


# --- answers ------------------------------------------------------------------------------------------------------------

REASONED = said("I look.", "hm", (("f", '{"a": 1}'),))
THOUGHTS = {"thinkingConfig": {"includeThoughts": True}}


def test_the_body_of_an_answer_has_a_part_for_every_part_and_the_counts() -> None:
    body = json.loads(generate_content.body(config(**THOUGHTS), answer(REASONED, cached_tokens=2)))
    assert body == {
        "candidates": [
            {
                "content": {
                    "parts": [
                        {"text": "hm", "thought": True},
                        {"text": "I look."},
                        {"functionCall": {"id": "call_0", "name": "f", "args": {"a": 1}}},
                    ],
                    "role": "model",
                },
                "finishReason": "STOP",
                "index": 0,
            }
        ],
        "usageMetadata": {
            "promptTokenCount": 3,
            "candidatesTokenCount": 4,
            "totalTokenCount": 7,
            "cachedContentTokenCount": 2,
        },
        "modelVersion": "m",
        "responseId": CALL_ID,
    }


def test_thoughts_that_were_not_asked_for_are_not_given() -> None:
    body = json.loads(generate_content.body(parse(), answer(REASONED)))
    assert [list(part) for part in body["candidates"][0]["content"]["parts"]] == [["text"], ["functionCall"]]
    assert b"hm" not in streamed(stream(), REASONED)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [(said("a"), "STOP"), (REASONED, "STOP"), (said("a", finish="length"), "MAX_TOKENS")],
)
def test_the_reason_to_stop_is_said_once_at_the_end(choice: Choice, reason: str) -> None:
    whole = json.loads(generate_content.body(parse(), answer(choice)))
    assert whole["candidates"][0]["finishReason"] == reason
    given = [chunk["candidates"][0].get("finishReason") for chunk in chunks(streamed(stream(), choice))]
    assert given == [None] * (len(given) - 1) + [reason]


@given(choice=choices(objects | broken), pieces=st.integers(1, 4))
def test_a_stream_put_together_is_the_whole_body(choice: Choice, pieces: int) -> None:
    whole = json.loads(generate_content.body(config(**THOUGHTS), answer(choice, cached_tokens=1)))
    data = streamed(stream(**THOUGHTS), choice, pieces, cached_tokens=1)
    parts = [part for part in whole["candidates"][0]["content"]["parts"] if part.get("text") != ""]
    assert [part for part in put_together(data) if part.get("text") != ""] == parts
    last = chunks(data)[-1]
    assert {name: last[name] for name in ("usageMetadata", "modelVersion", "responseId")} == {
        name: whole[name] for name in ("usageMetadata", "modelVersion", "responseId")
    }


@given(choice=choices(objects | broken), pieces=st.integers(1, 4), each=st.booleans())
def test_what_an_agent_sends_back_of_an_answer_is_the_message_that_was_recorded(
    choice: Choice, pieces: int, each: bool
) -> None:
    whole = json.loads(generate_content.body(config(**THOUGHTS), answer(choice)))["candidates"][0]["content"]
    data = streamed(stream(**THOUGHTS), choice, pieces)
    of_chunks = [chunk["candidates"][0]["content"] for chunk in chunks(data)]
    for contents in ([whole], of_chunks if each else [{"role": "model", "parts": put_together(data)}]):
        _, sent_back, _ = parse(contents=[*HI, *contents, *HI]).messages
        assert normal(sent_back) == normal(assistant_message(choice))


def test_candidates_of_a_stream_are_told_apart() -> None:
    one, other = said("a", None, (("f", "{}"),)), said("b", finish="length")
    begun = stream()
    data = b"".join(
        begun.delta(index, delta) for index, choice in ((0, one), (1, other)) for delta in deltas(choice, 1)
    )
    data += begun.last(Completion(call_id=CALL_ID, model="m", created_s=5, prompt_tokens=3, choices=(one, other)))
    found: dict[int, list[Any]] = {0: [], 1: []}
    for chunk in chunks(data):
        (candidate,) = chunk["candidates"]
        found[candidate["index"]].append((candidate["content"]["parts"], candidate.get("finishReason")))
    assert found[0][0] == ([{"text": "a"}], None)
    assert found[0][-1][1] == "STOP"
    assert found[1] == [([{"text": "b"}], None), ([{"text": ""}], "MAX_TOKENS")]


def test_log_probabilities_go_with_their_text() -> None:
    token = TokenLogprob(text="a", logprob=-0.5, top=(("a", -0.5), ("b", -1.0)))
    choice = Choice(content="a", logprobs=(token,))
    body = json.loads(generate_content.body(parse(), answer(choice)))
    expected = {
        "topCandidates": [
            {"candidates": [{"token": "a", "logProbability": -0.5}, {"token": "b", "logProbability": -1.0}]}
        ],
        "chosenCandidates": [{"token": "a", "logProbability": -0.5}],
    }
    assert body["candidates"][0]["logprobsResult"] == expected
    begun = stream()
    assert begun.delta(0, Delta(logprobs=(token,))) == b""
    (chunk,) = chunks(begun.delta(0, Delta(content="a")))
    assert chunk["candidates"][0]["logprobsResult"] == expected


def test_a_failed_stream_ends_with_the_error() -> None:
    begun = stream()
    data = begun.first() + begun.delta(0, Delta(content="x")) + begun.failed(ApiError("gone", status=503))
    assert chunks(data)[-1] == {"error": {"code": 503, "message": "gone", "status": "UNAVAILABLE"}}


def test_an_error_names_the_field_and_when_to_come_back() -> None:
    error = json.loads(generate_content.error(ApiError("no", status=429, param="contents", retry_after_s=3)))["error"]
    assert (error["code"], error["status"]) == (429, "RESOURCE_EXHAUSTED")
    bad, retry = error["details"]
    assert bad["fieldViolations"] == [{"field": "contents", "description": "no"}]
    assert retry["retryDelay"] == "3s"


@pytest.mark.parametrize(
    ("status", "known"),
    [(400, "INVALID_ARGUMENT"), (404, "NOT_FOUND"), (413, "INVALID_ARGUMENT"), (502, "UNAVAILABLE")],
)
def test_an_error_has_googles_status(status: int, known: str) -> None:
    assert json.loads(generate_content.error(ApiError("no", status=status)))["error"]["status"] == known


# --- external models -----------------------------------------------------------------------------------------------------


@given(choice=choices(objects), pieces=st.integers(1, 4))
def test_a_reader_finds_the_same_message_in_a_whole_answer_and_in_its_chunks(choice: Choice, pieces: int) -> None:
    whole, parts = generate_content.reader(), generate_content.reader()
    whole.whole(json.loads(generate_content.body(config(**THOUGHTS), answer(choice, cached_tokens=2))))
    for chunk in chunks(streamed(stream(**THOUGHTS), choice, pieces, cached_tokens=2)):
        parts.event(chunk)
    for one in (whole, parts):
        assert normal(one.message) == normal(assistant_message(choice))
        assert (one.finish_reason, one.prompt_tokens, one.sampled_tokens) == (choice.finish_reason, 3, 4)


LOOSE = ("candidates", "content", "parts", "text", "functionCall", "args", "usageMetadata", "index", "finishReason")


@given(data=st.dictionaries(st.sampled_from(LOOSE), anything(LOOSE), max_size=4))
def test_a_reader_never_raises(data: dict[str, Any]) -> None:
    reader = generate_content.reader()
    reader.whole(data)
    reader.event({"candidates": [{"content": {"parts": [data, {"functionCall": data}]}}], "usageMetadata": data})
    assert reader.message["role"] == "assistant"


def test_the_module_is_a_wire_format() -> None:
    wire: WireFormat = generate_content
    assert wire.NAME == "generate_content"
