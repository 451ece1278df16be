"""The language of filters over summaries of rollouts: ``reward < 0.2 and step > 50 and agent = 'writer'``.

Driven by the stores, which make SQL of the tree (sql/summaries.py) or evaluate it here (Redis): both by SQL's logic of three
values, in which a comparison with a field that has none is unknown, and so is its opposite; only what is true matches.

    comparison   FIELD = != < <= > >= VALUE, FIELD ~ 'part', FIELD in (VALUE, …), FIELD is null
    combination  not, and, or (in this order) and parentheses; `not in`, `is not null`
    value        a number, 'text' (a quote in it is doubled), true, false

`agent` is a name among the rollout's sub-agents. `~` looks for a part of a text, case included.
"""

from __future__ import annotations

import math
import operator
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentlightning.errors import InputError
from agentlightning.store.codec import scalar
from agentlightning.store.summaries import RolloutSummary

MAX_CHARS = 65_536
MAX_COMPARISONS = 100  # databases bound the depth of an expression
MAX_VALUES = 1000  # databases bound the parameters of a statement, too
MAX_DEPTH = 50  # parentheses and `not` within each other

AGENT = "agent"
Value = str | int | float | bool

COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TOKEN = re.compile(
    r"\s*(?:(?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])|(?P<text>'(?:[^']|'')*')|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<sign><=|>=|!=|[=<>~(),])|(?P<end>$)|(?P<other>\S))"
)
_KEYWORDS = frozenset({"and", "or", "not", "in", "is", "null", "true", "false"})


class Field(NamedTuple):
    """A field that filters may name."""

    kind: type  # str, int, float or bool
    values: tuple[str, ...]  # the only texts that it may have; empty where it is free


@dataclass(frozen=True, slots=True)
class Comparison:
    """One field against values; several only where `sign` is ``in``, none where it is ``is null``."""

    field: str
    sign: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Not:
    part: Filter


