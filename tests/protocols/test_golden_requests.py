"""Requests of every protocol, valid and not, with what they were parsed to before the parsers read msgspec structs."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from agentlightning.protocols import chat, completions, embeddings, generate_content, messages, responses, tokens
from agentlightning.protocols.base import ApiError, CompletionRequest

WIRES: dict[str, Any] = {
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
def test_a_request_is_parsed_or_refused_as_before(wire: str) -> None:
    for case in CASES[wire]:
        try:
            result: Any = plain(WIRES[wire].parse(case["body"], case["trained"]))
        except ApiError as refusal:
            result = {"message": refusal.message, "param": refusal.param}
        assert result == case["result"], case["body"]
