"""Answers as a model may sample them, and the deltas of their streams, for the protocols that agents drive by SDK."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from random_requests import cut

from agentlightning.protocols.base import Choice, Completion, Delta, EventReader, EventStream, ToolCall, ToolDelta

CALL_ID = "01970000-1111-7222-8333-444455556666"
OTHER_ID = "01970000-1111-7222-8333-444455557777"


def answer(choice: Choice, call_id: str = CALL_ID, cached_tokens: int = 0) -> Completion:
    return Completion(
        call_id=call_id, model="m", created_s=5, prompt_tokens=3, choices=(choice,), cached_tokens=cached_tokens
    )


def said(
    content: str | None, reasoning: str | None = None, calls: tuple[tuple[str, str], ...] = (), finish: str = ""
) -> Choice:
    """A choice, with its reason to end where none is given."""
    return Choice(
        content=content or None if calls else content or "",
        reasoning=reasoning or None,
        tool_calls=tuple(ToolCall(id=f"call_{at}", name=name, arguments=text) for at, (name, text) in enumerate(calls)),
        finish_reason=finish or ("tool_calls" if calls else "stop"),
        sampled_tokens=4,
    )


def deltas(choice: Choice, pieces: int) -> list[Delta]:
    """A choice, cut up; the first piece of a tool call may have a name and arguments at once."""
    result = [Delta(reasoning=part) for part in cut(choice.reasoning or "", pieces)]
    result += [Delta(content=part) for part in cut(choice.content or "", pieces)]
    for at, call in enumerate(choice.tool_calls):
        first, *rest = cut(call.arguments, pieces) or [""]
        if pieces % 2:
            first, rest = "", cut(call.arguments, pieces)
        result.append(Delta(tools=(ToolDelta(index=at, id=call.id, name=call.name, arguments=first),)))
        result += [Delta(tools=(ToolDelta(index=at, arguments=part),)) for part in rest]
    return result


def streamed(stream: EventStream, choice: Choice, pieces: int = 2, **known: Any) -> bytes:
    """A whole stream."""
    parts = [stream.first(), *(stream.delta(0, delta) for delta in deltas(choice, pieces))]
    return b"".join((*parts, stream.last(answer(choice, **known))))


def events(data: bytes) -> list[Any]:
    """The events of a stream, without an end mark; each names its type twice."""
    found = [json.loads(one) for one in EventReader().feed(data) if one != b"[DONE]"]
    names = [line[7:].decode() for line in data.split(b"\n") if line.startswith(b"event: ")]
    assert names == [event["type"] for event in found]
    return found


texts = st.text(st.characters(codec="utf-8"), max_size=5)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
objects = st.builds(json.dumps, st.dictionaries(texts, values, max_size=3), indent=st.none() | st.just(1))
broken = st.builds(lambda text, at, more: text[:at] + more, objects, st.integers(0, 12), texts)
"""Objects that were cut or went wrong, and texts that never were one."""


def choices(arguments: st.SearchStrategy[str]) -> st.SearchStrategy[Choice]:
    """Answers with up to two tool calls that have such arguments."""
    names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=3)
    calls = st.lists(st.tuples(names, arguments), max_size=2).map(tuple)
    return st.builds(said, texts, texts, calls, st.sampled_from(["", "", "length"]))
