"""Sizes and times as people give them to commands and read them: 10GB, 30d."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from agentlightning.errors import ConfigError

BYTES: MappingProxyType[str, int] = MappingProxyType({"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12})
SECONDS: Mapping[str, int] = MappingProxyType({"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800})


def bytes_of(text: str | None, name: str) -> int | None:
    """A size such as 10GB; ConfigError that names the option otherwise."""
    return None if text is None else int(_number(text.upper(), name, BYTES, "a size such as 10GB or 500MB"))


def seconds_of(text: str | None, name: str) -> float | None:
    """A time such as 90m, 12h or 7d; ConfigError that names the option otherwise."""
    return None if text is None else _number(text, name, SECONDS, "a time such as 90m, 12h, 30d or 8w")


def days_of(text: str | None, name: str) -> float | None:
    """The same in days."""
    seconds = seconds_of(text, name)
    return None if seconds is None else seconds / SECONDS["d"]


def shown_bytes(size: int) -> str:
    """For people: 1.2 GB."""
    for unit in reversed(BYTES):
        if size >= BYTES[unit]:
            return f"{size / BYTES[unit]:.1f} {unit}" if unit else f"{size} B"
    return "0 B"


def _number(text: str, name: str, units: Mapping[str, int], expected: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text.strip())
    if match is None or match[2] not in units:
        raise ConfigError(f"{name}: expected {expected}, got {text!r}")
    return float(match[1]) * units[match[2]]
