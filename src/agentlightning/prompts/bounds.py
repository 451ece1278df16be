"""Bounds of what a template may be and make, whatever its language. Pure."""

from __future__ import annotations

import json

from agentlightning.errors import InputError

MAX_TEMPLATE = 256 * 1024
"""Characters of a template."""
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
        return "".join(self._pieces)


def check_length(length: int) -> None:
    if length > MAX_RENDERED:
        raise InputError(f"template: expected at most {MAX_RENDERED} characters once rendered, got more")


def as_text(value: object) -> str:
    """A field as a template shows it: lists and objects as JSON."""
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
