"""Answers of Google's generateContent: whole, streamed, sent back; and those of external models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampled_answers import CALL_ID, answer, broken, choices, deltas, objects, said, streamed

from agentlightning.protocols import generate_content
from agentlightning.protocols.base import (
    ApiError,
    Choice,
    Completion,
    CompletionRequest,
    Delta,
    EventReader,
    TokenLogprob,
    assistant_message,
)
from agentlightning.rendering.graph import normal

HI = [{"role": "user", "parts": [{"text": "hi"}]}]


def parse(trained: bool = True, streamed: bool = False, **given: Any) -> CompletionRequest:
    body = generate_content.with_route({"contents": HI, **given}, "m", streamed)
    return generate_content.parse(body, trained)


def config(**given: Any) -> CompletionRequest:
    return parse(generationConfig=given)


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
    top = (TokenLogprob(text="a", logprob=-0.5), TokenLogprob(text="b", logprob=-1.0))
    token = TokenLogprob(text="a", logprob=-0.5, top=top)
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
