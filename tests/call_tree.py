"""Calls given by their full prompts, linked to a tree: the slow definition of which call continues which."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from agentlightning.training_types import Transition


def linked(calls: Iterable[Transition]) -> list[Transition]:
    """Each call as the child of the earlier one with the longest prompt and completion that its own prompt begins with."""
    found: list[Transition] = []
    for call in calls:
        prompt = call.prompt_ids
        parent: Transition | None = None
        for earlier in found:
            read = earlier.prompt_ids + earlier.sampled_ids
            longest = 0 if parent is None else len(parent.prompt_ids) + len(parent.sampled_ids)
            if len(read) > longest and prompt[: len(read)] == read:
                parent = earlier
        if parent is not None:
            length = len(parent.prompt_ids) + len(parent.sampled_ids)
            known = len(parent.prompt_messages) + 1
            call = replace(call, parent=parent, suffix_ids=prompt[length:], messages=call.messages[known:])
        found.append(call)
    return found
