"""Messages and tokens of a call as HTML.

Driven by the replay and the pages that put rollouts side by side. Everything here was written by agents, tasks
and models: it is shown as text. Knows no store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import orjson

from agentlightning.analysis.rollout_view import content_text
from agentlightning.console.markup import Html, element, join
from agentlightning.console.measures import Measure
from agentlightning.records import JSON, Call
from agentlightning.rendering.model_folder import token_bytes

MAX_OPEN_CHARS = 4000
"""Longer texts are folded: the whole of them is there, a click away."""
TextOf = Callable[[int], str]


def message_view(message: JSON) -> Html:
    """One message: role, reasoning, text, tool calls."""
    role = str(message.get("role", ""))
    parts: list[Html] = []
    for name in ("reasoning_content", "reasoning"):
        if isinstance(thought := message.get(name), str) and thought:
            parts.append(element("details", element("summary", "reasoning"), _text(thought), class_="reasoning"))
    if text := content_text(message.get("content")):
        parts.append(_text(text))
    calls = message.get("tool_calls")
    parts += [_tool_call(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    of = message.get("tool_call_id") or message.get("name")
    label = element("div", role, element("span", str(of), class_="of") if of else None, class_="role")
    kind = role if role in ("system", "user", "assistant", "tool") else "other"
    return element("div", label, *parts, class_=f"message {kind}")


def messages_view(messages: Iterable[JSON]) -> Html:
    """Messages in their order."""
    return join(message_view(message) for message in messages)


def tools_view(tools: Sequence[JSON] | None) -> Html | None:
    """The tools that were offered; None where none were."""
    if not tools:
        return None
    rows = []
    for tool in tools:
        given = tool.get("function", tool)
        given = given if isinstance(given, dict) else {}
        rows.append(element("details", element("summary", str(given.get("name", "tool"))), _text(_json(tool))))
    return element("div", element("h3", f"Tools offered ({len(tools)})"), *rows)


def token_strip(
    ids: Sequence[int],
    measure: Measure,
    text_of: TextOf,
    forced: Sequence[Sequence[int]] = (),
    chosen: range = range(0),
) -> Html:
    """Sampled tokens in their order, shaded by a measure; those in `chosen` are marked, the first of them as `#token`."""
    free = {place for start, end in forced for place in range(start, end)}
    shown = []
    for place, (token, value) in enumerate(zip(ids, measure.values, strict=True)):
        classes = f"token {shade_class(measure, value)}" + (" forced" if place in free else "")
        classes += " chosen" if place in chosen else ""
        number = f"{value:.4g}" if math.isfinite(value) else "not known"
        told = f"token {place}, id {token}, {measure.name} {number}" + (
            ", forced by the grammar" if place in free else ""
        )
        anchor = "token" if len(chosen) and place == chosen[0] else None
        shown.append(element("span", visible(text_of(token)), class_=classes, title=told, id=anchor))
    return element("div", *shown, class_="strip")


def shade_class(measure: Measure, value: float) -> str:
    """Returns the style sheet's class of a value: a warm shade, a cool one below zero, none for what is not known."""
    shade = measure.shade(value) if math.isfinite(value) else 0
    return f"s{shade}" if shade >= 0 else f"b{-shade}"


def visible(text: str) -> str:
    """Returns a token's text with line ends that can be seen.

    >>> visible("a" + chr(10)), visible("")
    ('a↵\\n', '∅')
    """
    return text.replace("\n", "↵\n") if text else "∅"


def token_text(text: str, piece: str) -> str:
    """Returns the text of a token alone; the bytes of one that is a part of a character.

    >>> token_text("é", "Ã©"), token_text(chr(0xFFFD), "Ã")
    ('é', '⟨C3⟩')
    """
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text
    return "".join(f"⟨{byte:02X}⟩" for byte in token_bytes(text, piece))


def prompt_view(chain: Sequence[Call], decode: Callable[[list[int]], str]) -> Html:
    """The prompt of the chain's last call as the model read it, template included; what was sampled before is marked."""
    parts = []
    for call in chain[:-1]:
        parts.append(element("span", decode(call.suffix_ids)))
        parts.append(element("mark", decode(call.sampled_ids), title="sampled by the policy in an earlier call"))
    parts.append(element("span", decode(chain[-1].suffix_ids)))
    return element("pre", *parts, class_="prompt")


def _text(text: str) -> Html:
    if len(text) <= MAX_OPEN_CHARS:
        return element("pre", text)
    return element(
        "details", element("summary", f"{text[:200]}… ({len(text):,} characters)"), element("pre", text), class_="long"
    )


def _tool_call(call: JSON) -> Html:
    function = call.get("function", call)
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", "")
    return element(
        "div",
        element(
            "div",
            str(function.get("name", "tool")),
            element("span", str(call.get("id", "")), class_="of"),
            class_="tool",
        ),
        _text(arguments if isinstance(arguments, str) else _json(arguments)),
        class_="call",
    )


def _json(value: object) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str).decode()
