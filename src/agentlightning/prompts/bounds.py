"""Bounds of what a template may be and make, whatever its language. Pure."""

from __future__ import annotations

import json

from agentlightning.errors import InputError

MAX_TEMPLATE = 256 * 1024
"""Characters of a template."""
MAX_DIFF_CHARS = 20_000
"""Of each of two texts, from its beginning, that are compared."""
MAX_DIFF_LINES = 1000
MAX_RENDERED = 1024 * 1024
"""Characters that a template may become."""


class Bounded:
    """A text that is put together from pieces. InputError once it is longer than a template may make it."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0

    def add(self, piece: str) -> None:
        self._length += len(piece)
        check_length(self._length)
        self._pieces.append(piece)

    def text(self) -> str:
        made = "".join(self._pieces)
        try:
            made.encode()
        except UnicodeEncodeError:
            raise InputError("template: expected characters once rendered, got half of one (a surrogate)") from None
        return made


def check_length(length: int) -> None:
    if length > MAX_RENDERED:
        raise InputError(f"template: expected at most {MAX_RENDERED} characters once rendered, got more")


def as_text(value: object) -> str:
    """A field as a template shows it: lists and objects as JSON."""
    if not isinstance(value, dict | list | tuple):
        return str(value)
    check_size(value)
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        raise InputError("template: expected fields less deep, got one that no text can show") from None


def check_size(value: object) -> None:
    """InputError where data is longer as text than a template may make it: parts that are shared count each time."""
    length, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        length += len(one) if isinstance(one, str) else 1
        check_length(length)
        if isinstance(one, dict):
            waiting += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            check_length(len(waiting) + len(one))
            waiting += one
