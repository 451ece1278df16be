"""Side calls: calls that programs make beside their task, such as for a conversation's title. They are context. Pure.

`algorithms/selection.py` leaves them out of training, and screens mark them. A rule of shapes, not of texts, finds them, as
OpenEnv's capture does, so that it holds for programs that nobody has looked at; two texts only narrow it down: what a later
prompt quotes was part of the work, and so may be the last thing that a program asks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import orjson

from agentlightning.protocols.system_prompts import is_prompt_name, prompt_text
from agentlightning.records import JSON, Call

SideCallKind = Literal["title", "summary", "probe", "side call"]

_TITLES = (
    r"(?:(?:re)?titles?\b|headlines?\b|nam(?:e|ing)s? (?:for |of |this |the |a )*(?:chat|conversation|session|thread|task)"
    r"|(?:topic|branch name|slug|emoji|subject line|tag)s?\b|titre\b|titel\b|t[íi]tulo\b|标题|タイトル)"
)
_TITLE = re.compile(rf"\b{_TITLES}", re.IGNORECASE)
_ASKS_TITLE = re.compile(
    r"\b(?:generate|create|write|give|suggest|propose|provide|produce|make|return|come up with|reply with|respond with"
    rf"|choose|name)\b\W+(?:\S+\s+){{0,8}}?\W*{_TITLES}",
    re.IGNORECASE,
)
_SUMMARY = re.compile(r"\bsummar(?:y|ies|i[sz]e|i[sz]ing)\b|\brecap\b", re.IGNORECASE)

MAX_TITLE_CHARS = 200
"""Of a completion that is a title: a longer one is a text that somebody reads."""
MAX_PROBE_TOKENS = 16
"""Of a completion by which a program looks whether the model answers."""
MAX_PROBE_CHARS = 64
"""Of the message of a user in such a call."""

MIN_SUMMARY_CHARS = 16
"""A shorter text may stand in a prompt by chance."""
MAX_TAGS = 16
"""Tags of a completion that are looked at: models write what they like, and each costs a look at all of it."""
NO_TEXTS = frozenset({"role", "type", "id", "tool_call_id", "name"})
"""Fields of a message that hold no words."""


def side_calls(attempt: Sequence[Call]) -> dict[str, SideCallKind]:
    """By the ids of an attempt's side calls, what each looks like. `attempt` is in the order in which calls finished.

    A call is one where others of its policy have tools and it has none, its system prompt is none of theirs, nobody named
    its agent, it is no part of a conversation, and no later prompt has what it said. Where no call with tools began after
    it, it may have made the program's answer: then it has to look like a title or a probe.
    """
    roots: dict[str, Call] = {}
    working: defaultdict[str, list[Call]] = defaultdict(list)
    prompts: defaultdict[str, set[str]] = defaultdict(set)
    for call in attempt:
        root = roots[call.id] = roots.get(call.parent_id or "", call)  # a parent finishes before its children begin
        if root.tools:
            working[call.policy].append(call)
            prompts[call.policy].add(prompt_text(root.messages))
    continued, shown = {call.parent_id for call in attempt}, _Prompts(attempt)
    found: dict[str, SideCallKind] = {}
    for place, call in enumerate(attempt):
        alone = call.parent_id is None and call.id not in continued and not call.tools
        named = call.agent is not None and not is_prompt_name(call.agent)
        others = working[call.policy] if call.policy and alone and not named else []
        if not others or prompt_text(call.messages) in prompts[call.policy]:
            continue
        kind = _kind(call)
        last = not any(one.started_ns >= call.finished_ns for one in others)
        if (last and kind not in ("title", "probe")) or shown.quote(call, place + 1):
            continue
        found[call.id] = kind
    return found


def side_calls_line(kinds: Sequence[SideCallKind]) -> str:
    """A sentence with the number of calls of each kind.

    >>> side_calls_line(["title", "title", "probe"])
    '2 calls look like titles, 1 call looks like a probe'
    """
    told = []
    for kind in sorted(set(kinds), key=kinds.index):
        count = kinds.count(kind)
        plural = {"summary": "summaries"}.get(kind, f"{kind}s")
        told.append(f"1 call looks like a {kind}" if count == 1 else f"{count} calls look like {plural}")
    return ", ".join(told)


def _kind(call: Call) -> SideCallKind:
    system, users = prompt_text(call.messages), plain([one for one in call.messages if one.get("role") == "user"])
    short = len(plain(call.completion)) <= MAX_TITLE_CHARS
    if short and (_TITLE.search(system) or _ASKS_TITLE.search(users)):
        return "title"
    if len(call.sampled_ids) <= MAX_PROBE_TOKENS and len(users) <= MAX_PROBE_CHARS and not system:
        return "probe"
    return "summary" if _SUMMARY.search(f"{system} {users}") else "side call"


class _Prompts:
    """The texts of an attempt's prompts, each made once."""

    def __init__(self, attempt: Sequence[Call]) -> None:
        self._attempt = attempt
        self._texts: dict[int, str] = {}

    def quote(self, call: Call, start: int) -> bool:
        """True where a prompt from `start` on has what the call said, or a part of it that its own prompt had not."""
        own = self._text(start - 1)
        parts = [plain(text) for text in _parts(call)]
        news = [text for text in dict.fromkeys(parts) if len(text) >= MIN_SUMMARY_CHARS and text not in own]
        later = range(start, len(self._attempt)) if news else ()
        return any(text in self._text(place) for place in later for text in news)

    def _text(self, place: int) -> str:
        if place not in self._texts:
            self._texts[place] = plain(self._attempt[place].messages)
        return self._texts[place]


def _parts(call: Call) -> Iterator[str]:
    """A completion, its lines, and the texts in it where it is JSON: programs hand on a plan step by step."""
    yield from summary_texts(call.completion)
    content = call.completion.get("content")
    if not isinstance(content, str):
        return
    yield from (line.strip(" -*#0123456789.)") for line in content.splitlines())
    try:
        waiting = [orjson.loads(content)]
    except orjson.JSONDecodeError:
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value


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
