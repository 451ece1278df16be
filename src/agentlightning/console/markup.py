"""HTML that is safe by construction: every text is escaped unless this module built it.

Driven by all pages. A page is made of `element`s, whose children are texts or other elements; nothing else makes `Html`, so
what an agent, a task or a model said is shown as text, whatever it looks like. Links lead to pages of the console and
nowhere else, and no attribute runs a script. Knows no page.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Final
from urllib.parse import quote, urlencode

from agentlightning.errors import printable

VOID: Final = frozenset({"input", "br", "hr", "meta", "link"})
NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9-]*")
FORBIDDEN: Final = frozenset({"script", "iframe", "object", "embed", "base", "img", "foreignObject"})
"""Elements that load or run something: no page needs one."""


class Html(str):
    """Markup that `element` and `join` made. Text is no `Html`, and cannot become one without being escaped."""

    __slots__ = ()


Child = str | int | float | None
"""`Html`, or a text that is escaped; None is left out."""
Attribute = str | int | float | bool | None


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


def join(children: Iterable[Child]) -> Html:
    """Returns the children one after the other, texts escaped."""
    return Html("".join(escaped(child) for child in children if child is not None))


def escaped(child: str | int | float) -> Html:
    """Returns `Html` as it is, and a text with all that a browser or a reader's eye would obey in it escaped.

    >>> escaped('<img src=x onerror="x">' + chr(0x202e))
    '&lt;img src=x onerror=&quot;x&quot;&gt;\\\\u202e'
    """
    if isinstance(child, Html):
        return child
    # The browser's parser takes lone surrogates out; encoding them would be an error on the way there.
    text = printable(str(child)).encode("utf-8", "replace").decode()
    return Html(html.escape(text, quote=True))


def url(path: str, query: Mapping[str, Child] | None = None, fragment: str = "") -> str:
    """Returns the address of a page of the console; empty values are left out.

    >>> url("/replay", {"rollout": "a b", "call": None}, "tokens")
    '/replay?rollout=a+b#tokens'
    """
    given = [(name, str(value)) for name, value in (query or {}).items() if value not in (None, "")]
    return (
        path + ("?" + urlencode(given, errors="replace") if given else "") + ("#" + quote(fragment) if fragment else "")
    )


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


def whole_page(title: str, content: Html) -> str:
    """A page without Gradio."""
    opening = '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    opening += '<meta name="color-scheme" content="light dark">'
    head = f"{opening}{element('title', title)}<style>{style_sheet()}</style></head>"
    return f"{head}<body>{element('main', content, class_='agl')}</body></html>"
