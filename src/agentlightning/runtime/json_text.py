"""JSON as programs write it, halves of characters among it: JavaScript cuts texts between the two, JSON's escapes allow it,
and no tokenizer, store or other JSON reader takes one. Each becomes U+FFFD, as in JavaScript's own `toWellFormed`. Integers
of a tool call's arguments stay as they are beyond 64 bits, where orjson makes floats of them. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import orjson

_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(_PAIR + r"|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL)


_ARGUMENTS = ("input", "args", "arguments")
"""Beside a name: the arguments of a tool call, where a protocol has them as an object."""
_CALLS = (None, "tool_use", "function_call")
"""Types of what has them."""
_ZEROS, _LONG = bytes.maketrans(b"123456789", b"000000000"), b"0" * 19
"""A number of 19 digits may be beyond 64 bits. Found so in a tenth of the time that a pattern takes."""


def loads(data: bytes | str) -> Any:
    """The value of a JSON text. Raises orjson.JSONDecodeError."""
    value = _loads(data)
    raw = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if _LONG in raw.translate(_ZEROS):
        with suppress(msgspec.DecodeError, RecursionError):  # halves of characters, a thousand levels
            return _with_whole_numbers(value, msgspec.json.decode(raw))
    return value


def dumps(value: Any) -> bytes:
    """JSON of a value that came as JSON, whatever its integers and levels. Raises TypeError for another."""
    try:
        return orjson.dumps(value)
    except TypeError:  # of more than 64 bits, or 254 levels
        return b"".join(_written(value))


def _with_whole_numbers(value: Any, exact: Any) -> Any:
    if isinstance(value, list):
        return [_with_whole_numbers(one, other) for one, other in zip(value, exact, strict=True)]
    if not isinstance(value, dict):
        return value
    named = isinstance(value.get("name"), str) and value.get("type") in _CALLS
    return {
        key: exact[key] if named and key in _ARGUMENTS else _with_whole_numbers(one, exact[key])
        for key, one in value.items()
    }


def _written(value: Any) -> Iterator[bytes]:
    """Yields the pieces of a text, without recursion."""
    waiting: list[Any] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, bytes):
            yield one
        elif isinstance(one, dict):
            members = [(one[key], b"," * (at > 0) + orjson.dumps(key) + b":") for at, key in enumerate(one)]
            waiting += [b"}", *(each for member in reversed(members) for each in member), b"{"]
        elif isinstance(one, list | tuple):
            items = [(item, b"," * (at > 0)) for at, item in enumerate(one)]
            waiting += [b"]", *(each for item in reversed(items) for each in item), b"["]
        else:
            yield str(one).encode() if type(one) is int else orjson.dumps(one)


def _loads(data: bytes | str) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        try:
            text = data if isinstance(data, str) else data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            text = ""
        if (mended := whole_characters(text)) == text:
            raise
        return orjson.loads(mended)


def whole_characters(text: str) -> str:
    r"""A JSON text without halves of characters, escaped or not.

    >>> whole_characters(r'"\ud83d and \ud83d\ude00"')
    '"\\ufffd and \\ud83d\\ude00"'
    """
    text = _ESCAPES.sub(lambda found: "\\ufffd" if found[1] else found[0], text)
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
