"""Text is text, whatever it looks like: no template lets what was stored become markup, or loads anything from elsewhere."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from console_scene import ATTACK, TEMPLATES, Parsed
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.console.render import STATIC, text, url
from agentlightning.errors import printable

TEXTS = st.text(st.characters(codec="utf-8")) | st.sampled_from([ATTACK, "</p><p title='", "&lt;script&gt;", "a\r\nb"])
SOURCES = {one.name: one.read_text() for one in files("agentlightning.console").joinpath("templates").iterdir()}


@given(TEXTS)
def test_any_text_comes_back_from_a_parser_as_the_text_it_was(value: str) -> None:
    parsed = Parsed(TEMPLATES.draw("error.html", why=value))
    assert parsed.names == ["p"]
    assert parsed.text == printable(value)


@given(TEXTS)
def test_an_address_made_of_any_text_leads_to_a_page_of_the_console(value: str) -> None:
    assert url("/run", value, run=value).startswith("/run")


def test_a_lone_surrogate_and_a_mark_that_turns_text_around_are_written_out() -> None:
    assert text("\ud800\u202e") == "?\\u202e"


@pytest.mark.parametrize("name", SOURCES)
def test_a_template_escapes_everything_and_has_no_script_style_or_address_of_its_own(name: str) -> None:
    source = SOURCES[name]
    assert re.search(r"\|\s*safe|Markup|autoescape", source) is None
    assert re.search(r"<[^>]*\s(?:on\w+|style|srcdoc)=", source) is None
    assert re.search(r"<(?:script(?! src=\"/static/console\.js)|style|iframe|object|embed|base|img)\b", source) is None
    addresses = re.findall(r'\s(?:href|src|action)="([^"]*)', source)
    assert [one for one in addresses if not re.match(r"/(?!/)|#main$|\{\{ (?:url\(|to \}\}|section)", one)] == []
    assert re.search(r"=\{\{(?! version)", source) is None  # every value is quoted


def test_what_all_pages_share_loads_nothing_from_elsewhere() -> None:
    for name in STATIC:
        found = re.findall(rb"(?:https?:)?//[\w.]+|url\(|@import|eval\(|document\.write", TEMPLATES.static[name])
        assert [one for one in found if one != b"http://www.w3.org"] == [], name
