"""Answers of Anthropic Messages: whole, streamed, sent back; and those of external models."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic, APIStatusError
from anthropic.types import Message, MessageTokensCount, ModelInfo
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_answers import CALL_ID, answer, broken, choices, events, objects, said, streamed

from agentlightning.protocols import messages
from agentlightning.protocols.base import ApiError, Choice, CompletionRequest, Delta, assistant_message
from agentlightning.rendering.graph import normal

HI = [{"role": "user", "content": "hi"}]
TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
THINKING = {"type": "adaptive"}


def parse(**given: Any) -> CompletionRequest:
    return messages.parse({"model": "m", "max_tokens": 9, "messages": HI, **given})


def stream() -> Any:
    return messages.stream(parse(stream=True, thinking=THINKING), CALL_ID, "m", 5, 3)


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


@settings(max_examples=30)
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


def test_omitted_thinking_is_a_signed_block_without_text() -> None:
    request = parse(thinking={"type": "adaptive", "display": "omitted"})
    block = json.loads(messages.body(request, answer(REASONED)))["content"][0]
    assert block == {"type": "thinking", "thinking": "", "signature": CALL_ID}
    data = streamed(messages.stream(request, CALL_ID, "m", 5, 3), REASONED)
    assert heard(data).content[0].to_dict() == block
    assert b"thinking_delta" not in data
    (sent_back,) = parse(
        messages=[{"role": "assistant", "content": [block, {"type": "text", "text": "I look."}]}, *HI]
    ).messages[:1]
    assert normal(sent_back) == {"role": "assistant", "content": "I look."}


def test_a_stream_counts_the_prompt_at_its_beginning_as_at_its_end() -> None:
    request = replace(parse(stream=True), cached_tokens=2)
    found = events(streamed(messages.stream(request, CALL_ID, "m", 5, 3), said("a"), cached_tokens=2))
    ended = next(event["usage"] for event in found if event["type"] == "message_delta")
    assert found[0]["message"]["usage"] == {**ended, "output_tokens": 0}
    assert (ended["input_tokens"], ended["cache_read_input_tokens"]) == (1, 2)


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
