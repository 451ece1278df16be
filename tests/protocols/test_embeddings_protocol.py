"""OpenAI Embeddings on the wire: refused for the trained policy, recorded for external models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning.protocols import embeddings
from agentlightning.protocols.base import ApiError, CompletionRequest


def test_the_trained_policy_gives_no_embeddings() -> None:
    with pytest.raises(ApiError, match="gives no embeddings; name a model of a configured external model") as refused:
        embeddings.parse({"model": "m", "input": "a"})
    assert json.loads(embeddings.error(refused.value))["error"]["param"] == "model"


@pytest.mark.parametrize(("given", "content"), [("a", "a"), (["a", "b"], '["a","b"]'), ([[1, 2]], "[[1,2]]")])
def test_the_input_of_an_external_model_is_recorded_as_a_message(given: Any, content: str) -> None:
    request = embeddings.parse({"model": "o", "input": given, "dimensions": 8}, trained=False)
    assert request == CompletionRequest(model="o", messages=[{"role": "user", "content": content}])


def test_a_reader_counts_tokens() -> None:
    reader = embeddings.reader()
    reader.whole({"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 4, "total_tokens": 4}})
    assert (reader.prompt_tokens, reader.sampled_tokens) == (4, 0)
    assert reader.message == {"role": "assistant", "content": None}
