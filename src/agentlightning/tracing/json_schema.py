"""Validates values against JSON Schemas that an agent gave for its tools. AIR's rules drive it. Pure: nothing is fetched."""

from __future__ import annotations

from typing import Any


def fits(value: Any, schema: Any) -> bool:
    """Returns whether `value` is valid under `schema`; everything is under one that is malformed or refers elsewhere.

    >>> fits({"city": "Oslo"}, {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
    True
    >>> fits({"town": "Oslo"}, {"type": "object", "properties": {}, "additionalProperties": False})
    False
    """
    import jsonschema_rs

    try:
        validator = jsonschema_rs.validator_for(schema, retriever=_refuse)
        return validator.is_valid(value)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError, TypeError):
        return True


def _refuse(uri: str) -> Any:
    raise ValueError(f"{uri} is not part of the schema")
