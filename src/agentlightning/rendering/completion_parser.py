"""CompletionParser: sampled text into content, reasoning and tool calls, whole or as it comes.

Tool calls are read in the syntax that the chat template writes (tool_syntax.py); where that is unknown here, by the
tokenizer's own response template (transformers' parser), which needs the whole completion; else all is plain text. Whole
completions and streamed ones are read by the same steps, so that they cannot differ. Pure; knows nothing of protocols.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import orjson

from agentlightning.errors import ModelError, boundary
from agentlightning.records import JSON
from agentlightning.rendering.tool_syntax import (
    CLOSE,
    OPEN,
    PYTHON_TAG,
    CallReader,
    Syntax,
    held_back,
    may_be_bare,
    reader,
    syntax_of,
)

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """More of the tool call at `index`; the name comes with its first piece and only then."""

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """An increment of a completion."""

    content: str = ""
    reasoning: str = ""
    tools: tuple[ToolPiece, ...] = ()


class CompletionParser:
    """The parser of one model's completions."""

    def __init__(self, chat_template: str, response_template: JSON | None = None) -> None:
        self.syntax = None if response_template is not None else syntax_of(chat_template)
        """The way in which the model writes tool calls; None where that is not known."""
        self._response_template = _compiled(response_template)
        self.thinks = THINK_CLOSE in chat_template and "reasoning_content" in chat_template
        self.needs_special = response_template is not None
        """True where special tokens are part of what is parsed."""
        self.tool_end = CLOSE if self.syntax in ("hermes", "tags", "pairs") else _close(response_template)
        """The text that ends a tool call; None where there is no such text."""

    def splitter(
        self, prompt: str, tools: list[JSON] | None, parse_tools: bool, begun: str | None = None
    ) -> Splitter | WholeSplitter:
        """Reads one completion as it is sampled; `begun` is the text that it continues, where the agent began it."""
        if self._response_template is not None:
            return WholeSplitter(self._response_template, prompt, tools, parse_tools, begun or "")
        syntax = self.syntax if parse_tools else None
        if begun is not None:
            inside = self.thinks and begun.rfind(THINK_OPEN) > begun.rfind(THINK_CLOSE)
            return Splitter(syntax, tools, thinks=inside, inside=inside, begins=False)
        return Splitter(syntax, tools, thinks=self.thinks, inside=self.thinks and _opens_reasoning(prompt))


