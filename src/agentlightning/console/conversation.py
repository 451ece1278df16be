"""Messages and tokens of a call as HTML. Agents, tasks and models wrote them: they are shown as text. Knows no store."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from agentlightning.analysis.rollout_view import content_text
from agentlightning.console.markup import Html, element, join, json_text
from agentlightning.console.measures import Measure
from agentlightning.records import JSON, Call

MAX_OPEN_CHARS = 4000
"""Longer texts are folded: the whole of them is there, a click away."""


def messages_view(messages: Iterable[JSON]) -> Html:
    """Messages in their order: role, reasoning, text, tool calls."""
    return join(map(_message, messages))


def tools_view(tools: Sequence[JSON] | None) -> Html | None:
    """The tools that were offered; None where none were."""
    if not tools:
        return None
    rows = []
    for tool in tools:
        given = tool.get("function", tool)
        name = given.get("name", "tool") if isinstance(given, dict) else "tool"
        rows.append(element("details", element("summary", str(name)), _text(json_text(tool))))
    return element("div", element("h3", f"Tools offered ({len(tools)})"), *rows)


def token_strip(
    ids: Sequence[int], measure: Measure, text_of: Callable[[int], str], forced: Sequence[Sequence[int]] = ()
) -> Html:
    """Sampled tokens in their order, shaded by a measure; line ends can be seen."""
    free = {place for start, end in forced for place in range(start, end)}
    shown = []
    for place, (token, value) in enumerate(zip(ids, measure.values, strict=True)):
        number = f"{value:.4g}" if math.isfinite(value) else "not known"
        told = f"token {place}, id {token}, {measure.name} {number}"
        told += ", forced by the grammar" if place in free else ""
        classes = f"token {measure.style(value)}" + (" forced" if place in free else "")
        shown.append(element("span", text_of(token).replace("\n", "↵\n") or "∅", class_=classes, title=told))
    return element("div", *shown, class_="strip")


def prompt_view(chain: Sequence[Call], decode: Callable[[list[int]], str]) -> Html:
    """The prompt of the chain's last call as the model read it, template included; what was sampled before is marked."""
    parts = []
    for call in chain[:-1]:
        parts.append(element("span", decode(call.suffix_ids)))
        parts.append(element("mark", decode(call.sampled_ids), title="sampled by the policy in an earlier call"))
    return element("pre", *parts, element("span", decode(chain[-1].suffix_ids)), class_="prompt")


def _message(message: JSON) -> Html:
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


def _tool_call(call: JSON) -> Html:
    function = call.get("function", call)
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", "")
    of = element("span", str(call.get("id", "")), class_="of")
    name = element("div", str(function.get("name", "tool")), of, class_="tool")
    text = arguments if isinstance(arguments, str) else json_text(arguments)
    return element("div", name, _text(text), class_="call")


def _text(text: str) -> Html:
    if len(text) <= MAX_OPEN_CHARS:
        return element("pre", text)
    summary = element("summary", f"{text[:200]}… ({len(text):,} characters)")
    return element("details", summary, element("pre", text), class_="long")