@dataclass(frozen=True, slots=True)
class AllOf:
    """True where every part is; without parts it always is."""

    parts: tuple[Filter, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """True where some part is."""

    parts: tuple[Filter, ...]


Filter = Comparison | Not | AllOf | AnyOf


def _fields() -> dict[str, Field]:
    found = {AGENT: Field(str, ())}
    for name, hint in typing.get_type_hints(RolloutSummary).items():
        kind, _ = scalar(hint)
        if kind is not None:
            literals = [each for each in (hint, *typing.get_args(hint)) if typing.get_origin(each) is typing.Literal]
            found[name] = Field(kind, tuple(value for each in literals for value in typing.get_args(each)))
    return found


FIELDS: Mapping[str, Field] = _fields()


def parse(text: str) -> Filter:
    """The filter that a text says; an empty text matches everything. InputError names the field and the position."""
    if len(text) > MAX_CHARS:
        raise InputError(f"where: expected at most {MAX_CHARS} characters, got {len(text)}")
    parser = _Parser(text)
    if parser.kind == "end":
        return AllOf(())
    tree = parser.either(0)
    if parser.kind != "end":
        raise parser.wrong("'and', 'or' or the end")
    return tree


def matches(tree: Filter, row: RolloutSummary) -> bool | None:
    """The answer of the filter for this row; None where it is unknown."""
    if isinstance(tree, Comparison):
        return _compare(tree, row)
    if isinstance(tree, Not):
        answer = matches(tree.part, row)
        return None if answer is None else not answer
    answers = [matches(part, row) for part in tree.parts]
    decisive = isinstance(tree, AnyOf)
    if decisive in answers:
        return decisive
    return None if None in answers else not decisive


def _compare(comparison: Comparison, row: RolloutSummary) -> bool | None:
    sign, values = comparison.sign, comparison.values
    if comparison.field == AGENT:
        found = any(value in row.agents for value in values)
        return found if sign != "!=" else not found
    value = getattr(row, comparison.field)
    if sign == "is null":
        return value is None
    if value is None:
        return None
    if sign == "in":
        return value in values
    return values[0] in value if sign == "~" else COMPARISONS[sign](value, values[0])


class _Parser:
    """Recursive descent over the text; `kind` and `token` are those at the cursor."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = 0
        self._comparisons = self._count = 0
        self.kind = self.token = ""
        self._next()

    def either(self, depth: int) -> Filter:
        parts = [self._each(depth)]
        while self._take("or"):
            parts.append(self._each(depth))
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def wrong(self, expected: str, field: str = "") -> InputError:
        got = repr(self.token) if self.kind != "end" else "the end"
        return InputError(
            f"where: {field and f'{field}: '}expected {expected} at position {self._start + 1}, got {got}"
        )

    def _each(self, depth: int) -> Filter:
        parts = [self._one(depth)]
        while self._take("and"):
            parts.append(self._one(depth))
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _one(self, depth: int) -> Filter:
        if depth > MAX_DEPTH:
            raise self.wrong(f"at most {MAX_DEPTH} parentheses and 'not' within each other")
        if self._take("not"):
            return Not(self._one(depth + 1))
        if self._take("("):
            inner = self.either(depth + 1)
            self._expect(")")
            return inner
        return self._comparison()

    def _comparison(self) -> Filter:
        name = self.token
        if self.kind != "word" or name in _KEYWORDS or name not in FIELDS:
            raise self.wrong(f"a field ({', '.join(FIELDS)})")
        self._comparisons += 1
        if self._comparisons > MAX_COMPARISONS:
            raise self.wrong(f"at most {MAX_COMPARISONS} comparisons", name)
        self._next()
        if name != AGENT and self._take("is"):
            opposite = self._take("not")
            self._expect("null", name)
            null = Comparison(name, "is null", ())
            return Not(null) if opposite else null
        if (opposite := self._take("not")) or self.token.lower() == "in":
            self._expect("in", name)
            listed = Comparison(name, "in", self._values(name))
            return Not(listed) if opposite else listed
        sign, kind = self.token, FIELDS[name].kind
        known = ["=", "!="] if name == AGENT or kind is bool else [*COMPARISONS, *(["~"] if kind is str else [])]
        if self.kind != "sign" or sign not in known:
            raise self.wrong(f"one of {' '.join(known)}, in{', is' if name != AGENT else ''}", name)
        self._next()
        return Comparison(name, sign, (self._value(name, sign),))

    def _values(self, name: str) -> tuple[Value, ...]:
        self._expect("(", name)
        values = [self._value(name, "in")]
        while self._take(","):
            values.append(self._value(name, "in"))
        self._expect(")", name)
        return tuple(values)

    def _value(self, name: str, sign: str) -> Value:
        kind, allowed = FIELDS[name]
        self._count += 1
        if self._count > MAX_VALUES:
            raise self.wrong(f"at most {MAX_VALUES} values", name)
        if kind is bool:
            if self.token.lower() not in ("true", "false"):
                raise self.wrong("true or false", name)
            return self._next().lower() == "true"
        if kind is str:
            if self.kind != "text":
                raise self.wrong("text in single quotes", name)
            value = self.token[1:-1].replace("''", "'")
            if sign in ("=", "!=", "in") and allowed and value not in allowed:
                raise self.wrong(f"one of {', '.join(allowed)}", name)
            if "\0" in value or (sign == "~" and not value):
                raise self.wrong("text of at least one character, and no NUL", name)
            self._next()
            return value
        if self.kind != "number":
            raise self.wrong("a number", name)
        number = float(self.token)
        if not abs(number) < (math.inf if kind is float else 2**63):
            raise self.wrong("a number of at most 64 bits", name)
        # Of the field's own type wherever that is exact: so databases and Python compare alike, however large it is.
        exact = int(self.token) if self.token.lstrip("-").isdigit() else int(number) if number.is_integer() else None
        self._next()
        return number if kind is float or exact is None else exact

    def _take(self, token: str) -> bool:
        if self.kind in ("word", "sign") and self.token.lower() == token:
            self._next()
            return True
        return False

    def _expect(self, token: str, field: str = "") -> None:
        if not self._take(token):
            raise self.wrong(f"'{token}'", field)

    def _next(self) -> str:
        """Moves the cursor on; returns the token that was there."""
        before = self.token
        found = _TOKEN.match(self._text, self._end)
        assert found is not None  # `other` takes what nothing else does
        assert found.lastgroup is not None
        self.kind, self.token = found.lastgroup, found[found.lastgroup]
        self._start, self._end = found.start(found.lastgroup), found.end()
        return before
