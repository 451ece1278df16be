"""Compaction: an agent goes on from a summary that it wrote itself, in place of the conversation that the summary tells.

trajectories.py asks it of the calls of an attempt. Such a prompt continues no recorded call, so the tree of calls does not
say what it came from: its text does. Pure; where nothing is certain it says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from typing import Any

from agentlightning.records import JSON, Call

MIN_SUMMARY_CHARS = 16
"""A shorter text may stand in a prompt by chance."""
MAX_TAGS = 16
"""Tags of a completion that are looked at: models write what they like, and each costs a look at all of it."""
NO_TEXTS = frozenset({"role", "type", "id", "tool_call_id", "name"})
"""Fields of a message that hold no words."""


def compactions(attempt: Sequence[Call]) -> dict[str, tuple[str, str]]:
    """By the first call of a conversation that goes on from a summary: the call that wrote it, and the first one of the
    conversation that it stands for. `attempt` is in the order in which calls finished.

    The summary is a completion that no call continues and that stands in the later prompt, as a whole or what it has between
    two tags. Its call continues the conversation, or was shown it as text. The later prompt keeps a message of that
    conversation's beginning (its instructions, or the task) and lacks a completion of it:

        a: [system, task]                   -> step 1     b: continues a, [result 1]   -> step 2
        c: continues b, ["Summarise"]       -> S          d: [system, task, "So far: " + S]   -> step 3

    gives {d: (c, a)}. An answer that another agent is shown is no summary: it begins with messages of its own.
    """
    continued = {call.parent_id for call in attempt}
    by_id = {call.id: call for call in attempt}
    ended: list[tuple[Call, list[str]]] = []
    found = {}
    for place, call in enumerate(attempt):
        shown = plain(call.messages) if call.parent_id is None and ended else ""
        for summary, texts in reversed(ended):
            if not any(text in shown for text in texts):
                continue
            told = _told(summary, by_id, attempt[:place])
            kept = bool(told) and any(message in call.messages for message in told[0].messages)
            if kept and not all(plain(one.completion) in shown for one in told):
                found[call.id] = summary.id, told[0].id
                break
        if call.id not in continued and (texts := summary_texts(call.completion)):
            ended.append((call, texts))
    return found


def summary_texts(completion: JSON) -> list[str]:
    """The texts by which a summary can be found in a prompt: all of its content, and what stands between two tags."""
    content = plain(completion.get("content") or "")
    names = dict.fromkeys(match[1] for match in islice(re.finditer(r"<(\w+)>", content), MAX_TAGS))
    parts = [content, *(content.partition(f"<{name}>")[2].rpartition(f"</{name}>")[0].strip() for name in names)]
    return [part for part in parts if len(part) >= MIN_SUMMARY_CHARS]


def plain(value: Any) -> str:
    """All texts of a message or of messages, white space between words as one space.

    >>> plain([{"role": "user", "content": [{"type": "text", "text": "two\\n words"}]}])
    'two words'
    """
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        return " ".join(filter(None, (plain(each) for name, each in value.items() if name not in NO_TEXTS)))
    return " ".join(filter(None, map(plain, value))) if isinstance(value, list | tuple) else ""


def _told(summary: Call, by_id: Mapping[str, Call], before: Sequence[Call]) -> list[Call]:
    """The calls that a summary tells, from the first of their conversation on: those that its call continues, else those
    whose completions stand in its prompt."""
    path, parent = list[Call](), summary.parent_id
    while parent is not None and parent in by_id:
        path.append(by_id[parent])
        parent = by_id[parent].parent_id
    if path:
        return path[::-1]
    shown = plain(summary.messages)
    earlier = takewhile(lambda one: one.id != summary.id, before)
    quoted = [one for one in earlier if (text := plain(one.completion)) and text in shown]
    if not quoted:
        return []
    first = quoted[0]
    while first.parent_id is not None and first.parent_id in by_id:
        first = by_id[first.parent_id]
    return [first, *(one for one in quoted if one.id != first.id)]
