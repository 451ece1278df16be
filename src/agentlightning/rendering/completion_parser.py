"""CompletionParser: sampled text into content, reasoning and tool calls, whole or as it comes.

Tool calls are read in the syntax that the chat template writes; where that is unknown here, by the tokenizer's own response
template (transformers' parser), which needs the whole completion; else all is plain text. Whole and streamed completions are
read by the same steps. A call that was recognised stays one, with the arguments as they were written, even if they are cut
or broken; what is never recognised goes back as text. Pure; knows nothing of protocols.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>                 Qwen2.5, Qwen3, Hermes
    tags      <tool_call><function=NAME><parameter=KEY>…</parameter></function>    Qwen3-Coder, Qwen3.5, Nemotron
    pairs     <tool_call>NAME<arg_key>KEY</arg_key><arg_value>…</arg_value>        GLM-4.5
    bare      {"name": …, "parameters": {…}} as the whole completion               Llama 3.1, 3.2
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from agentlightning.errors import ModelError, boundary
from agentlightning.records import JSON
from agentlightning.runtime.json_text import whole_characters

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

    def __init__(self, chat_template: str, response_template: JSON | None = None, syntax: Syntax | None = None) -> None:
        """`syntax` is the one that the prompts teach, where these are not the model's own: its tokenizer's response template
        then knows nothing of them."""
        compiled = _compiled(response_template)
        if syntax is not None:
            response_template = compiled = None
        self.syntax = syntax if syntax or response_template is not None else syntax_of(chat_template)
        """The way in which the model writes tool calls; None where that is not known."""
        self._response_template = compiled
        self.thinks = THINK_CLOSE in chat_template and "reasoning_content" in chat_template
        self.is_plain = response_template is None and not self.thinks
        """True where a completion without tools is nothing but content."""
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
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
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
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


# --- syntaxes of tool calls ------------------------------------------------------------------------------------------


OPEN = "<tool_call>"
CLOSE = "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

Syntax = Literal["hermes", "tags", "pairs", "bare"]

CallPieces = list[tuple[str | None, str]]
"""(name, arguments) pieces of one call: the name comes with the first and only then."""

_JSON_OPENING = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')


def syntax_of(chat_template: str) -> Syntax | None:
    """The syntax that a chat template writes, and so teaches; None where it writes none that is known here."""
    if "<arg_key>" in chat_template:
        return "pairs"
    if "<function=" in chat_template:
        return "tags"
    if OPEN in chat_template:
        return "hermes"
    if '{"name": "' in chat_template and '"parameters": ' in chat_template:
        return "bare"
    return None


def reader(syntax: Syntax, tools: list[JSON] | None) -> CallReader:
    """A reader for one call, for the text after `OPEN` (bare: for the whole completion)."""
    if syntax == "hermes":
        return JsonCall(CLOSE, None)
    if syntax == "bare":
        return JsonCall(None, frozenset(_functions(tools)))
    return TaggedCall(_TAGS if syntax == "tags" else _PAIRS, _functions(tools))


class CallReader(ABC):
    """Reads one call as it is sampled."""

    def __init__(self) -> None:
        self._buffer = ""
        self.raw = ""
        """All that was read while it was not recognised."""
        self.recognised = False
        self.ended = False
        self.rest = ""
        """Text after its end."""

    @abstractmethod
    def feed(self, text: str) -> CallPieces:
        """The pieces that `text` completes."""

    @abstractmethod
    def finish(self) -> CallPieces:
        """The completion is over."""


class JsonCall(CallReader):
    """A call written as JSON; with `close` None it ends with its object, and its name must be one of `names`."""

    def __init__(self, close: str | None, names: frozenset[str] | None) -> None:
        super().__init__()
        self._close = close
        self._names = names
        self._state: Literal["opening", "arguments", "tail"] = "opening"
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._at = 0
        """The arguments in the buffer are read up to here."""
        self._mark: int | None = None
        """A closing mark within a string: part of it if the string goes on and ends as JSON has it, else the call's end."""

    def feed(self, text: str) -> CallPieces:
        pieces: CallPieces = []
        self._buffer += text
        if self._state == "opening":
            self.raw += text
            pieces += self._read_opening()
        if self._state == "arguments":
            pieces += self._read_arguments(last=False)
        if self._state == "tail":
            self._read_tail()
        return pieces

    def finish(self) -> CallPieces:
        if self.ended:
            return []
        if self._state == "opening":
            return self._read_whole(self._buffer, "")
        pieces = self._read_arguments(last=True) if self._state == "arguments" else []
        if not self.ended:
            self._end("")
        return pieces

    def _read_opening(self) -> CallPieces:
        opening = _JSON_OPENING.match(self._buffer)
        if opening is not None and self._buffer[opening.end()] == "{":
            name = _json(f'"{opening[1]}"') or opening[1]
            if self._names is not None and name not in self._names:
                self._end("")
                return []
            self.recognised = True
            self._state = "arguments"
            self._buffer = self._buffer[opening.end() :]
            return [(name, "")]
        if self._close is not None and self._close in self._buffer:
            body, _, rest = self._buffer.partition(self._close)
            return self._read_whole(body, rest)
        return []

    def _read_whole(self, body: str, rest: str) -> CallPieces:
        """A call whose parts come in another order, or whose arguments are a text."""
        call = _json_call(body)
        if call is None or (self._names is not None and call[0] not in self._names):
            self.raw = self.raw[: len(self.raw) - len(rest)]
            if self._close is not None and len(self.raw) > len(body):
                self.raw = body + self._close
            self._end(rest)
            return []
        self.recognised = True
        self._end(rest)
        return [call]

    def _read_arguments(self, last: bool) -> CallPieces:
        """Reads up to the end of the object; where that never comes, up to the closing mark."""
        limit = len(self._buffer)
        if not last and self._close is not None:
            limit -= held_back(self._buffer, (self._close,))
        while self._at < limit:
            char = self._buffer[self._at]
            if self._mark is not None and self._breaks_off(char):
                return self._cut(self._mark)
            if self._close is not None and self._buffer.startswith(self._close, self._at):
                if not self._in_string:
                    return self._cut(self._at)
                self._mark = self._at if self._mark is None else self._mark
            self._at += 1
            if self._ends_at(char):
                arguments, self._buffer, self._state = self._buffer[: self._at], self._buffer[self._at :], "tail"
                return [(None, arguments)]
        if last:
            return self._cut(limit if self._mark is None else self._mark)
        ready = self._buffer[:limit] if self._mark is None else self._buffer[: self._mark]
        ready = ready if self._in_string or self._mark is not None else ready.rstrip()
        self._buffer = self._buffer[len(ready) :]
        self._at -= len(ready)
        self._mark = None if self._mark is None else 0
        return [(None, ready)] if ready else []

    def _breaks_off(self, char: str) -> bool:
        """True where the string with the mark, or what follows it, is not that of JSON."""
        if self._in_string:
            return char < " "
        if char in ",:}]":
            self._mark = None
        return not (char in ",:}]" or char.isspace())

    def _cut(self, end: int) -> CallPieces:
        """The call ends here, within its object."""
        taken, rest = self._buffer[:end].rstrip(), self._buffer[end:]
        self._end(rest.removeprefix(self._close or ""))
        return [(None, taken)] if taken else []

    def _ends_at(self, char: str) -> bool:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def _read_tail(self) -> None:
        if self._close is not None:
            _, found, rest = self._buffer.partition(self._close)
            if found:
                self._end(rest)
            return
        left = self._buffer.lstrip()
        if left:
            self._end(left.removeprefix("}"))

    def _end(self, rest: str) -> None:
        self.ended = True
        self.rest = rest
        self._buffer = ""


