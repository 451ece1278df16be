"""JSON with halves of characters."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.runtime.json_text import dumps, loads


@given(text=st.text(st.characters(codec=None)), ascii_only=st.booleans())
def test_halves_of_characters_are_replaced_and_nothing_else(text: str, ascii_only: bool) -> None:
    data = json.dumps({"text": text}, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert loads(data) == {"text": expected}


@pytest.mark.parametrize("data", [b"{", b'"\xff"', b'{"a": "\\ud800"', b"", b'"\\ud800'])
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        loads(data)


LONG = 2**70
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=VALUES)
def test_whatever_is_json_is_written_so_that_it_is_read_as_the_same(value: Any) -> None:
    assert json.loads(dumps(value)) == value


@given(arguments=st.dictionaries(st.text(), VALUES))
def test_arguments_are_read_as_they_were_written(arguments: dict[str, Any]) -> None:
    body = {"n": LONG, "content": [{"type": "tool_use", "name": "f", "input": arguments}]}
    read = loads(json.dumps(body))
    assert repr(read["content"][0]["input"]) == repr(arguments)
    assert type(read["n"]) is float  # as elsewhere, where nobody could store it


def test_levels_beyond_those_of_other_writers_are_written() -> None:
    value: Any = LONG
    for _ in range(5000):
        value = [{"a": value}]
    assert dumps(value) == b'[{"a":' * 5000 + str(LONG).encode() + b"}]" * 5000
