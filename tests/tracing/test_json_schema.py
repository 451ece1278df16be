from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.tracing.air import fits

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (CITY, {"city": "Oslo", "more": 1}, {"town": "Oslo"}),
        ({**CITY, "additionalProperties": False}, {"city": "Oslo"}, {"city": "Oslo", "more": 1}),
        ({"$ref": "#/$defs/Place", "$defs": {"Place": CITY}}, {"city": "Oslo"}, {}),
    ],
)
def test_a_value_fits_or_does_not(schema: Any, right: Any, wrong: Any) -> None:
    assert fits(right, schema)
    assert not fits(wrong, schema)
    assert not fits(right, False)
    for unreadable in (None, {"type": 3}, {"type": "unheard"}, {"$ref": "#/gone"}, {"pattern": "a"}, {}):
        assert fits(wrong, unreadable)


def test_a_schema_that_grows_without_end_is_given_up() -> None:
    endless = {"anyOf": [{"$ref": "#"}, {"$ref": "#/anyOf"}, {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}]}
    fits({"a": [1] * 100}, {**endless, "additionalProperties": {"$ref": "#"}, "items": {"$ref": "#"}})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


KEYWORDS = st.sampled_from(
    ["type", "enum", "const", "properties", "required", "items", "anyOf", "$ref", "minimum", "maxLength"]
)


@settings(deadline=None)
@given(JSON, st.dictionaries(KEYWORDS, JSON, max_size=4))
def test_no_schema_raises(value: Any, schema: Any) -> None:
    assert fits(value, schema) in (True, False)
