"""Templates: what parses, what is refused and with which sentence, what is rendered, and what a hostile one can do."""

from __future__ import annotations

import pytest

from agentlightning.errors import InputError
from agentlightning.prompts.templates import Template, check_candidate, diff


def test_an_fstring_is_filled_with_its_fields_and_braces_written_twice_are_braces() -> None:
    template = Template.of("{{json}} {question} in {place}: {question}")
    assert template.placeholders == ("place", "question")
    assert template.render(question="who?", place=["a", "ü"], other=1) == '{json} who? in ["a", "ü"]: who?'


def test_messages_are_filled_one_by_one() -> None:
    template = Template.of([{"role": "system", "content": "Be {tone}."}, {"role": "user", "content": "{question}"}])
    assert (template.format, template.placeholders) == ("messages", ("question", "tone"))
    rendered = template.render(tone="kind", question="{tone}")
    assert rendered == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "{tone}"}]


def test_jinja_has_conditions_loops_members_and_filters() -> None:
    text = (
        "{% for row in rows if row.name %}{{ loop.index }} {{ row.name|upper }}{{ ', ' if not loop.last }}{% endfor %}"
    )
    template = Template.of(f"{{% if title %}}{{{{ title }}}}: {{% endif %}}{text} {{{{ rows|length }}}}", "jinja")
    assert template.placeholders == ("rows", "title")
    rows = [{"name": "é"}, {"name": ""}, {"name": "b"}]
    assert template.render(title="T", rows=rows) == "T: 1 É, 2 B 3"


def test_a_name_is_a_field_outside_the_loop_that_binds_it() -> None:
    template = Template.of("{% for x in xs %}{{ x }}{% else %}{{ y }}{% endfor %}{{ x }}", "jinja")
    assert template.placeholders == ("x", "xs", "y")


def test_the_value_of_a_template_is_parsed_to_the_same_template() -> None:
    for template in (Template.of("a {b}", source="me"), Template.of([{"role": "user", "content": "{q}"}])):
        assert Template.parse(template.value()) == template


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"format": "mako", "template": ""}, "format: expected one of fstring, jinja, messages, got 'mako'"),
        ({"template": None}, "template: expected a text, got NoneType"),
        ({"template": "{a"}, "template: expected '}' before end of string; a literal brace is written twice"),
        ({"template": "{a.b}"}, r"template: expected a name between braces, got {a.b}"),
        ({"template": "{a:9999999999}"}, r"template: expected a name between braces, got {a:9999999999}"),
        ({"template": "{a} {c}", "placeholders": ["b", "a"]}, "template: unknown placeholder 'c'; expected only a, b"),
        ({"template": "x" * 300_000}, "template: expected at most 262144 characters, got 300000"),
        ({"format": "messages", "template": "hi"}, "template: expected messages"),
        ({"format": "messages", "template": [{"role": "me", "content": ""}]}, "template.0: expected a role"),
        ({"format": "jinja", "template": "a\n{{ b"}, "template: line 2: unexpected end of template"),
    ],
)
def test_what_does_not_parse_is_refused_in_one_sentence_with_its_field(value: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        Template.parse(value)
    assert str(refused.value).startswith(sentence.replace("\\", ""))
    assert "\n" not in str(refused.value)


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(InputError, match="placeholder 'b': expected a field of this name, got a, c"):
        Template.of("{a}{b}").render(a=1, c=2)


class Secretive:
    secret = "s3cret"

    def __str__(self) -> str:
        return "shown"


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ x['__class__'] }}",
        "{{ x|attr('__class__') }}",
        "{{ x.secret }}",
        "{{ x() }}",
        "{% include 'x' %}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 9 ** 'a' }}",
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    ],
)
def test_a_hostile_template_reads_nothing_of_objects(text: str) -> None:
    with pytest.raises(InputError, match=r"^template: "):
        Template.of(text, "jinja").render(x=Secretive())


@pytest.mark.parametrize(("text", "format"), [("{x}" * 300, "fstring"), ("{{ x }}" * 300, "jinja")])
def test_what_a_template_becomes_is_bounded(text: str, format: str) -> None:
    template = Template.parse({"format": format, "template": text})
    with pytest.raises(InputError, match="at most 1048576 characters once rendered"):
        template.render(x='"' * 5000)


def test_a_text_that_no_message_can_carry_is_refused() -> None:
    with pytest.raises(InputError, match="half of one"):
        Template.of("{{ '\\ud800' }}", "jinja").render()


def test_a_field_too_deep_to_be_shown_is_told() -> None:
    deep: list[object] = []
    for _ in range(50_000):
        deep = [deep]
    with pytest.raises(InputError, match="less deep"):
        Template.of("{x}").render(x=deep)


def test_a_candidate_keeps_the_placeholders_of_what_it_replaces() -> None:
    old = Template.of("{question} {schema}")
    check_candidate(old, Template.of("{{ schema }} then {{ question }}", "jinja"))
    with pytest.raises(InputError, match="unknown placeholder 'hint'; expected only question, schema"):
        check_candidate(old, Template.of("{question} {schema} {hint}"))
    with pytest.raises(InputError, match="the placeholder 'schema' is lost; expected only question, schema"):
        check_candidate(old, Template.of("{question}"))
    with pytest.raises(InputError, match="format: expected fstring as before, got messages"):
        check_candidate(old, Template.of([{"role": "user", "content": "{question} {schema}"}]))


def test_the_difference_of_two_versions_is_by_lines() -> None:
    old, new = Template.of("one\ntwo\nthree"), Template.of("one\n2\nthree")
    assert diff(old, new, ("system@1", "system@2")).splitlines()[:2] == ["--- system@1", "+++ system@2"]
    assert diff(old, new).splitlines()[3:] == [" one", "-two", "+2", " three"]
    assert diff(old, old) == ""


def test_of_long_texts_the_beginnings_are_compared_and_the_difference_says_so() -> None:
    old, new = (Template.parse({"format": "fstring", "template": "same\n" * 1500 + end}) for end in ("one", "two"))
    assert diff(old, new).splitlines()[2:] == ["… of each the first 20000 characters and 1000 lines were compared"]