@dataclass(frozen=True, slots=True)
class _Tags:
    """Patterns of a syntax in tags."""

    opening: re.Pattern[str]
    argument: re.Pattern[str]
    open_argument: re.Pattern[str]
    """An argument that is cut."""
    ending: re.Pattern[str]


_TAGS = _Tags(
    opening=re.compile(r"\s*<function=([^>\s]+)>"),
    argument=re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL),
    open_argument=re.compile(r"\s*<parameter=([^>\s]+)>(.*)\Z", re.DOTALL),
    ending=re.compile(r"\s*</function>"),
)
_PAIRS = _Tags(
    opening=re.compile(r"\s*([\w.\-]+)\s*?(?:\n|(?=<))"),
    argument=re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
    open_argument=re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*)\Z", re.DOTALL),
    ending=re.compile(r"(?!)"),
)


class TaggedCall(CallReader):
    """A call whose arguments are written between tags; they come as JSON, an argument at a time."""

    def __init__(self, tags: _Tags, functions: Mapping[str, JSON]) -> None:
        super().__init__()
        self._tags = tags
        self._functions = functions
        self._types: Mapping[str, Any] = {}
        self._count = 0
        self._closed = False
        """The arguments' object is closed."""

    def feed(self, text: str) -> CallPieces:
        self._buffer += text
        if not self.recognised:
            self.raw += text
        body, found, rest = self._buffer.partition(CLOSE)
        if found:
            self._buffer = body
            pieces = self._read(last=True)
            if not self.recognised:
                self.raw = body + CLOSE
            elif not self._closed:
                pieces.append((None, "}" if self._count else "{}"))
            self.ended, self.rest = True, rest
            return pieces
        return self._read(last=False)

    def finish(self) -> CallPieces:
        if self.ended:
            return []
        self.ended = True
        return self._read(last=True)

    def _read(self, last: bool) -> CallPieces:
        pieces: CallPieces = []
        if not self.recognised:
            opening = self._tags.opening.match(self._buffer if not last else self._buffer + "\n")
            if opening is None:
                return pieces
            self.recognised = True
            self._buffer = self._buffer[opening.end() :]
            pieces.append((opening[1], ""))
            parameters = self._functions.get(opening[1], {}).get("parameters") or {}
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            self._types = properties if isinstance(properties, dict) else {}
        while (argument := self._tags.argument.match(self._buffer)) is not None:
            self._buffer = self._buffer[argument.end() :]
            pieces.append((None, self._argument(argument[1], argument[2])))
        if not self._closed and (ending := self._tags.ending.match(self._buffer)) is not None:
            self._buffer = self._buffer[ending.end() :]
            self._closed = True
            pieces.append((None, "}" if self._count else "{}"))
        elif last and (cut := self._tags.open_argument.match(self._buffer)) is not None:
            pieces.append((None, self._argument(cut[1], cut[2])))
        return pieces

    def _argument(self, key: str, written: str) -> str:
        opening = ", " if self._count else "{"
        self._count += 1
        return f"{opening}{orjson.dumps(key).decode()}: {self._value(key, written)}"

    def _value(self, key: str, written: str) -> str:
        """The JSON of an argument: a text where the tool's schema says so, else whatever JSON it is, else a text."""
        value = written.removeprefix("\n").removesuffix("\n")
        schema = self._types.get(key)
        if not (isinstance(schema, dict) and schema.get("type") == "string"):
            try:
                orjson.loads(value)
            except orjson.JSONDecodeError:
                pass
            else:
                return value.strip()
        return orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_SUBCLASS).decode()


def may_be_bare(text: str) -> bool:
    """True where a completion that begins so may be a bare call."""
    packed = "".join(text.split())
    if PYTHON_TAG.startswith(packed[: len(PYTHON_TAG)]):
        packed = packed[len(PYTHON_TAG) :]
    beginning = '{"name":"'
    return beginning.startswith(packed[: len(beginning)])


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


def _functions(tools: list[JSON] | None) -> dict[str, JSON]:
    functions = [tool["function"] for tool in tools or () if isinstance(tool.get("function"), dict)]
    return {function["name"]: function for function in functions if isinstance(function.get("name"), str)}


def _json_call(text: str) -> tuple[str, str] | None:
    value = _json(text)
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, dict):
        return name, _arguments_text(arguments)
    return (name, arguments) if isinstance(arguments, str) and isinstance(_json(arguments), dict) else None


def _json(text: str) -> Any:
    """None where it is no JSON. Not by orjson, which makes floats of integers beyond 64 bits."""
    try:
        return json.loads(whole_characters(text), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
