"""Every protocol: recorded requests, valid and not, with what they are parsed to; and random ones, which break nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_requests import anything

from agentlightning.protocols import (
    chat,
    completions,
    embeddings,
    generate_content,
    messages,
    responses,
    tokens,
)
from agentlightning.protocols.base import ApiError, CompletionRequest, WireFormat

WIRES: dict[str, WireFormat] = {
    each.NAME: each for each in (chat, completions, embeddings, generate_content, messages, responses, tokens)
}
CASES = json.loads((Path(__file__).parent / "golden_requests.json").read_text(encoding="utf-8"))


def plain(request: CompletionRequest) -> Any:
    """The fields that are not at their defaults, as JSON."""
    values = asdict(request)
    empty = asdict(CompletionRequest(model="", messages=[]))
    kept = {one.name: values[one.name] for one in fields(request) if values[one.name] != empty[one.name]}
    return json.loads(
        json.dumps(kept, default=lambda value: sorted(value) if isinstance(value, frozenset) else str(value))
    )


@pytest.mark.parametrize("wire", WIRES)
def test_a_request_is_parsed_or_refused_as_recorded(wire: str) -> None:
    for case in CASES[wire]:
        try:
            result: Any = plain(WIRES[wire].parse(case["body"], case["trained"]))
        except ApiError as refusal:
            result = {"message": refusal.message, "param": refusal.param}
            result |= {} if refusal.status == 400 else {"status": refusal.status}
        assert result == case["result"], (case.get("name"), case["body"])


FIELDS = sorted({name for cases in CASES.values() for case in cases for name in case["body"]})
MESSAGES = st.lists(st.dictionaries(st.sampled_from(("role", "content", "type", "parts")), anything()), max_size=2)


@pytest.mark.parametrize("wire", WIRES)
@given(
    data=st.dictionaries(st.sampled_from(FIELDS), anything(), max_size=4),
    messages=MESSAGES | anything(),
    trained=st.booleans(),
)
def test_a_random_request_is_understood_or_refused_by_its_field(
    wire: str, data: dict[str, Any], messages: Any, trained: bool
) -> None:
    body = {"model": "m", "max_tokens": 9, **dict.fromkeys(("messages", "input", "contents"), messages), **data}
    try:
        request = WIRES[wire].parse(body, trained)
    except ApiError as refusal:
        message, param, error = refusal.message, refusal.param, WIRES[wire].error(refusal)
        assert f"{param}" in message
        assert json.loads(error)
    else:
        assert request.n >= 1


NAMES = (
    *("choices", "candidates", "output", "response", "item", "message", "delta", "content", "content_block", "parts"),
    *("tool_calls", "functionCall", "function", "index", "id", "name", "arguments", "args", "input", "text", "type"),
    *("usage", "usageMetadata", "input_tokens", "status", "encrypted_content", "stop_reason", "finishReason"),
)
KINDS = (
    *("message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"),
    *("response.completed", "response.output_text.delta", "response.reasoning_text.delta", "response.output_item.done"),
)


@pytest.mark.parametrize("wire", WIRES)
@given(
    data=st.dictionaries(st.sampled_from(NAMES), anything(NAMES), max_size=4), kinds=st.lists(st.sampled_from(KINDS))
)
def test_a_reader_never_raises(wire: str, data: dict[str, Any], kinds: list[str]) -> None:
    reader = WIRES[wire].reader()
    for body in (data, {"choices": [data], "candidates": [data], "output": [data], "usage": data}):
        reader.whole(body)
        for kind in ("", *kinds):
            reader.event({**body, "item": {**data, "type": "function_call"}, "type": kind})
    assert reader.message["role"] == "assistant"


def test_tokens_of_an_embedding_are_counted_by_its_reader() -> None:
    reader = embeddings.reader()
    reader.whole({"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 4, "total_tokens": 4}})
    assert (reader.prompt_tokens, reader.sampled_tokens) == (4, 0)
    assert reader.message == {"role": "assistant", "content": None}


def test_the_request_of_googles_token_count_may_be_nested() -> None:
    given = {"contents": [{"role": "user", "parts": [{"text": "hi"}]}]}
    assert generate_content.count_request(given) == given
    assert generate_content.count_request({"generate_content_request": given}) == given
