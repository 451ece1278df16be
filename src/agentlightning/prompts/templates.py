"""Prompt templates: parsed and checked before anything runs, rendered from plain data, compared with each other.

A template is the value of a resource of kind ``prompt_template``: ``{"format", "template", "placeholders", "source",
"parents"}``. Driven by the workers, the gateway, the command line and optimizers. Whoever has a token of the run may write
templates: Jinja's run in its sandbox, over plain data. Pure; knows no store and no agent.
"""

from __future__ import annotations

import difflib
import functools
import json
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from agentlightning.errors import InputError, MissingExtraError

JSON = dict[str, Any]
Message = dict[str, str]
Format = Literal["fstring", "jinja", "messages"]

MAX_TEMPLATE = 256 * 1024
"""Characters of a template."""
MAX_RENDERED = 1024 * 1024
"""Characters of a rendered template."""
MAX_DIFF_CHARS = 20_000
MAX_DIFF_LINES = 1000
"""Size of each of two compared texts, from its beginning."""

ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Template:
    """A template that was checked.

    >>> Template.of("Answer {question} in {language}.").placeholders
    ('language', 'question')
    """

    format: Format
    template: str | tuple[Message, ...]
    placeholders: tuple[str, ...]
    """Fields that `render` needs, sorted."""
    source: str = ""
    """Name of the person or program that made it."""
    parents: tuple[int, ...] = ()
    """Versions that it was made from."""

    @classmethod
    def of(cls, template: str | Sequence[Message], format: Format | None = None, source: str = "") -> Self:
        """A template by its text, or its messages. InputError where it does not parse."""
        given = "fstring" if isinstance(template, str) else "messages"
        return cls.parse({"format": format or given, "template": template, "source": source})

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> Self:
        """The template of a resource's value. InputError, naming the field, where it does not parse, or has a placeholder
        that its own list lacks."""
        format = value.get("format", "fstring")
        if format not in get_args(Format):
            raise InputError(f"format: expected one of {', '.join(get_args(Format))}, got {format!r}")
        template = _messages(value.get("template")) if format == "messages" else _text(value.get("template"))
        texts = [template] if isinstance(template, str) else [each["content"] for each in template]
        if sum(map(len, texts)) > MAX_TEMPLATE:
            raise InputError(f"template: expected at most {MAX_TEMPLATE} characters, got {sum(map(len, texts))}")
        read = _jinja_fields if format == "jinja" else _fstring_placeholders
        found = tuple(sorted({name for text in texts for name in read(text)}))
        listed, parents = value.get("placeholders"), value.get("parents") or []
        if not (listed is None or _all(str, listed)) or not _all(int, parents):
            raise InputError("expected placeholders that are a list of names, and parents that are a list of versions")
        if listed is not None and (unknown := sorted(set(found) - set(listed))):
            raise InputError(f"template: unknown placeholder {unknown[0]!r}; {_known(listed)}")
        return cls(format, template, found, str(value.get("source", "")), tuple(parents))

    def value(self) -> JSON:
        """The value of its resource."""
        template = list(self.template) if isinstance(self.template, tuple) else self.template
        listed, parents = list(self.placeholders), list(self.parents)
        kept = {"format": self.format, "template": template, "placeholders": listed}
        return {**kept, "source": self.source, "parents": parents}

    def render(self, /, **fields: object) -> str | list[Message]:
        """The text, or the messages, with these fields filled in; fields that it has no placeholder for are left out.

        InputError names the placeholder that got nothing, and where the text is longer than a template may make it.
        """
        if missing := [name for name in self.placeholders if name not in fields]:
            raise InputError(f"placeholder {missing[0]!r}: expected a field of this name, got {_listed(fields)}")
        used = {name: fields[name] for name in self.placeholders}
        if isinstance(self.template, str):
            return _rendered(self.template, used) if self.format == "jinja" else _filled(self.template, used)
        return [{**each, "content": _filled(each["content"], used)} for each in self.template]

    def lines(self) -> list[str]:
        """Its lines as `diff` compares them; each message begins with its role."""
        if isinstance(self.template, str):
            return self.template.splitlines()
        return [line for each in self.template for line in (f"[{each['role']}]", *each["content"].splitlines())]


def check_candidate(old: Template, new: Template) -> None:
    """InputError where `new` cannot take the place of `old`: a placeholder is unknown or lost, or a text became messages."""
    if (old.format == "messages") != (new.format == "messages"):
        raise InputError(f"format: expected {old.format} as before, got {new.format}")
    if unknown := sorted(set(new.placeholders) - set(old.placeholders)):
        raise InputError(f"template: unknown placeholder {unknown[0]!r}; {_known(old.placeholders)}")
    if lost := sorted(set(old.placeholders) - set(new.placeholders)):
        raise InputError(f"template: the placeholder {lost[0]!r} is lost; {_known(old.placeholders)}")


