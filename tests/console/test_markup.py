"""Text is text, whatever it looks like: nothing that was stored becomes markup."""

from __future__ import annotations

import pytest
from console_scene import ATTACK, Parsed
from hypothesis import given
from hypothesis import strategies as st

from agentlightning.console.markup import element, join, url
from agentlightning.errors import printable

TEXTS = st.text(st.characters(codec="utf-8")) | st.sampled_from([ATTACK, "</p><p title='", "&lt;script&gt;", "a\r\nb"])


@given(TEXTS, TEXTS)
def test_any_text_comes_back_from_a_parser_as_the_text_it_was(text: str, value: str) -> None:
    parsed = Parsed(element("p", text, title=value))
    assert parsed.names == ["p"]
    assert parsed.text == printable(text)
    assert parsed.values("title") == [printable(value)]


@given(TEXTS)
def test_an_address_made_of_any_text_leads_to_a_page_of_the_console(text: str) -> None:
    parsed = Parsed(element("a", "x", href=url("/run", {"run": text}, text)))
    assert parsed.values("href")[0].startswith("/run")


@pytest.mark.parametrize(
    "href", ["javascript:alert(1)", "https://evil.invalid", "//evil.invalid", " /x", "data:text/html,x"]
)
def test_a_link_leads_nowhere_else(href: str) -> None:
    with pytest.raises(ValueError, match="href: expected a page of the console"):
        element("a", "x", href=href)


@pytest.mark.parametrize("name", ["script", "img", "iframe", "object", "b onclick", ""])
def test_no_element_that_runs_or_loads_something_can_be_made(name: str) -> None:
    with pytest.raises(ValueError, match="element: expected"):
        element(name)


@pytest.mark.parametrize("name", ["onclick", "onError", "style", "srcdoc", "x y"])
def test_no_attribute_that_runs_or_loads_something_can_be_made(name: str) -> None:
    with pytest.raises(ValueError, match="attribute: expected"):
        element("p", **{name: "x"})


def test_elements_stay_what_they_are_and_texts_between_them_are_escaped() -> None:
    assert join([element("b", "x"), "<i>", None, 5]) == "<b>x</b>&lt;i&gt;5"
