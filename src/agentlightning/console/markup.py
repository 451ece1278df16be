"""HTML that is safe by construction: every text is escaped unless this module built it; and the parts that pages share.

A page is made of `element`s, whose children are texts or other elements; nothing else makes `Html`, so what an agent, a task
or a model said is shown as text. Links lead to pages of the console alone, and no attribute runs a script. Knows no page.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Final, TypeVar
from urllib.parse import quote, urlencode

import orjson

from agentlightning.analysis.intervals import Interval
from agentlightning.errors import InputError, printable

VOID: Final = frozenset({"input", "br", "hr", "meta", "link"})
NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*")
FORBIDDEN: Final = frozenset({"script", "iframe", "object", "embed", "base", "img", "foreignObject"})
"""Elements that load or run something: no page needs one."""
MAX_CELL_CHARS = 400
PLACES = {
    "/": "Runs",
    "/rollouts": "Rollouts",
    "/compare": "Compare",
    "/rewards": "Rewards",
    "/bottlenecks": "Bottlenecks",
    "/suggestions": "Suggestions",
    "/alerts": "Alerts",
    "/prompts": "Prompts",
    "/models": "Models",
}
"""Pages of the navigation; the others are reached from these."""

Query = Mapping[str, Sequence[str]]
"""The query of an address: values by name."""
Child = str | int | float | None
"""`Html`, or a text that is escaped; None is left out."""
Attribute = str | int | float | bool | None
S = TypeVar("S", bound=str)


class Html(str):
    """Markup that `element` and `join` made. Text is no `Html`, and cannot become one without being escaped."""

    __slots__ = ()


def element(tag: str, /, *children: Child, **attributes: Attribute) -> Html:
    """Returns an element. Attributes: `class_` is class, `_` in names is `-`; None and False are left out.

    >>> element("p", "a < b", element("b", "<i>"), class_="x")
    '<p class="x">a &lt; b<b>&lt;i&gt;</b></p>'
    >>> element("a", "run", href="javascript:alert(1)")
    Traceback (most recent call last):
    ValueError: href: expected a page of the console, got 'javascript:alert(1)'
    """
    if NAME.fullmatch(tag) is None or tag in FORBIDDEN:
        raise ValueError(f"element: expected a name of one that runs nothing, got {tag!r}")
    opening = tag + "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    return Html(f"<{opening}>" if tag in VOID else f"<{opening}>{join(children)}</{tag}>")


def join(children: Iterable[Child], between: Child = None) -> Html:
    """Returns the children one after the other, texts escaped, with `between` between them."""
    separator = "" if between is None else escaped(between)
    return Html(separator.join(escaped(child) for child in children if child is not None))


def escaped(child: str | int | float) -> Html:
    """Returns `Html` as it is, and a text with all that a browser or a reader's eye would obey in it escaped.

    >>> escaped('<img src=x onerror="x">' + chr(0x202e))
    '&lt;img src=x onerror=&quot;x&quot;&gt;\\\\u202e'
    """
    if isinstance(child, Html):
        return child
    # The browser's parser takes lone surrogates out; encoding them would be an error on the way there.
    return Html(html.escape(printable(str(child)).encode("utf-8", "replace").decode(), quote=True))


def url(path: str, query: Mapping[str, Child] | None = None, fragment: str = "") -> str:
    """Returns the address of a page of the console; empty values are left out.

    >>> url("/replay", {"rollout": "a b", "call": None}, "tokens")
    '/replay?rollout=a+b#tokens'
    """
    given = [(name, str(value)) for name, value in (query or {}).items() if value not in (None, "")]
    asked = "?" + urlencode(given, errors="replace") if given else ""
    return path + asked + ("#" + quote(fragment) if fragment else "")


def _attribute(name: str, value: Attribute) -> str:
    if NAME.fullmatch(name) is None or name.lower().startswith("on") or name.lower() in ("style", "srcdoc"):
        raise ValueError(f"attribute: expected a name that runs and loads nothing, got {name!r}")
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    if name in ("href", "action", "src") and not re.match(r"/(?!/)|[?#]", str(value)):
        raise ValueError(f"{name}: expected a page of the console, got {value!r}")
    return f' {name}="{escaped(str(value))}"'


def style_sheet() -> str:
    """The style sheet of all pages."""
    return files("agentlightning.console").joinpath("style.css").read_text(encoding="utf-8")


def first(query: Query, name: str, default: str = "") -> str:
    """The first value of a name."""
    values = query.get(name)
    return values[0] if values else default


def number(query: Query, name: str, default: int | None = None) -> int | None:
    """A whole number of the query. InputError where it is none."""
    text = first(query, name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise InputError(f"{name}: expected a whole number, got {text[:80]!r}")
    return int(text)


def choice(query: Query, name: str, allowed: Sequence[S]) -> S:
    """One of several values, the first by default. InputError for any other."""
    value = first(query, name, allowed[0])
    for one in allowed:
        if one == value:
            return one
    raise InputError(f"{name}: expected one of {', '.join(allowed)}, got {value[:80]!r}")


def page(title: str, *parts: Child) -> Html:
    """A page under its heading."""
    return join([element("h1", title), *parts])


def note(text: str | None) -> Html | None:
    """A remark, such as that there is nothing to show; None without one."""
    return element("p", text, class_="none") if text else None


def wrong(text: str) -> Html:
    """A sentence about something that failed."""
    return element("p", text, class_="wrong", role="alert")


def table(head: Sequence[Child], rows: Iterable[Sequence[Child]], caption: str, none: str = "") -> Html | None:
    """A table; its caption is read out, and not drawn. Without rows, the remark `none`, if there is one."""
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    if not body and none:
        return note(none)
    names = element("tr", *(element("th", name, scope="col") for name in head))
    whole = element("table", element("caption", caption), element("thead", names), element("tbody", *body))
    return element("div", whole, class_="table", tabindex=0, role="region", aria_label=caption)


def figures(named: Mapping[str, Child]) -> Html:
    """A few numbers, each with its name; those that are None are left out."""
    known = [(name, value) for name, value in named.items() if value is not None]
    items = [element("div", element("dt", name), element("dd", value)) for name, value in known]
    return element("dl", *items, class_="figures")


def form(action: str, *fields: Child, button: str = "Show", hidden: Mapping[str, str] | None = None) -> Html:
    """A form whose fields become the query of a page; hidden: values that nobody edits."""
    kept = [element("input", type="hidden", name=name, value=value) for name, value in (hidden or {}).items() if value]
    return element("form", *kept, *fields, element("button", button), action=action, method="get", class_="bar")


def field(label: str, name: str, value: Child, **attributes: Attribute) -> Html:
    """A labelled field of a form."""
    return element("label", f"{label} ", element("input", name=name, value=value, **attributes))


def select(name: str, label: str, options: Mapping[str, str], chosen: str) -> Html:
    """A labelled choice of a form: options by value."""
    parts = [element("option", text, value=value, selected=value == chosen) for value, text in options.items()]
    return element("label", label, " ", element("select", *parts, name=name))


def link(text: Child, path: str, /, **query: Child) -> Html:
    """A link to a page with this query."""
    return element("a", text, href=url(path, query))


def run_link(run_id: str, text: str | None = None) -> Html:
    """A link to a run."""
    return link(text or run_id, "/run", run=run_id)


def replay_link(rollout_id: str, text: str | None = None, call: int | None = None) -> Html:
    """A link to a rollout, or to one of its calls."""
    return link(text or rollout_id, "/replay", rollout=rollout_id, call=call)


def shown(value: float | None, digits: int = 3) -> str:
    """A number of a table; empty where there is none.

    >>> shown(0.12345), shown(None)
    ('0.123', '')
    """
    return "" if value is None else f"{value:.{digits}f}"


def interval(one: Interval, form: str) -> str:
    """An estimate with its 95 % interval."""
    return f"{one.value:{form}} [{one.low:{form}}, {one.high:{form}}]"


def setting(value: object) -> str:
    """The value of a setting; a dash where a run does not have it."""
    return "-" if value is None else value if isinstance(value, str) else orjson.dumps(value, default=str).decode()


def json_text(value: object) -> str:
    """A value as JSON over several lines."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=str).decode()


def when(nanoseconds: int) -> str:
    """A time as people read it, UTC."""
    return f"{datetime.fromtimestamp(nanoseconds / 1e9, UTC):%Y-%m-%d %H:%M:%S}"


def clipped(text: str, most: int = MAX_CELL_CHARS) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= most else text[: most - 1] + "…"
