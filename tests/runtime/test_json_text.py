"""JSON with halves of characters."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.runtime.json_text import loads, whole_characters


@given(text=st.text(st.characters(codec=None)), ascii_only=st.booleans())
def test_halves_of_characters_are_replaced_and_nothing_else(text: str, ascii_only: bool) -> None:
    data = json.dumps({"text": text}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert loads(data) == {"text": expected}


@pytest.mark.parametrize("text", [r'"\\ud800"', r'"\ud83d\ude00"', r'"\\\\"', '"plain"'])
def test_whole_characters_stay(text: str) -> None:
    assert whole_characters(text) == text


@pytest.mark.parametrize("data", [b"{", b'"\xff"', b'{"a": "\\ud800"', b"", b'"\\ud800'])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        loads(data)
