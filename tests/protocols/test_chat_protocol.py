"""OpenAI Chat Completions on the wire: what is accepted, what is refused, what comes out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.protocols import chat
from agentlightning.protocols.neutral import Answer, Delta, Refusal, Request, TokenLogprob, ToolCall
from agentlightning.protocols.sse import EventReader, event

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
ANSWER = Answer(
    call_id="1",
    model="m",
    created_s=5,
    content=None,
    finish_reason="tool_calls",
    tool_calls=(ToolCall(id="call_0", name="f", arguments="{}"),),
    prompt_tokens=3,
    sampled_tokens=2,
)


def parse(**fields: Any) -> Request:
    return chat.parse(json.dumps({"messages": MESSAGES, **fields}).encode())


def events(data: bytes) -> list[Any]:
    return [json.loads(one) if one != b"[DONE]" else "[DONE]" for one in EventReader().feed(data)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"model": "", "stop": (), "stream": False, "max_tokens": None, "tools": None}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "y"]}, {"stop": ("x", "y")}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 6}, {"max_tokens": 6}),
        ({"stream": True, "stream_options": {"include_usage": True}}, {"stream": True, "include_usage": True}),
        ({"tools": TOOLS}, {"parse_tools": True}),
        ({"tools": TOOLS, "tool_choice": "none"}, {"parse_tools": False, "tools": TOOLS}),
        ({"tools": []}, {"tools": None, "parse_tools": False}),
        ({"logprobs": True, "top_logprobs": 0}, {"logprobs": True}),
    ],
)
def test_a_request_is_understood(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    request = parse(**fields)
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "seed": None},
        {"temperature": 0.3, "top_p": 0.5},
        {"response_format": {"type": "text"}},
        {"user": "u", "metadata": {}, "store": False, "parallel_tool_calls": True, "made_up": [1]},
    ],
)
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert parse(**fields) == parse()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"top_k": 5}, "top_k"),
        ({"seed": 0}, "seed"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"stream": 1}, "stream"),
        ({"model": 1}, "model"),
        ({"stop": [1]}, "stop"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
    ],
)
def test_what_would_change_sampling_or_is_no_value_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refusal) as refused:
        parse(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.message.startswith(f"{param}: ")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"messages": "hi"}', b'{"messages": [1]}'])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal):
        chat.parse(body)


def test_the_body_of_an_answer_with_tool_calls() -> None:
    body = json.loads(chat.body(ANSWER))
    message = body["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [{"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_a_stream_ends_with_tool_calls_reason_usage_and_mark() -> None:
    stream = chat.Stream(parse(stream=True, stream_options={"include_usage": True}), "1", "m", 5)
    parts = events(stream.first() + stream.delta(Delta(content="x")) + stream.last(ANSWER))
    assert parts[-1] == "[DONE]"
    deltas = [part["choices"][0]["delta"] for part in parts[:-2]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1] == {"content": "x"}
    assert deltas[2]["tool_calls"][0]["index"] == 0
    assert parts[3]["choices"][0]["finish_reason"] == "tool_calls"
    assert (parts[4]["choices"], parts[4]["usage"]["total_tokens"]) == ([], 5)
    assert {part["id"] for part in parts[:-1]} == {chat.answer_id("1")}


def test_reasoning_and_logprobs_travel_with_the_text() -> None:
    stream = chat.Stream(parse(), "1", "m", 5)
    tokens = (TokenLogprob(text="é", logprob=-0.5),)
    (part,) = events(stream.delta(Delta(content="é", reasoning="hm"), tokens))
    assert part["choices"][0]["delta"] == {"reasoning_content": "hm", "content": "é"}
    expected = {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": []}
    assert part["choices"][0]["logprobs"]["content"] == [expected]


@given(values=st.lists(st.dictionaries(st.text(), st.text())), cuts=st.lists(st.integers(0, 200)))
def test_events_survive_any_cut_of_the_network(values: list[dict[str, str]], cuts: list[int]) -> None:
    data = b"".join(event(value) for value in values)
    reader, found, start = EventReader(), list[bytes](), 0
    for cut in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        found += reader.feed(data[start:cut])
        start = cut
    assert [json.loads(one) for one in found] == values
