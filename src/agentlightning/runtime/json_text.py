"""JSON as programs write it, halves of characters among it: JavaScript cuts texts between the two, JSON's escapes allow it,
and no tokenizer, store or other JSON reader takes one. Each becomes U+FFFD, as in JavaScript's own `toWellFormed`. Pure.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPES = re.compile(_PAIR + r"|\\u([dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL)


def loads(data: bytes | str) -> Any:
    """The value of a JSON text. Raises orjson.JSONDecodeError."""
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