class Splitter:
    """Gives out text as soon as it cannot become something else.

    Held back: whatever could begin a tool call, and whitespace before one. Whitespace around tool calls and newlines around
    the reasoning are nobody's; other text after a call is content.
    """

    def __init__(
        self, syntax: Syntax | None, tools: list[JSON] | None, *, thinks: bool, inside: bool, begins: bool = True
    ) -> None:
        """`inside`: reasoning is open already. `begins` is False where the message has text already."""
        self._syntax = syntax
        self._tools = tools
        self._state: Literal["opening", "thinking", "after", "content"] = (
            "thinking" if inside else "opening" if thinks else "content"
        )
        self._leading = True
        """True until reasoning begins with something else than newlines."""
        self._held = ""
        self._call: CallReader | None = None
        self._opened = ""
        """The whitespace and the mark before the call under way: they are text again if it proves to be none."""
        self._calls = 0
        self._follows_call = False
        self._at_start = begins

    def feed(self, text: str) -> Piece:
        """Takes in `text`; returns what is certain."""
        self._held += text
        return self._read(last=False)

    def finish(self) -> Piece:
        """The completion is over: what was held back."""
        return self._read(last=True)

    def _read(self, last: bool) -> Piece:
        reasoning = ""
        if self._state == "opening":
            start = self._held.lstrip()
            if not last and len(start) < len(THINK_OPEN) and THINK_OPEN.startswith(start):
                return Piece()
            if start.startswith(THINK_OPEN):
                self._held, self._state = start[len(THINK_OPEN) :], "thinking"
            else:
                self._state = "content"
        if self._state == "thinking":
            reasoning = self._read_reasoning(last)
        if self._state == "after":
            self._held = self._held.lstrip("\n")
            self._state = "content" if self._held else "after"
        if self._state != "content":
            return Piece(reasoning=reasoning)
        content, tools = self._read_content(last)
        return Piece(content, reasoning, tuple(tools))

    def _read_reasoning(self, last: bool) -> str:
        if self._leading:
            self._held = self._held.lstrip("\n")
            self._leading = not self._held
        reasoning, closed, after = self._held.partition(THINK_CLOSE)
        if closed:
            self._held, self._state = after, "after"
            return reasoning.rstrip("\n")
        if last:
            self._held = ""
            return reasoning.rstrip("\n")
        return self._release((THINK_CLOSE,))

    def _read_content(self, last: bool) -> tuple[str, list[ToolPiece]]:
        content, tools = "", list[ToolPiece]()
        while True:
            if self._call is not None:
                text, pieces = self._read_call(self._call, last)
                content += text
                tools += pieces
                if self._call is not None:
                    return content, tools
            if self._follows_call:
                self._held = self._held.lstrip()
                self._follows_call = not self._held
            if not self._begins_call(last):
                break
            content += self._take_before_call()
        if last or self._syntax is None:
            content, self._held = content + self._held, ""
        elif not (self._syntax == "bare" and self._at_start):
            content += self._release((OPEN,) if self._syntax != "bare" else ())
        return content, tools

    def _read_call(self, call: CallReader, last: bool) -> tuple[str, list[ToolPiece]]:
        """Text that was no call after all, and pieces of the call under way."""
        parts = call.feed(self._held)
        self._held = ""
        if last:
            parts += call.finish()
        pieces = [ToolPiece(self._calls, name, arguments) for name, arguments in parts]
        if not call.ended:
            return "", pieces
        self._call = None
        self._held = call.rest
        if call.recognised:
            self._calls += 1
            self._follows_call = True
            return "", pieces
        return self._opened + call.raw, pieces

    def _begins_call(self, last: bool) -> bool:
        if self._syntax == "bare":
            if not self._at_start:
                return False
            if not may_be_bare(self._held):
                self._at_start = False
                return False
            return bool(self._held.strip()) and (last or len("".join(self._held.split())) > len(PYTHON_TAG))
        return self._syntax is not None and OPEN in self._held

    def _take_before_call(self) -> str:
        """Begin a call; returns the text before it."""
        assert self._syntax is not None
        self._call = reader(self._syntax, self._tools)
        if self._syntax == "bare":
            self._at_start = False
            start = self._held.lstrip()
            bare = start.removeprefix(PYTHON_TAG)
            self._opened = self._held[: len(self._held) - len(bare)]
            self._held = bare
            return ""
        before, _, after = self._held.partition(OPEN)
        ready = before.rstrip()
        self._opened = before[len(ready) :] + OPEN
        self._held = after
        return ready

    def _release(self, markers: tuple[str, ...]) -> str:
        keep = held_back(self._held, markers)
        ready = self._held[: len(self._held) - keep].rstrip() if markers else self._held
        self._held = self._held[len(ready) :]
        return ready


class WholeSplitter:
    """Reads a completion by the tokenizer's response template, which cannot begin before the completion is whole."""

    def __init__(
        self, template: Any, prompt: str, tools: list[JSON] | None, parse_tools: bool, begun: str = ""
    ) -> None:
        self._template = template
        self._prompt = prompt
        self._tools = tools
        self._parse_tools = parse_tools
        self._begun = begun.lstrip()
        """The text before the completion, which the parser counts as a part of the content."""
        self._held = ""

    def feed(self, text: str) -> Piece:
        """Holds everything back."""
        self._held += text
        return Piece()

    def finish(self) -> Piece:
        """All of it. A malformed completion stays text."""
        from transformers.utils.chat_parsing import parse_response

        text, self._held = self._held, ""
        try:
            message: dict[str, Any] = parse_response(text, self._template, prefix=self._prompt, tools=self._tools)
            calls = [
                (str(call["function"]["name"]), _arguments_text(call["function"]["arguments"]))
                for call in message.get("tool_calls") or ()
            ]
        except (ValueError, KeyError, TypeError):
            return Piece(text)
        if calls and not self._parse_tools:
            return Piece(text)
        reasoning = message.get("reasoning_content") or message.get("thinking") or ""
        pieces = tuple(ToolPiece(index, name, arguments) for index, (name, arguments) in enumerate(calls))
        return Piece(str(message.get("content") or "").removeprefix(self._begun), str(reasoning), pieces)


def _compiled(response_template: JSON | None) -> Any:
    if response_template is None:
        return None
    from transformers.utils.chat_parsing.response_templates import load_response_template

    with boundary("the tokenizer's response_template", ModelError):
        return load_response_template(response_template)


def _close(response_template: JSON | None) -> str | None:
    """The literal that a response template has tool calls end with, if it is one."""
    fields = (response_template or {}).get("fields")
    calls = fields.get("tool_calls") if isinstance(fields, dict) else None
    close = calls.get("close") if isinstance(calls, dict) else None
    return close if isinstance(close, str) and close else None


def _opens_reasoning(prompt: str) -> bool:
    return prompt.rstrip().endswith(THINK_OPEN)


def _arguments_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
