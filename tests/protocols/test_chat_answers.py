"""Answers of OpenAI Chat Completions: whole and streamed; those of external models; and the events of streams."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.model import Model
from random_requests import cut

from agentlightning.errors import EngineError
from agentlightning.protocols import chat
from agentlightning.protocols.base import (
    MAX_EVENT_BYTES,
    ApiError,
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    EventReader,
    TokenLogprob,
    ToolCall,
    ToolDelta,
    sse_event,
)

MESSAGES = [{"role": "user", "content": "hi"}]
REASONED = Choice(
    content=None,
    reasoning="hm",
    tool_calls=(ToolCall(id="call_0", name="f", arguments='{"a": 1}'),),
    finish_reason="tool_calls",
    sampled_tokens=2,
)


def parse(**given: Any) -> CompletionRequest:
    return chat.parse({"messages": MESSAGES, **given})


def answer(*choices: Choice, cached_tokens: int = 0) -> Completion:
    return Completion(
        call_id="1", model="m", created_s=5, prompt_tokens=3, choices=choices, cached_tokens=cached_tokens
    )


def events(data: bytes) -> list[Any]:
    return [json.loads(one) if one != b"[DONE]" else "[DONE]" for one in EventReader().feed(data)]


# --- answers ------------------------------------------------------------------------------------------------------------


def test_the_body_of_an_answer_has_every_choice_and_the_counts() -> None:
    body = json.loads(chat.body(parse(n=2), answer(REASONED, Choice(content="x", sampled_tokens=4), cached_tokens=2)))
    ChatCompletion.model_validate(body)
    first, second = body["choices"]
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert first["message"] == {
        "role": "assistant",
        "content": None,
        "reasoning": "hm",
        "reasoning_content": "hm",
        "tool_calls": [call],
        "refusal": None,
    }
    assert (first["index"], first["finish_reason"], first["logprobs"]) == (0, "tool_calls", None)
    assert (second["index"], second["finish_reason"], second["message"]["content"]) == (1, "stop", "x")
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_logprobs_list_tokens_their_bytes_and_their_alternatives() -> None:
    tokens = (TokenLogprob(text="é", logprob=-0.5, top=(TokenLogprob(text="a", logprob=-0.1),)),)
    body = json.loads(chat.body(parse(), answer(Choice(content="é", logprobs=tokens))))
    ChatCompletion.model_validate(body)
    alternative = {"token": "a", "logprob": -0.1, "bytes": [97]}
    token = {"token": "é", "logprob": -0.5, "bytes": [195, 169], "top_logprobs": [alternative]}
    assert body["choices"][0]["logprobs"]["content"] == [token]


def test_reasoning_that_was_not_asked_for_is_left_out_whole_and_streamed() -> None:
    request = parse(include_reasoning=False, stream=True)
    completion = answer(Choice(content="yes", reasoning="hm", sampled_tokens=3))
    whole = json.loads(chat.body(request, completion))
    assert "reasoning_content" not in whole["choices"][0]["message"]
    events = chat.stream(request, "0", "m", 5, 3)
    assert b"hm" not in events.delta(0, Delta(reasoning="hm"))
    assert b"yes" in events.delta(0, Delta(content="yes"))


def test_continuous_usage_counts_the_tokens_of_all_choices_so_far() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = chat.stream(parse(n=2, stream=True, stream_options=options), "0", "m", 5, 3)
    sent = events.delta(0, Delta(content="a", sampled_tokens=2)) + events.delta(1, Delta(content="b", sampled_tokens=5))
    counts = [json.loads(line[6:])["usage"] for line in sent.decode().splitlines() if line]
    assert [one["completion_tokens"] for one in counts] == [2, 7]
    assert [one["total_tokens"] for one in counts] == [5, 10]
    assert not parse(stream=True, stream_options={"continuous_usage_stats": True}).continuous_usage


def test_a_tool_call_is_streamed_as_its_name_and_then_pieces_of_its_arguments() -> None:
    stream = chat.stream(parse(stream=True), "1", "m", 5, 3)
    parts = events(
        stream.delta(0, Delta(tools=(ToolDelta(index=0, id="c", name="f"),)))
        + stream.delta(0, Delta(tools=(ToolDelta(index=0, arguments='{"a":'), ToolDelta(index=0, arguments="1}"))))
    )
    opening = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert [part["choices"][0]["delta"]["tool_calls"] for part in parts] == [
        [opening],
        [{"index": 0, "function": {"arguments": '{"a":'}}],
        [{"index": 0, "function": {"arguments": "1}"}}],
    ]


def test_a_stream_ends_with_reasons_usage_and_mark() -> None:
    stream = chat.stream(parse(stream=True, stream_options={"include_usage": True}), "1", "m", 5, 3)
    parts = events(stream.first() + stream.delta(0, Delta(content="x")) + stream.last(answer(REASONED)))
    assert [part["choices"][0]["delta"] for part in parts[:3]] == [
        {"role": "assistant", "content": ""},
        {"content": "x"},
        {},
    ]
    assert [part["usage"] for part in parts[:3]] == [None, None, None]
    assert parts[2]["choices"][0]["finish_reason"] == "tool_calls"
    assert (parts[3]["choices"], parts[3]["usage"]["total_tokens"]) == ([], 5)
    assert parts[4] == "[DONE]"
    assert {part["id"] for part in parts[:-1]} == {"chatcmpl-1"}


def test_the_last_text_has_the_finish_reason_and_tool_calls_have_it_after_them() -> None:
    tool = ToolDelta(index=0, id="c", name="f", arguments="{}")
    for end, kinds in (
        (Delta(content="x", last=True), [["content"]]),
        (Delta(content="x", tools=(tool,), last=True), [["content"], ["tool_calls"], []]),
        (Delta(last=True), [[]]),
    ):
        stream = chat.stream(parse(stream=True), "1", "m", 5, 3)
        assert stream.delta(0, end) == b""
        *parts, _ = events(stream.last(answer(Choice(content="x"))))
        assert [list(part["choices"][0]["delta"]) for part in parts] == kinds
        reasons = [part["choices"][0]["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + ["stop"]


def test_reasoning_text_and_logprobs_are_sent_once_each() -> None:
    stream = chat.stream(parse(stream=True), "1", "m", 5, 3)
    tokens = (TokenLogprob(text="é", logprob=-0.5),)
    first, second = events(stream.delta(0, Delta(content="é", reasoning="hm", logprobs=tokens)))
    assert first["choices"][0]["delta"] == {"reasoning": "hm", "reasoning_content": "hm"}
    assert len(first["choices"][0]["logprobs"]["content"]) == 1
    assert (second["choices"][0]["delta"], second["choices"][0]["logprobs"]) == ({"content": "é"}, None)


def test_a_failed_stream_carries_the_error() -> None:
    stream = chat.stream(parse(stream=True), "1", "m", 5, 3)
    (part,) = events(stream.failed(ApiError("gone", type="server_error", code="x")))
    assert part == {"error": {"message": "gone", "type": "server_error", "param": None, "code": "x"}}


texts = st.text(max_size=5)
choices = st.builds(
    lambda content, reasoning, calls, tokens, finish: Choice(
        content=content if content or not calls else None,
        reasoning=reasoning or None,
        tool_calls=tuple(ToolCall(id=f"c{at}", name=name, arguments=text) for at, (name, text) in enumerate(calls)),
        finish_reason=finish,
        sampled_tokens=tokens,
        logprobs=tuple(TokenLogprob(text=content, logprob=-1.0) for _ in range(tokens)),
    ),
    texts,
    texts,
    st.lists(st.tuples(st.text(min_size=1, max_size=3), texts), max_size=2),
    st.integers(0, 4),
    st.sampled_from(["stop", "length", "tool_calls"]),
)


def deltas(choice: Choice, pieces: int) -> list[Delta]:
    """A choice, cut up."""
    result = [Delta(reasoning=part) for part in cut(choice.reasoning or "", pieces)]
    result += [Delta(content=part) for part in cut(choice.content or "", pieces)]
    for at, call in enumerate(choice.tool_calls):
        result.append(Delta(tools=(ToolDelta(index=at, id=call.id, name=call.name),)))
        result += [Delta(tools=(ToolDelta(index=at, arguments=part),)) for part in cut(call.arguments, pieces)]
    return [*result, Delta(logprobs=choice.logprobs)]


@settings(max_examples=30)
@given(said=st.lists(choices, min_size=1, max_size=3), pieces=st.integers(1, 3), last=st.booleans())
def test_a_stream_put_together_by_the_sdk_is_the_whole_body(said: list[Choice], pieces: int, last: bool) -> None:
    request = parse(n=len(said), stream=True, stream_options={"include_usage": True}, logprobs=True)
    stream = chat.stream(request, "1", "m", 5, 3)
    data = [stream.first()]
    for index, choice in reversed(list(enumerate(said))):
        *parts, end = deltas(choice, pieces)
        data += [stream.delta(index, delta) for delta in (*parts, replace(end, last=last))]
    data.append(stream.last(answer(*said)))
    state = ChatCompletionStreamState()
    for part in events(b"".join(data))[:-1]:
        state.handle_chunk(ChatCompletionChunk.model_validate(part))
    together = state.current_completion_snapshot.to_dict()
    whole = ChatCompletion.model_validate_json(chat.body(request, answer(*said)))
    assert [compared(choice) for choice in together["choices"]] == [
        compared(choice) for choice in whole.to_dict()["choices"]
    ]
    assert together["usage"] == whole.to_dict()["usage"]


def compared(choice: Any) -> Any:
    message = choice["message"]
    calls = [{name: call[name] for name in ("id", "type")} for call in message.get("tool_calls") or []]
    functions = [
        {name: call["function"][name] for name in ("name", "arguments")} for call in message.get("tool_calls") or []
    ]
    logprobs = (choice["logprobs"] or {}).get("content") or []
    said = (message["content"] or "", message.get("reasoning_content") or "", calls, functions)
    return choice["index"], choice["finish_reason"], said, logprobs


# --- external models -----------------------------------------------------------------------------------------------------


@given(said=choices, pieces=st.integers(1, 3))
def test_a_reader_finds_the_same_message_in_a_whole_answer_and_in_its_chunks(said: Choice, pieces: int) -> None:
    request = parse(stream=True, stream_options={"include_usage": True})
    stream = chat.stream(request, "1", "m", 5, 3)
    data = [stream.first(), *(stream.delta(0, delta) for delta in deltas(said, pieces)), stream.last(answer(said))]
    whole, parts = chat.reader(), chat.reader()
    whole.whole(json.loads(chat.body(request, answer(said))))
    for part in events(b"".join(data))[:-1]:
        parts.event(part)
    assert parts.message == {**whole.message, "content": whole.message["content"] or ""}
    for one in (whole, parts):
        assert (one.finish_reason, one.prompt_tokens, one.sampled_tokens) == (
            said.finish_reason,
            3,
            said.sampled_tokens,
        )


def test_a_reader_takes_what_other_servers_name_otherwise() -> None:
    reader = chat.reader()
    message = {
        "reasoning": "hm",
        "content": [{"type": "text", "text": "a"}],
        "refusal": "no",
        "tool_calls": [
            {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}},
            {"id": "2", "function": {"name": "g", "arguments": {"a": 1}}},
        ],
    }
    reader.whole({"choices": [{"message": message, "finish_reason": "content_filter"}]})
    assert reader.message == {
        "role": "assistant",
        "content": "a",
        "refusal": "no",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "x"}},
            {"id": "2", "type": "function", "function": {"name": "g", "arguments": '{"a":1}'}},
        ],
    }
    assert reader.finish_reason == "content_filter"


def test_models_are_listed_and_found_by_name() -> None:
    listed = json.loads(chat.models(["a", "b"], 5))
    assert [entry["id"] for entry in listed["data"]] == ["a", "b"]
    assert Model.model_validate_json(chat.model("a", 5)).id == "a"


@given(values=st.lists(st.dictionaries(st.text(), st.text())), cuts=st.lists(st.integers(0, 200)))
def test_events_survive_any_cut_of_the_network(values: list[dict[str, str]], cuts: list[int]) -> None:
    data = b"".join(sse_event(value) for value in values)
    reader, found, start = EventReader(), list[bytes](), 0
    for place in [*sorted(place for place in cuts if place < len(data)), len(data)]:
        found += reader.feed(data[start:place])
        start = place
    assert [json.loads(one) for one in found] == values


def test_an_event_without_an_end_is_refused() -> None:
    reader = EventReader()
    for _ in range(MAX_EVENT_BYTES // (1 << 20)):
        assert not reader.feed(b"x" * (1 << 20))
    with pytest.raises(EngineError, match=f"an event of more than {MAX_EVENT_BYTES} bytes"):
        reader.feed(b"x")
