"""Tool syntaxes: how models write tool calls, read as they are sampled.

Driven by completion_parser.py, which finds where a call may begin. A reader takes the text from there on and gives the
call's name as soon as it is certain, then its arguments piece by piece. A call that was recognised stays one, with the
arguments as they were written, even if they are cut or broken; what is never recognised goes back as text. Pure.

    hermes    <tool_call>{"name": …, "arguments": {…}}</tool_call>                 Qwen2.5, Qwen3, Hermes
    tags      <tool_call><function=NAME><parameter=KEY>…</parameter></function>    Qwen3-Coder, Qwen3.5, Nemotron
    pairs     <tool_call>NAME<arg_key>KEY</arg_key><arg_value>…</arg_value>        GLM-4.5
    bare      {"name": …, "parameters": {…}} as the whole completion               Llama 3.1, 3.2
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from agentlightning.records import JSON

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
        return name, orjson.dumps(arguments).decode()
    return (name, arguments) if isinstance(arguments, str) and isinstance(_json(arguments), dict) else None


def _json(text: str) -> Any:
    """None where it is no JSON."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
