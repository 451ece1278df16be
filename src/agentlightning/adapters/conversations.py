"""Recorded calls as conversations and preference pairs, for reward functions, judges and rows of other trainers. Pure."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.records import JSON, Call, with_completion
from agentlightning.rendering.call_chain import call_chain, chain_prompt, chain_tools

TRACE_PROTOCOL = "trace"
"""`Call.protocol` of a call that no gateway saw: it has text and no tokens."""


def full_messages(calls: Sequence[Call]) -> list[tuple[list[JSON], list[JSON] | None]]:
    """The whole prompt of each call, from its parents, and its tools. A parent that is not among them counts as
    empty; one may stand after its child, where it finished later."""
    by_id = {call.id: call for call in calls}
    chains = [call_chain(call, by_id) for call in calls]
    return [(chain_prompt(chain), chain_tools(chain)) for chain in chains]


def conversations(calls: Sequence[Call]) -> list[JSON]:
    """Rows ``{"messages", "tools"?}``, one for each conversation as far as it went, as fine-tuning formats have them.

    A call that another one continues is part of that one's row. Calls (a), (a, b), (c) are rows (a, b) and (c).
    """
    continued = {call.parent_id for call in calls}
    rows = []
    for call, (messages, tools) in zip(calls, full_messages(calls), strict=True):
        if call.id not in continued:
            row: JSON = {"messages": with_completion(messages, call.completion)}
            rows.append(row | ({"tools": tools} if tools else {}))
    return rows


def preference_row(better: Sequence[Call], worse: Sequence[Call]) -> JSON | None:
    """A row ``{"prompt", "chosen", "rejected", "tools"?}`` of messages, as preference trainers take them (TRL's
    DPOTrainer, conversational format): what both rollouts begin with, and how each went on.

    None where a rollout is not one conversation, where they begin otherwise or have other tools, or where they went the
    same way.
    """
    rows = [conversations(better), conversations(worse)]
    if any(len(of_rollout) != 1 for of_rollout in rows):
        return None
    first, second = rows[0][0]["messages"], rows[1][0]["messages"]
    shortest = min(len(first), len(second))
    shared = next((place for place in range(shortest) if first[place] != second[place]), shortest)
    # The first thing that the model said is where it may differ: an equal beginning of completions is prompt, too.
    if not shared or shared == shortest or {first[shared]["role"], second[shared]["role"]} != {"assistant"}:
        return None
    tools = rows[0][0].get("tools")
    if tools != rows[1][0].get("tools"):
        return None
    row: JSON = {"prompt": first[:shared], "chosen": first[shared:], "rejected": second[shared:]}
    return row | ({"tools": tools} if tools else {})


# --- judges -----------------------------------------------------------------------------------------------------------


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
