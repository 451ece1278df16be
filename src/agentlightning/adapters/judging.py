"""Judging: what a judge is shown of a rollout, and what is read from its answer. Pure.

Reward functions that ask a model, and the credit rule `judge`, use it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from agentlightning.records import JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReply:
    """Completion of a judge, and its usage."""

    text: str
    prompt_tokens: int = 0
    sampled_tokens: int = 0


def values_of(key: str, text: str) -> Iterator[Any]:
    """Reads the value of `key` in each JSON object of a judge's text, the last first.

    >>> list(values_of("score", 'First {"score": 8}, no: {"score": 0.8}'))
    [0.8, 8]
    """
    for found in reversed(re.findall(r"\{[^{}]*\}", text)):
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(found).get(key)


def is_score(value: Any) -> bool:
    """True for a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def json_lines(messages: Iterable[JSON]) -> str:
    """Messages as a judge is shown them, one per line."""
    return "\n".join(json.dumps(message, ensure_ascii=False, sort_keys=True) for message in messages)
