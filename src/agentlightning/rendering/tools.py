"""AnswerParser: sampled text into content, reasoning and tool calls, and the same as a stream.

The tokenizer's own response template decides where it has one (transformers' parser); else the Hermes form,
``<tool_call>{"name": …, "arguments": …}</tool_call>``, where the chat template speaks of it; else all is plain text. What
does not parse stays text. Pure; knows nothing of protocols.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from agentlightning.errors import ModelError, boundary
from agentlightning.types import JSON

TOOL_OPEN = "<tool_call>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer's parts; tool calls as (name, arguments as a JSON text)."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[tuple[str, str], ...] = ()


class AnswerParser:
    """How one model's answers are read."""

    def __init__(self, chat_template: str, response_template: JSON | None = None) -> None:
        self._response_template = _compiled(response_template)
        self.speaks_tools = TOOL_OPEN in chat_template or response_template is not None
        self.thinks = THINK_CLOSE in chat_template and "reasoning_content" in chat_template
        self.needs_special = response_template is not None
        """True where special tokens are part of what is parsed."""

    def parse(self, text: str, prompt: str = "", tools: list[JSON] | None = None, parse_tools: bool = True) -> Parsed:
        """The parts of `text`. `prompt` is what came before: some templates open the reasoning themselves."""
        if self._response_template is not None:
            return self._parse_by_template(text, prompt, tools, parse_tools)
        reasoning, content = self._split_reasoning(text, prompt)
        if not (parse_tools and self.speaks_tools):
            return Parsed(content, reasoning)
        content, calls = _split_tool_calls(content)
        return Parsed(content, reasoning, calls)

    def splitter(self, prompt: str, parse_tools: bool) -> Splitter:
        """Reads one answer as it is sampled."""
        return Splitter(
            whole=self._response_template is not None,
            thinks=self.thinks,
            inside=self.thinks and _opens_reasoning(prompt),
            tools=parse_tools and self.speaks_tools,
        )

    def _split_reasoning(self, text: str, prompt: str) -> tuple[str | None, str]:
        if not self.thinks:
            return None, text
        if _opens_reasoning(prompt):
            body = text
        elif text.lstrip().startswith(THINK_OPEN):
            body = text.lstrip()[len(THINK_OPEN) :]
        else:
            return None, text
        reasoning, closed, content = body.partition(THINK_CLOSE)
        return reasoning.strip("\n"), content.lstrip("\n") if closed else ""

    def _parse_by_template(self, text: str, prompt: str, tools: list[JSON] | None, parse_tools: bool) -> Parsed:
        from transformers.utils.chat_parsing import parse_response

        try:
            message: dict[str, Any] = parse_response(text, self._response_template, prefix=prompt, tools=tools)
            calls = tuple(
                (str(call["function"]["name"]), _arguments_text(call["function"]["arguments"]))
                for call in message.get("tool_calls") or ()
            )
        except (ValueError, KeyError, TypeError):  # a malformed answer stays text
            return Parsed(text)
        if calls and not parse_tools:
            return Parsed(text)
        reasoning = message.get("reasoning_content") or message.get("thinking")
        return Parsed(str(message.get("content") or ""), reasoning, calls)


class Splitter:
    """Decides, while an answer is sampled, which text may already be sent: all that cannot become something else.

    Held back: whatever could begin a tool call, whitespace before one, and everything from one on.
    """

    def __init__(self, *, whole: bool, thinks: bool, inside: bool, tools: bool) -> None:
        self._whole = whole
        self._state = "thinking" if inside else "opening" if thinks else "content"
        self._tools = tools
        self._leading = True
        """True until reasoning begins with something else than newlines."""
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """(content, reasoning) that `text` releases."""
        self._held += text
        if self._whole:
            return "", ""
        reasoning = ""
        if self._state == "opening":
            start = self._held.lstrip()
            if THINK_OPEN.startswith(start[: len(THINK_OPEN)]):
                if len(start) < len(THINK_OPEN):
                    return "", ""
                self._held, self._state = start[len(THINK_OPEN) :], "thinking"
            else:
                self._state = "content"
        if self._state == "thinking":
            if self._leading:
                self._held = self._held.lstrip("\n")
                self._leading = not self._held
            reasoning, closed, after = self._held.partition(THINK_CLOSE)
            if not closed:
                return "", self._release(self._held, (THINK_CLOSE,))
            reasoning, self._held, self._state = reasoning.rstrip("\n"), after, "after"
        if self._state == "after":
            self._held = self._held.lstrip("\n")
            self._state = "content" if self._held else "after"
        return self._content(), reasoning

    def _content(self) -> str:
        if self._state != "content":
            return ""
        if not self._tools:
            content, self._held = self._held, ""
            return content
        before, found, _ = self._held.partition(TOOL_OPEN)
        if found:
            ready = before.rstrip()
            self._held = self._held[len(ready) :]
            return ready
        return self._release(self._held, (TOOL_OPEN,))

    def _release(self, text: str, markers: tuple[str, ...]) -> str:
        keep = held_back(text, markers)
        ready = text[: len(text) - keep].rstrip()
        self._held = text[len(ready) :]
        return ready


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of `text` with which one of the markers could begin.

    >>> held_back("one <tool", ("<tool_call>",))
    5
    """
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


def _compiled(response_template: JSON | None) -> Any:
    if response_template is None:
        return None
    from transformers.utils.chat_parsing.response_templates import load_response_template

    with boundary("the tokenizer's response_template", ModelError):
        return load_response_template(response_template)


def _opens_reasoning(prompt: str) -> bool:
    return prompt.rstrip().endswith(THINK_OPEN)


def _split_tool_calls(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    if TOOL_OPEN not in text:
        return text, ()
    calls = []
    rest = []
    position = 0
    for match in _TOOL_CALL.finditer(text):
        call = _tool_call(match[1])
        if call is None:
            continue
        calls.append(call)
        rest.append(text[position : match.start()])
        position = match.end()
    if not calls:
        return text, ()
    rest.append(text[position:])
    return "".join(rest).rstrip(), tuple(calls)


def _tool_call(text: str) -> tuple[str, str] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, _arguments_text(arguments)


def _arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
