"""System prompts: another one in a request, in the form of every protocol; and names of agents by theirs. Pure.

The gateway's prompt rules drive the first. A call whose program does not say which of its agents makes it gets a name of its
prompt, so that `algorithm.agents` can select it: the first words and a hash, ``planner~3f2a9c``. What differs from task to
task and from day to day is left out of both: dates, times, paths, addresses and hashes. `tracing/tool_uses.py` prefers what
a span says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from agentlightning.records import JSON

SYSTEM_ROLES = ("system", "developer")

MAX_CHARS = 8000
"""Of a prompt that are read, since each costs it."""
MAX_KEPT_CHARS = 4000
"""Of those that a name is made of: what is left out before them must not move the end."""
MAX_NAME_WORDS = 40
"""Of a prompt that may be in a name."""
MAX_WORDS = 2
MAX_WORD_CHARS = 16

_BILLING = re.compile(r"x-anthropic-billing-header:(?:\s*\w+=[^;\s]*;?)*\s*")
"""Claude Code puts it before its prompt, new for each call."""

_DATE = re.compile(
    r"(?:jan|feb|mar|apr|may|jun|jul|aug|sept?|oct|nov|dec)(?:uary|ruary|ch|il|e|y|ust|ember|ober|tember)?"
    r"|(?:mon|tues?|wed(?:nes)?|thu(?:rs?)?|fri|sat(?:ur)?|sun)(?:day)?",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d{1,3}(?:st|nd|rd|th)?|v?\d+")
_WORD = re.compile(r"[^\W\d_]{2,}")
_FILLER = re.compile(
    "you|are|an|the|is|your|am|it|this|that|of|for|to|and|in|with|on|at|by|from|as|who|be|will|must|should|can|act"
    "|helpful|assistant|agent|expert|ai|model|system|role|task"
)
_NAME = re.compile(r"[\w-]+~[0-9a-f]{6}")


def replace_system(protocol: str, data: JSON, text: str) -> tuple[JSON, str | None]:
    """The request with `text` for its system prompt, and what that was ('' where it had none); None where the protocol has
    no place for one.

    Several system messages at its beginning become one. What a Responses request has of them among its input goes into its
    instructions: these are sent with every request, while earlier input comes back by `previous_response_id`.
    """
    if protocol == "chat" and isinstance(data.get("messages"), list):
        system, others = _leading(data["messages"])
        role = system[0]["role"] if system else "system"
        made = {"role": role, "content": text}
        return {**data, "messages": [made, *others]}, _joined(each.get("content") for each in system)
    if protocol == "responses":
        items = data["input"] if isinstance(data.get("input"), list) else []
        system, others = _leading(items)
        before = _joined([data.get("instructions"), *(each.get("content") for each in system)])
        return {**data, "instructions": text, **({"input": others} if system else {})}, before
    if protocol == "messages":
        given = data.get("system")
        blocks = [block for block in given if isinstance(block, dict)] if isinstance(given, list) else []
        cached = [block["cache_control"] for block in blocks if "cache_control" in block][-1:]
        block = {"type": "text", "text": text, **({"cache_control": cached[0]} if cached else {})}
        return {**data, "system": [block] if blocks else text}, _joined([given])
    if protocol == "generate_content":
        name = _google_name(data)
        given = data.get(name)
        kept = given if isinstance(given, dict) else {"parts": given}
        return {**data, name: {**kept, "parts": [{"text": text}]}}, _joined([kept.get("parts")])
    return data, None


def _leading(items: list[Any]) -> tuple[list[JSON], list[Any]]:
    """The system messages that a conversation begins with, and the rest."""
    count = 0
    while count < len(items) and isinstance(items[count], dict) and items[count].get("role") in SYSTEM_ROLES:
        count += 1
    return items[:count], items[count:]


def _google_name(data: JSON) -> str:
    return "system_instruction" if "system_instruction" in data else "systemInstruction"


def _joined(contents: Any) -> str:
    """The texts of contents: a text each, or a list of parts that have one."""
    texts: list[str] = []
    for content in contents:
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                texts.append(text)
    return "\n\n".join(texts)


# --- names of agents ----------------------------------------------------------------------------------------------------


def prompt_text(messages: Sequence[JSON]) -> str:
    """The system prompt with which a conversation begins; '' where it has none."""
    texts = []
    for message in messages:
        if message.get("role") not in SYSTEM_ROLES:
            break
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            texts += [text] if isinstance(text, str) else []
    return "\n".join(texts)


def prompt_name(text: str) -> str | None:
    """The name of the agent with this system prompt; None where it says nothing.

    >>> prompt_name("You are the Planner."), prompt_name("You are player 2.")
    ('planner~27021b', 'player~eb9af6')
    >>> prompt_name("Plan. Today is Nov 29, 2026 in /tmp/a1") == prompt_name("Plan. Today is May 2, 2027 in /tmp/b2")
    True
    """
    return _prompt_name(_BILLING.sub("", text[:MAX_CHARS], count=1)) if text else None


@lru_cache(maxsize=256)  # a run has few prompts, and many calls with each
def _prompt_name(text: str) -> str | None:
    kept = list(_lasting(text.split()))
    if not kept:
        return None
    words = [word.lower()[:MAX_WORD_CHARS] for word in _WORD.findall(" ".join(kept[:MAX_NAME_WORDS]))]
    digest = blake2b("".join(kept)[:MAX_KEPT_CHARS].encode(errors="replace"), digest_size=3)  # without joints of parts
    telling = [word for word in words if not _FILLER.fullmatch(word)] or words or ["agent"]
    return f"{'-'.join(telling[:MAX_WORDS])}~{digest.hexdigest()}"


def is_prompt_name(name: str) -> bool:
    """True for a name that `prompt_name` made."""
    return _NAME.fullmatch(name) is not None


def _lasting(words: Sequence[str]) -> Iterator[str]:
    """The words that do not change from one rollout to the next: no paths, no dates, and numbers only beside others."""
    dated = False
    for at, word in enumerate(words):
        plain = word.strip(".,;:!?()[]{}<>\"'`*")
        if "/" in word or "\\" in word:
            continue
        if _DATE.fullmatch(plain):
            dated = True
            continue
        if any(map(str.isdigit, plain)):
            beside = dated or (at + 1 < len(words) and _DATE.fullmatch(words[at + 1].strip(".,")))
            if beside or not _NUMBER.fullmatch(plain) or (len(plain) == 4 and plain[:2] in ("19", "20")):
                continue
        dated = False
        yield word
