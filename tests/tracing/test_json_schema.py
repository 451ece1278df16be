from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentlightning.tracing.rules import fits

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (CITY, {"city": "Oslo", "more": 1}, {"town": "Oslo"}),
        ({**CITY, "additionalProperties": False}, {"city": "Oslo"}, {"city": "Oslo", "more": 1}),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, {"a": 1}, {"a": "1"}),
        ({"type": "integer"}, 2.0, 2.5),
        ({"type": "integer"}, 1, True),
        ({"type": "number"}, 0.5, "0.5"),
        ({"type": ["string", "null"]}, None, 3),
        ({"type": "boolean"}, False, 0),
        ({"type": "array", "items": {"type": "string"}}, ["a"], ["a", 1]),
        ({"type": "array", "minItems": 1, "maxItems": 2}, [1], []),
        ({"type": "string", "maxLength": 2}, "ab", "abc"),
        ({"minimum": 1, "maximum": 3}, 3, 3.5),
        ({"enum": ["a", 1]}, 1.0, True),
        ({"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, 1, 1.5),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, 1.5, 1),
        ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, 2, 3),
        ({"$ref": "#/$defs/Place", "$defs": {"Place": CITY}}, {"city": "Oslo"}, {}),
        (False, None, None),
    ],
)
def test_a_value_fits_or_does_not(schema: Any, right: Any, wrong: Any) -> None:
    assert fits(right, schema) is (schema is not False)
    assert not fits(wrong, schema)


@pytest.mark.parametrize(
    "schema", [None, 3, {"type": 3}, {"type": "unheard"}, {"$ref": "#/gone"}, {"pattern": "a"}, {}]
)
def test_everything_fits_a_schema_that_says_nothing_readable(schema: Any) -> None:
    assert fits({"a": 1}, schema)


def test_a_schema_that_refers_to_itself_is_followed_as_deep_as_the_value_goes() -> None:
    tree = {
        "$defs": {"tree": {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}},
        "$ref": "#/$defs/tree",
    }
    assert fits({"next": {"next": {}}}, tree)
    assert not fits({"next": {"next": 3}}, tree)


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


@settings(deadline=None)
@given(JSON)
def test_a_value_fits_itself_and_nothing_but_itself(value: Any) -> None:
    assert fits(value, {"const": value})
    assert fits(value, {"enum": [value]})
    assert not fits([value], {"const": value})
