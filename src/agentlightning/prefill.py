"""Prefill: an assistant message that an agent begins, and that the completion continues.

A call with one keeps it as the last of its messages, marked; its completion is what came after it. Later requests repeat
both as one message. Whoever puts the messages of calls together does it with `with_completion`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from agentlightning.records import JSON

PREFILL: Final = "prefill"
"""Key of an assistant message that is the last of its request and that the completion continues; its content is a text."""


def prefill_of(messages: Sequence[JSON]) -> JSON | None:
    """The message that the completion of these messages continues; None where it begins a message of its own."""
    return messages[-1] if messages and messages[-1].get(PREFILL) is True else None


def with_completion(messages: Sequence[JSON], completion: JSON) -> list[JSON]:
    """The messages of a call and its completion: one message with the prefill, where the request had one.

    >>> begun = {"role": "assistant", "content": "It is", "prefill": True}
    >>> with_completion([begun], {"role": "assistant", "content": " late."})
    [{'role': 'assistant', 'content': 'It is late.'}]
    """
    begun = prefill_of(messages)
    if begun is None:
        return [*messages, completion]
    whole = {**begun, **completion, "content": begun["content"] + (completion.get("content") or "")}
    del whole[PREFILL]
    if reasoning := (begun.get("reasoning_content") or "") + (completion.get("reasoning_content") or ""):
        whole["reasoning_content"] = reasoning
    return [*messages[:-1], whole]
