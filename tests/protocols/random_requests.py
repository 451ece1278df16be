"""Random JSON in the shape of a request, and texts cut at will, for the properties that every protocol has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

INNER = ("role", "content", "type", "text", "name", "function", "tool_calls", "arguments", "include_usage")
WORDS = ("user", "assistant", "tool", "function", "text", "auto", "required", "json_object")


def anything(names: Sequence[str] = INNER) -> st.SearchStrategy[Any]:
    """Any JSON value, with these names in its objects."""
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 2**64 - 1),
        st.integers(-1, 3),
        st.floats(allow_nan=False, allow_infinity=False),
        st.sampled_from(WORDS),
        st.text(max_size=4),
    )
    keys = st.one_of(st.sampled_from(names), st.text(max_size=4))
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=8
    )


def cut(text: str, pieces: int) -> list[str]:
    """A text in about so many pieces, none empty."""
    size = max(1, -(-len(text) // pieces))
    return [text[at : at + size] for at in range(0, len(text), size)]
