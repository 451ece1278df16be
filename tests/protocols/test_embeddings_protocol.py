"""OpenAI Embeddings on the wire: refused for the trained policy, recorded for external models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_requests import anything, requests

from agentlightning.protocols import embeddings
from agentlightning.protocols.base import ApiError, CompletionRequest, WireFormat


def test_the_trained_policy_gives_no_embeddings() -> None:
    with pytest.raises(ApiError, match="gives no embeddings; name a model of a configured external model") as refused:
        embeddings.parse({"model": "m", "input": "a"})
    assert json.loads(embeddings.error(refused.value))["error"]["param"] == "model"


@pytest.mark.parametrize(("given", "content"), [("a", "a"), (["a", "b"], '["a","b"]'), ([[1, 2]], "[[1,2]]")])
def test_the_input_of_an_external_model_is_recorded_as_a_message(given: Any, content: str) -> None:
    request = embeddings.parse({"model": "o", "input": given, "dimensions": 8}, trained=False)
    assert request == CompletionRequest(model="o", messages=[{"role": "user", "content": content}])


@given(data=requests("input", "dimensions"), trained=st.booleans())
def test_random_requests_are_understood_or_refused(data: dict[str, Any], trained: bool) -> None:
    try:
        embeddings.parse(data, trained)
    except ApiError as refusal:
        refused = json.loads(embeddings.error(refusal))["error"]
        assert refused["param"] == "model"
    else:
        assert not trained


def test_a_reader_counts_tokens() -> None:
    reader = embeddings.reader()
    reader.whole({"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 4, "total_tokens": 4}})
    assert (reader.prompt_tokens, reader.sampled_tokens) == (4, 0)
    assert reader.message == {"role": "assistant", "content": None}


@given(data=anything(("usage", "prompt_tokens", "total_tokens")))
def test_a_reader_never_raises(data: Any) -> None:
    reader = embeddings.reader()
    reader.whole(data)
    reader.event({"usage": data})


def test_the_module_is_a_wire_format() -> None:
    wire: WireFormat = embeddings
    assert wire.NAME == "embeddings"
