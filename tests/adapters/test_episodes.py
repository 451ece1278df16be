"""Rows of files to episodes, format by format."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from agentlightning.adapters.episodes import episodes_of_row
from agentlightning.adapters.sdk_spans import hex_id, nanoseconds, sdk_span
from agentlightning.errors import DataError
from agentlightning.records import JSON

ASK = {"role": "user", "content": "1+1?"}
TWO = {"role": "assistant", "content": "Two."}


def only(row: Any) -> Any:
    found = episodes_of_row(row)
    assert found is not None
    [episode] = found
    return episode


def test_a_conversation_is_a_call_for_each_answer() -> None:
    episode = only({"messages": [ASK, TWO, ASK, {**TWO, "weight": 0}, ASK, TWO], "reward": 0.5, "tools": []})
    assert [len(call.messages) for call in episode.calls] == [1, 5]  # the answer of weight 0 is context alone
    assert (episode.reward, episode.task) == (0.5, {"messages": [ASK]})
    assert "weight" not in str(episode.calls)


def test_rewards_have_names_or_a_label() -> None:
    episode = only({"messages": [ASK, TWO], "rewards": {"f1": 0.5}, "score": 2})
    assert (episode.reward, episode.rewards) == (2.0, {"f1": 0.5})
    assert only({"prompt": "1+1?", "completion": "Two.", "label": False}).reward == 0.0
    assert only({"prompt": "1+1?", "completion": "Two."}).reward is None


def test_a_preference_is_two_episodes_of_one_task() -> None:
    row = {"prompt": [ASK], "chosen": [TWO], "rejected": [{"role": "assistant", "content": "Three."}]}
    better, worse = episodes_of_row(row) or []
    assert (better.reward, worse.reward, better.task == worse.task) == (1.0, 0.0, True)
    implicit, _ = episodes_of_row({"chosen": [ASK, TWO], "rejected": [ASK, TWO]}) or []
    assert implicit.task == {"messages": [ASK]}


def test_each_choice_of_a_chat_completion_is_an_episode() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    choices = [
        {"index": 0, "message": TWO, "finish_reason": "stop"},
        {
            "index": 1,
            "message": {"role": "assistant", "content": None, "tool_calls": [call]},
            "finish_reason": "tool_calls",
        },
    ]
    row = {"request": {"model": "m", "messages": [ASK], "tools": [tool]}, "response": {"choices": choices}}
    one, other = episodes_of_row(row) or []
    assert (one.calls[0].completion["content"], one.calls[0].tools) == ("Two.", [tool])
    assert (other.calls[0].completion["tool_calls"], other.calls[0].finish_reason) == ([call], "tool_calls")


def test_a_response_with_several_turns_is_several_calls() -> None:
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": "1+1?"}], "temperature": None},
        "response": {
            "model": "gpt",
            "output": [
                {"type": "function_call", "name": "add", "arguments": "{}", "call_id": "c"},
                {"type": "function_call_output", "call_id": "c", "output": "2"},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Two."}]},
            ],
        },
        "reward": 1.0,
    }
    episode = only(row)
    assert [len(call.messages) for call in episode.calls] == [1, 3]
    assert (episode.reward, episode.calls[0].model, episode.task) == (1.0, "gpt", {"messages": [ASK]})


def test_turns_of_intercode_have_rewards_of_their_own() -> None:
    history = {"actions": ["SHOW TABLES", "SELECT 1"], "observations": ["a", "b"], "rewards": [0.0, 1.0]}
    episode = only({"query": "one?", "turn_history": history})
    assert (episode.steps, episode.reward) == ([{"turn": 0.0}, {"turn": 1.0}], 1.0)
    with pytest.raises(DataError, match=r"turn_history.rewards: expected one for each of 2 actions, got 1"):
        episodes_of_row({"query": "one?", "turn_history": {**history, "rewards": [1.0]}})


def test_spans_are_read_wherever_a_row_has_them() -> None:
    span = {"name": "chat", "context": {"span_id": 7, "trace_id": 8}, "attributes": {}}
    for row in ({"spans": [span], "trace": {"id": 3}}, {"trace": [span]}, {"trace": {"spans": [span]}, "spans": None}):
        assert [one.id for one in only(row).spans] == [f"{7:016x}"]


def test_fields_that_belong_to_the_task_are_named() -> None:
    [episode] = episodes_of_row({"messages": [ASK, TWO], "gold": "2", "id": 7}, ["gold"]) or []
    assert episode.task == {"messages": [ASK], "gold": "2"}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": [{"role": "user"}, 3]}, "messages: expected a list of messages"),
        ({"messages": []}, "messages: expected a list of messages"),
        ({"messages": [ASK, TWO], "reward": "high"}, "reward: expected a finite number, got str 'high'"),
        ({"messages": [ASK, TWO], "reward": float("nan")}, "reward: expected a finite number"),
        ({"messages": [ASK, TWO], "rewards": [1]}, "rewards: expected numbers by name"),
        ({"prompt": "x", "chosen": [ASK], "rejected": "y"}, "chosen: expected a message of the assistant"),
        ({"request": {"model": "m", "messages": [ASK]}, "response": {}}, "response.choices: expected a list"),
        ({"messages": [ASK, {"text": "?"}, {**TWO, "weight": 1}]}, "messages: expected a list of messages"),
        ({"messages": [ASK, TWO], "reward": 10**400}, "reward: expected a finite number"),
        (
            {"query": "x", "turn_history": {"actions": ["a"], "observations": ["b"], "rewards": 5}},
            "turn_history.rewards: expected a list of numbers, got int",
        ),
        ({"request": {"model": "m"}, "response": {"choices": [1]}}, "response.choices: expected objects, got int"),
    ],
)
def test_a_broken_row_is_an_error_that_names_the_field(row: JSON, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence.replace("(", r"\(")):
        episodes_of_row(row)


@pytest.mark.parametrize("row", [{}, {"question": "1+1?"}, [], 3, None, "text"])
def test_what_is_none_of_the_formats_is_nothing(row: Any) -> None:
    assert episodes_of_row(row) is None


def test_spans_of_an_sdk_are_read_however_they_are_printed() -> None:
    hexed = {
        "name": "chat",
        "context": {"trace_id": "0x" + "a" * 32, "span_id": "0x00000000000000ff"},
        "kind": "SpanKind.CLIENT",
        "parent_id": "0x0000000000000001",
        "start_time": "2025-04-29T15:21:17.5Z",
        "end_time": "2025-04-29T15:21:18.5Z",
        "status": {"status_code": "ERROR", "description": "no"},
        "attributes": {"a": 1},
        "events": [{"name": "exception", "timestamp": "2025-04-29T15:21:18Z", "attributes": {}}],
    }
    numbered = {
        **hexed,
        "context": {"trace_id": int("a" * 32, 16), "span_id": 255},
        "kind": "client",
        "parent": {"span_id": 1},
        "start_time": 1745940077500000000,
        "end_time": 1745940078500000000,
        "status": {"status_code": "error", "description": "no"},
        "events": [{"name": "exception", "timestamp": 1745940078000000000, "attributes": {}}],
    }
    del numbered["parent_id"]
    span = sdk_span(hexed)
    assert span == sdk_span(numbered)
    assert span is not None
    assert (span.id, span.parent_id, span.kind, span.status) == (
        "00000000000000ff",
        "0000000000000001",
        "client",
        "error",
    )


def test_what_a_span_lacks_has_its_default_and_without_an_id_it_is_none() -> None:
    assert sdk_span({"name": "x", "context": {}, "attributes": {}}) is None
    span = sdk_span(
        {"name": 3, "context": {"span_id": 1}, "attributes": "no", "kind": 9, "status": 4, "start_time": -5}
    )
    assert span is not None
    assert (span.attributes, span.kind, span.status, span.started_ns, span.trace_id) == (
        {},
        "internal",
        "unset",
        0,
        None,
    )
    assert [hex_id(value, 4) for value in (True, "zz", 70000, -1, 1.5)] == [None] * 5
    assert nanoseconds(2**70) == 0


def test_a_conversation_without_an_answer_is_an_error() -> None:
    for messages in ([ASK], "hi", [TWO]):
        with pytest.raises(DataError, match="messages: expected a message of the assistant after the first message"):
            episodes_of_row({"messages": messages})


def test_an_exported_trace_tells_its_task_its_mode_and_its_rewards() -> None:
    root = {"agl.run_id": "r", "agl.mode": "eval", "input.value": '{"question": "q"}', "agl.reward": 0.5}
    root |= {"agl.rewards.reward": 0.25, "agl.rewards.style": 2, "agl.rewards.broken": "much"}
    chat = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": orjson.dumps([ASK]).decode()}
    chat |= {"gen_ai.output.messages": orjson.dumps([TWO]).decode(), "agl.rewards.found": 0.1}
    spans = [
        {"name": name, "context": {"span_id": number, "trace_id": 1}, "attributes": attributes}
        for number, (name, attributes) in enumerate((("rollout", root), ("chat", chat)), 1)
    ]
    episode = only({"spans": spans})
    assert (episode.task, episode.mode, episode.reward) == ({"question": "q"}, "eval", 0.5)
    assert (episode.rewards, episode.steps) == ({"style": 2.0}, [{"found": 0.1}])
