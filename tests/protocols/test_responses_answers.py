"""Answers of OpenAI Responses: whole, streamed, stored by the agent and sent back; and those of external models."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from sampled_answers import CALL_ID, OTHER_ID, answer, broken, choices, events, objects, said, streamed

from agentlightning.protocols import responses
from agentlightning.protocols.base import (
    ApiError,
    Choice,
    CompletionRequest,
    Delta,
    TokenLogprob,
    ToolDelta,
    assistant_message,
)

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
REASONED = said("I look.", "hm", (("f", '{"a": 1}'),))
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ANY = choices(objects | broken)


def parse(**given: Any) -> CompletionRequest:
    return responses.parse({"model": "m", "input": "hi", **given})


def stream(**given: Any) -> Any:
    return responses.stream(parse(stream=True, **given), CALL_ID, "m", 5, 3)


def body(choice: Choice, call_id: str = CALL_ID, **given: Any) -> Any:
    return json.loads(responses.body(parse(**given), answer(choice, call_id)))


def heard(data: bytes) -> list[Any]:
    """What the SDK makes of a stream: its events, with what it put together so far."""
    reply = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=data)
    with OpenAI(api_key="k", http_client=httpx.Client(transport=httpx.MockTransport(lambda _: reply))) as client:
        asked: Any = {"model": "m", "input": "hi"}
        with client.responses.stream(**asked) as parts:
            return list(parts)


# --- whole --------------------------------------------------------------------------------------------------------------


def test_the_body_of_an_answer_has_an_item_for_every_part_the_request_and_the_counts() -> None:
    given = {"tools": [TOOL], "temperature": 0.5, "metadata": {"a": "b"}, "previous_response_id": "resp_x"}
    found = json.loads(responses.body(parse(**given), answer(REASONED, cached_tokens=2)))
    Response.model_validate(found)
    given["tools"] = [{"description": None, **TOOL}]
    assert {name: found[name] for name in given} == given
    assert (found["id"], found["status"], found["incomplete_details"]) == (f"resp_{CALL_ID}", "completed", None)
    part = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    call = {"type": "function_call", "call_id": "call_0", "name": "f", "arguments": '{"a": 1}', "status": "completed"}
    assert found["output"] == [
        {
            "id": f"rs_{CALL_ID}",
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "status": "completed",
        },
        {"id": f"msg_{CALL_ID}", "type": "message", "role": "assistant", "status": "completed", "content": [part]},
        {"id": f"fc_{CALL_ID}_0", **call},
    ]
    assert (found["usage"]["input_tokens"], found["usage"]["output_tokens"], found["usage"]["total_tokens"]) == (
        3,
        4,
        7,
    )
    assert found["usage"]["input_tokens_details"]["cached_tokens"] == 2


def test_an_answer_that_was_cut_is_incomplete() -> None:
    found = body(said("a", finish="length"))
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in found["output"]] == ["incomplete"]
    last = heard(streamed(stream(), said("a", finish="length")))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")


@pytest.mark.parametrize(
    ("choice", "kinds"),
    [
        (said("a", "hm", (("f", "{"),), finish="length"), ["reasoning", "message", "function_call"]),
        (said("a", "hm", finish="length"), ["reasoning", "message"]),
        (said(None, "hm", finish="length"), ["reasoning", "message"]),
    ],
)
def test_only_the_last_item_of_an_answer_that_was_cut_is_incomplete(choice: Choice, kinds: list[str]) -> None:
    output = body(choice)["output"]
    assert [item["type"] for item in output] == kinds
    assert [item["status"] for item in output] == ["completed"] * (len(kinds) - 1) + ["incomplete"]
    assert events(streamed(stream(), choice))[-1]["response"]["output"] == output


@pytest.mark.parametrize("name", ["summary", "generate_summary"])
def test_a_summary_of_the_reasoning_is_the_reasoning_where_one_is_asked_for(name: str) -> None:
    given = {"reasoning": {name: "auto"}, "include": ["reasoning.encrypted_content"]}
    found = body(REASONED, **given)["output"][0]
    assert found["summary"] == [{"type": "summary_text", "text": "hm"}]
    kinds = [event["type"] for event in events(streamed(stream(**given), REASONED))]
    assert kinds.count("response.reasoning_summary_text.delta") == 2
    assert kinds.count("response.reasoning_summary_part.done") == 1
    for kept in ("summary", "encrypted_content"):
        item = {"type": "reasoning", "summary": [], kept: found[kept]}
        (message,) = parse(input=[item]).messages
        assert message["reasoning_content"] == "hm"


# --- streamed -----------------------------------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [{}, {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}]


@settings(max_examples=30)
@given(choice=ANY, pieces=st.integers(1, 4), given_fields=st.sampled_from(SETTINGS))
def test_a_stream_put_together_by_the_sdk_is_the_whole_body(
    choice: Choice, pieces: int, given_fields: dict[str, Any]
) -> None:
    found = heard(streamed(stream(**given_fields), choice, pieces))
    together, whole = found[-1].response.to_dict(mode="json"), body(choice, **given_fields)
    assert {**together, "output": whole["output"]} == whole
    texts = {event.output_index: event.text for event in found if event.type == "response.output_text.done"}
    grown: dict[str, dict[int, str]] = {"response.output_text.delta": {}, "response.function_call_arguments.delta": {}}
    for event in found:
        if event.type in grown:
            grown[event.type][event.output_index] = event.snapshot
    written, arguments = grown.values()
    for index, item in enumerate(whole["output"]):
        if item["type"] == "message":
            assert texts[index] == written.get(index, "") == item["content"][0]["text"]
        if item["type"] == "function_call":
            assert arguments.get(index, "") == item["arguments"]


@given(choice=ANY, pieces=st.integers(1, 4), given_fields=st.sampled_from(SETTINGS))
def test_items_open_grow_and_close_one_after_the_other(
    choice: Choice, pieces: int, given_fields: dict[str, Any]
) -> None:
    found = events(streamed(stream(**given_fields), choice, pieces))
    for event in found:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    assert found[-1]["type"] == f"response.{status}"
    output: list[Any] = []
    item: Any = None
    text: dict[str, str] = {}
    for event in found[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(output)
        if kind == "output_item.added":
            assert item is None
            item, text = event["item"], {}
        elif kind == "output_item.done":
            assert (event["item"]["id"], event["item"]["type"]) == (item["id"], item["type"])
            assert all(whole is None for whole in text.values())
            output.append(event["item"])
            item = None
        else:
            assert event["item_id"] == item["id"]
            what, _, step = kind.rpartition(".")
            if step == "delta":
                text[what] = text.get(what, "") + event["delta"]
            elif step == "done" and not what.endswith("_part"):
                assert text.get(what, "") == event.get("text", event.get("arguments"))
                text[what] = None  # type: ignore[assignment]
    assert item is None
    assert found[-1]["response"] == body(choice, **given_fields)
    assert output == found[-1]["response"]["output"]


def test_a_stream_ends_with_a_mark_also_where_it_failed() -> None:
    assert streamed(stream(), REASONED).endswith(b"\n\ndata: [DONE]\n\n")
    assert stream().failed(ApiError("gone")).endswith(b"\n\ndata: [DONE]\n\n")


def test_text_after_a_tool_call_is_a_message_of_its_own() -> None:
    choice = said("ab", None, (("f", "{}"),))
    begun = stream()
    call = Delta(tools=(ToolDelta(index=0, id="call_0", name="f", arguments="{}"),))
    parts = [
        begun.first(),
        begun.delta(0, Delta(content="a")),
        begun.delta(0, call),
        begun.delta(0, Delta(content="b")),
    ]
    found = heard(b"".join((*parts, begun.last(answer(choice)))))[-1].response.output
    assert [item.type for item in found] == ["message", "function_call", "message"]
    assert len({item.id for item in found}) == 3
    assert parse(input=[item.to_dict() for item in found]).messages == [assistant_message(choice)]


def test_a_failed_stream_is_an_error_that_the_sdk_raises() -> None:
    begun = stream()
    data = begun.first() + begun.delta(0, Delta(content="x")) + begun.failed(ApiError("gone", code="c"))
    error, failed = events(data)[-2:]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert (error["type"], error["message"], error["code"]) == ("error", "gone", "c")
    assert failed["sequence_number"] == error["sequence_number"] + 1
    with pytest.raises(APIError, match="gone"):
        heard(data)


# --- logprobs -----------------------------------------------------------------------------------------------------------

SAMPLED = [
    ("<think>", Delta()),
    ("It", Delta(reasoning="It")),
    ("</think>", Delta()),
    ("\n\n", Delta()),
    ("It", Delta()),
    (" is", Delta(content="It is")),
    (" ", Delta()),
    ("é", Delta(content=" é")),
    ("\n", Delta()),
    ("<tool_call>f", Delta(tools=(ToolDelta(index=0, id="call_0", name="f"),))),
    ("{}", Delta(tools=(ToolDelta(index=0, arguments="{}"),))),
]
"""Tokens, and what each allowed to send."""


def test_logprobs_are_those_of_the_messages_own_tokens_streamed_or_not() -> None:
    top = (TokenLogprob(text="x", logprob=-2.0),)
    tokens = [TokenLogprob(text=text, logprob=-number, top=top) for number, (text, _) in enumerate(SAMPLED)]
    known = said("It is é", "It", (("f", "{}"),))
    choice = Choice(**{name: getattr(known, name) for name in Choice.__slots__} | {"logprobs": tuple(tokens)})
    begun = stream(top_logprobs=1)
    parts = [begun.first()]
    for (_, delta), token in zip(SAMPLED, tokens, strict=True):
        more = Delta(content=delta.content, reasoning=delta.reasoning, tools=delta.tools, logprobs=(token,))
        parts.append(begun.delta(0, more))
    found = events(b"".join((*parts, begun.last(answer(choice)))))
    whole = body(choice, top_logprobs=1)
    listed = whole["output"][1]["content"][0]["logprobs"]
    assert [one["token"] for one in listed] == ["It", " is", " ", "é"]
    assert listed[3] == {
        "token": "é",
        "bytes": [195, 169],
        "logprob": -7,
        "top_logprobs": [{"token": "x", "bytes": [120], "logprob": -2.0}],
    }
    deltas = [one for event in found if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    (done,) = [event["logprobs"] for event in found if event["type"] == "response.output_text.done"]
    assert deltas == done == listed
    assert found[-1]["response"]["output"] == whole["output"]


def test_a_token_whose_text_is_held_back_is_listed_with_its_text() -> None:
    tokens = tuple(TokenLogprob(text=text, logprob=-1.0) for text in ("It", " is", "."))
    begun = stream(top_logprobs=1)
    data = begun.delta(0, Delta(content="It", logprobs=tokens[:2])) + begun.delta(
        0, Delta(content=" is.", logprobs=tokens[2:])
    )
    first, second = (event["logprobs"] for event in events(data) if event["type"] == "response.output_text.delta")
    assert [[one["token"] for one in part] for part in (first, second)] == [["It"], [" is", "."]]


def test_a_character_of_several_tokens_has_the_logprobs_of_all() -> None:
    tokens = tuple(TokenLogprob(text="\ufffd", logprob=-1.0) for _ in range(2))
    begun = stream(top_logprobs=1)
    begun.delta(0, Delta(logprobs=tokens[:1]))
    *_, event = events(begun.delta(0, Delta(content="é", logprobs=tokens[1:])))
    choice = Choice(content="é", logprobs=tokens)
    assert event["logprobs"] == body(choice)["output"][0]["content"][0]["logprobs"]
    assert len(event["logprobs"]) == 2


# --- sent back ----------------------------------------------------------------------------------------------------------

FOREIGN: dict[str, Callable[[dict[str, Any], int], dict[str, Any]]] = {
    "as they were": lambda item, _: item,
    "without ids": lambda item, _: {name: value for name, value in item.items() if name != "id"},
    "with no id": lambda item, _: {**item, "id": None},
    "with one id for all": lambda item, _: {**item, "id": "__fake_id__"},
    "with ids of OpenAI": lambda item, at: {**item, "id": f"{item['id'][:2]}_{at:050x}"},
    "with random UUIDs": lambda item, at: {**item, "id": f"msg_{at:08x}-0000-4000-8000-000000000000"},
    "calls without ids": lambda item, _: {**item, "id": None} if item["type"] == "function_call" else item,
    "without status": lambda item, _: {name: value for name, value in item.items() if name != "status"},
}


@pytest.mark.parametrize("how", FOREIGN)
@given(choice=ANY)
def test_what_an_agent_sends_back_of_an_answer_is_the_message_that_was_recorded(how: str, choice: Choice) -> None:
    output = [FOREIGN[how](item, at) for at, item in enumerate(body(choice)["output"])]
    assert parse(input=[*HI, *output, *HI]).messages == [*HI, assistant_message(choice), *HI]


@settings(max_examples=30)
@given(choice=ANY, pieces=st.integers(1, 3))
def test_items_of_the_sdk_sent_back_are_the_message_that_was_recorded(choice: Choice, pieces: int) -> None:
    items = heard(streamed(stream(), choice, pieces))[-1].response.output
    sent = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}, warnings=False) for item in items]
    assert parse(input=[*HI, *sent, *HI]).messages == [*HI, assistant_message(choice), *HI]


@given(first=ANY, second=ANY)
def test_answers_that_follow_each_other_stay_apart(first: Choice, second: Choice) -> None:
    output = [*body(first)["output"], *body(second, OTHER_ID)["output"]]
    assert parse(input=output).messages == [assistant_message(first), assistant_message(second)]


# --- external models -----------------------------------------------------------------------------------------------------


@given(choice=choices(objects), pieces=st.integers(1, 3))
def test_a_reader_finds_the_same_message_in_a_whole_answer_and_in_its_events(choice: Choice, pieces: int) -> None:
    whole, parts, cut = (responses.reader() for _ in range(3))
    whole.whole(body(choice))
    for event in events(streamed(stream(), choice, pieces)):
        parts.event(event)
        if event["type"] != f"response.{'incomplete' if choice.finish_reason == 'length' else 'completed'}":
            cut.event(event)
    for one in (whole, parts):
        assert one.message == assistant_message(choice)
        assert (one.finish_reason, one.prompt_tokens, one.sampled_tokens) == (choice.finish_reason, 3, 4)
    assert cut.message == {**assistant_message(choice), "content": choice.content or None}
