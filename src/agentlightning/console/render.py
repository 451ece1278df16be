"""Pages as HTML: Jinja templates in which every value is escaped text. Knows no store.

Values are escaped, and what a terminal or a reader's eye would obey in them is written out; templates link to pages of the
console alone, through `url`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agentlightning.analysis.intervals import Interval
from agentlightning.analysis.rollout_view import content_text
from agentlightning.errors import InputError, printable
from agentlightning.records import Run
from agentlightning.trainer.progress import duration

Query = Mapping[str, Sequence[str]]
"""The query of an address: values by name."""
S = TypeVar("S", bound=str)
MAX_CELL_CHARS = 400
STATIC = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
"""Files that all pages share, with their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page before it is drawn."""

    template: str
    title: str
    values: Mapping[str, Any] = field(default_factory=dict)
    run: Run | None = None
    """The run that it is about: the sidebar leads to its other pages."""


class Templates:
    """The templates of the console, compiled once."""

    def __init__(self, playground: bool = False) -> None:
        """playground: pages lead to it."""
        self._environment = Environment(
            loader=PackageLoader("agentlightning.console"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=text,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        filters = (clipped, signed, number, interval, setting, json_text, when, content_text, duration, mark)
        self._environment.filters |= {one.__name__: one for one in filters}
        self.static = {name: files("agentlightning.console").joinpath("static", name).read_bytes() for name in STATIC}
        version = hashlib.blake2b(b"".join(self.static.values()), digest_size=6).hexdigest()
        self._environment.globals |= {"url": url, "version": version, "playground": playground}

    def draw(self, template: str, **values: Any) -> str:
        """The template with these values."""
        return self._environment.get_template(template).render(values)


def text(value: Any) -> Any:
    """A value as templates show it: markup of templates as it is, nothing of None, all else without control characters.

    >>> text("a" + chr(0x202e)), text(None), text(Markup("<b>"))
    ('a\\\\u202e', '', Markup('<b>'))
    """
    if value is None:
        return ""
    # The browser's parser takes lone surrogates out; encoding them would be an error on the way there.
    return value if isinstance(value, Markup) else printable(str(value)).encode("utf-8", "replace").decode()


def url(path: str, /, fragment: str = "", **query: object) -> str:
    """The address of a page of the console; empty values are left out.

    >>> url("/replay", "tokens", rollout="a b", call=None)
    '/replay?rollout=a+b#tokens'
    """
    given = [(name, str(value)) for name, value in query.items() if value not in (None, "")]
    asked = "?" + urlencode(given, errors="replace") if given else ""
    return path + asked + ("#" + quote(fragment) if fragment else "")


def first(query: Query, name: str, default: str = "") -> str:
    """The first value of a name."""
    values = query.get(name)
    return values[0] if values else default


def whole(query: Query, name: str, default: int | None = None) -> int | None:
    """A whole number of the query. InputError where it is none."""
    given = first(query, name)
    if not given:
        return default
    if not (given.isascii() and given.isdigit()) or len(given) > 18:
        raise InputError(f"{name}: expected a whole number, got {given[:80]!r}")
    return int(given)


def choice(query: Query, name: str, allowed: Sequence[S]) -> S:
    """One of several values, the first by default. InputError for any other."""
    value = first(query, name, allowed[0])
    for one in allowed:
        if one == value:
            return one
    raise InputError(f"{name}: expected one of {', '.join(allowed)}, got {value[:80]!r}")


def mark(part: str) -> str:
    """The entity tag of a part of a page."""
    return f'"{hashlib.blake2b(part.encode(), digest_size=16).hexdigest()}"'


def number(value: float | None, digits: int = 3, none: str = "–") -> str:
    """A number of a table or a headline, without the zero before its point.

    >>> number(0.12345), number(-0.5, 2), number(12.0), number(0.0), number(None)
    ('.123', '−.50', '12.000', '0', '–')
    """
    if not value:
        return none if value is None else "0"
    shown = f"{abs(value):.{digits}f}"
    sign = "−" if value < 0 and float(shown) else ""
    return sign + (shown[1:] if shown.startswith("0.") else shown)


def signed(value: float | None, digits: int = 2) -> str:
    """A difference: +.31, −.05."""
    return number(value, digits) if value is None or value < 0 else f"+{number(value, digits)}"


def interval(one: Interval | None, digits: int = 2, none: str = "–") -> str:
    """A difference with its 95 % interval.

    >>> interval(Interval(0.31, 0.24, 0.38, 100))
    '+.31 [.24, .38]'
    """
    if one is None:
        return none
    return f"{signed(one.value, digits)} [{number(one.low, digits)}, {number(one.high, digits)}]"


def setting(value: object) -> str:
    """The value of a setting; a dash where a run does not have it."""
    return "–" if value is None else value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def json_text(value: object) -> str:
    """A value as JSON over several lines."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str).decode()


def when(nanoseconds: int) -> str:
    """A time as people read it, UTC."""
    return f"{datetime.fromtimestamp(nanoseconds / 1e9, UTC):%Y-%m-%d %H:%M}"


def clipped(value: str, most: int = MAX_CELL_CHARS) -> str:
    """The beginning of a text that may be long."""
    return value if len(value) <= most else value[: most - 1] + "…"
