from __future__ import annotations

from typing import Any

import pytest

from agentlightning.tracing.air import fits

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (CITY, {"city": "Oslo", "more": 1}, {"town": "Oslo"}),
        ({**CITY, "additionalProperties": False}, {"city": "Oslo"}, {"city": "Oslo", "more": 1}),
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