def diff(old: Template, new: Template, names: tuple[str, str] = ("before", "after")) -> str:
    """The unified difference of two versions, '' where they are the same."""
    lines = changed_lines("\n".join(old.lines()), "\n".join(new.lines()))
    return "\n".join((f"--- {names[0]}", f"+++ {names[1]}", *lines)) if lines else ""


def changed_lines(before: str, after: str) -> list[str]:
    """The same of two texts, by line and without names. Of long texts the beginnings are compared, and a line says so:
    the time that it takes grows with the square of their lines."""
    old, new = (text[:MAX_DIFF_CHARS].splitlines()[:MAX_DIFF_LINES] for text in (before, after))
    lines = list(difflib.unified_diff(old, new, lineterm=""))[2:]
    if any(len(text) > MAX_DIFF_CHARS or len(text.splitlines()) > MAX_DIFF_LINES for text in (before, after)):
        lines.append(f"… of each the first {MAX_DIFF_CHARS} characters and {MAX_DIFF_LINES} lines were compared")
    return lines


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"template: expected a text, got {type(value).__name__}")
    return value


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise InputError('template: expected messages, [{"role": …, "content": …}, …]')
    for place, each in enumerate(value):
        if not isinstance(each, Mapping) or each.get("role") not in ROLES or not isinstance(each.get("content"), str):
            raise InputError(f"template.{place}: expected a role ({', '.join(ROLES)}) and a content that is a text")
    return tuple({"role": each["role"], "content": each["content"]} for each in value)


def _parts(text: str) -> list[tuple[str, str | None]]:
    """Texts, and the placeholder after each. InputError for more than a name: attributes and items of a field, and widths,
    which fill memory, are not for templates."""
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as cause:
        raise InputError(f"template: {cause}; a literal brace is written twice") from None
    for _, name, spec, conversion in parsed:
        if name is not None and (not name.isidentifier() or spec or conversion):
            shown = f"{name}{'!' + conversion if conversion else ''}{':' + spec if spec else ''}"
            raise InputError(
                f"template: expected a name between braces, got {{{shown}}}; a literal brace is written twice"
            )
    return [(literal, name) for literal, name, *_ in parsed]


def _fstring_placeholders(text: str) -> set[str]:
    return {name for _, name in _parts(text) if name is not None}


def _filled(text: str, fields: Mapping[str, object]) -> str:
    parts = ((literal, "" if name is None else _as_text(fields[name])) for literal, name in _parts(text))
    return _joined(part for pair in parts for part in pair)


def _joined(pieces: Iterable[str]) -> str:
    """The rendered text. InputError where it is longer than MAX_RENDERED, or cannot be sent."""
    made, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_RENDERED:
            raise InputError(f"template: expected at most {MAX_RENDERED} characters once rendered, got more")
        made.append(piece)
    text = "".join(made)
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError("template: expected characters once rendered, got half of one (a surrogate)")
    return text


def _as_text(value: object) -> str:
    """A field as a template shows it: lists and objects as JSON."""
    if not isinstance(value, dict | list | tuple):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:
        raise InputError("template: expected fields less deep, got one that no text can show") from None


@functools.cache
def _jinja() -> Any:
    try:
        from jinja2 import StrictUndefined
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError as cause:
        raise MissingExtraError("jinja2", "server") from cause
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=_as_text, keep_trailing_newline=True)


def _jinja_fields(text: str) -> set[str]:
    environment = _jinja()
    from jinja2 import TemplateSyntaxError, meta

    try:
        found: set[str] = meta.find_undeclared_variables(environment.parse(text))
        return {name for name in found if name not in environment.globals}
    except TemplateSyntaxError as cause:
        raise InputError(f"template: line {cause.lineno}: {cause.message}") from None
    except (RecursionError, ValueError) as cause:
        raise InputError(f"template: cannot be read: {type(cause).__name__}") from None


def _rendered(text: str, fields: Mapping[str, object]) -> str:
    environment = _jinja()
    from jinja2 import TemplateError

    try:
        plain = json.loads(json.dumps(fields, default=str))
        return _joined(environment.from_string(text).generate(plain))
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError) as cause:
        raise InputError(f"template: cannot be rendered: {cause}") from None


def _all(kind: type, values: Any) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(each, kind) for each in values)


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "none"


def _known(names: Sequence[str]) -> str:
    return f"expected only {', '.join(sorted(names))}" if names else "expected none"
