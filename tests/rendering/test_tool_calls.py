"""Tool calls and their results, however agents spell them: what the template reads, and what still counts as the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from conversations import TOOLS, Talk
from hypothesis import given, settings
from hypothesis import strategies as st
from real_templates import TEMPLATES, WITHOUT_TOOLS
from toy_templates import HERMES, SHOWS_TOOLS

from agentlightning.rendering.conversation import Conversation
from agentlightning.rendering.graph import MAX_NESTING, RequestView, canonical, digest, in_call_order, normal
from agentlightning.rendering.renderer import Renderer, RenderError

Message = dict[str, Any]

REAL = sorted(file.stem for file in TEMPLATES.glob("*.jinja"))
WITH_TOOLS = [name for name in REAL if name not in WITHOUT_TOOLS or name == "deepseekv3"]
ONE_BY_ONE = ("llama3_1", "llama3_2", "gptoss")
"""Templates that take one tool call a message."""
MAPPING = ("glm4moe", "nemotron_3_nano", "qwen3_5_think")
"""Templates that write the members of arguments, and so fail on a text."""

NAMED = "{% for m in messages %}{{ m.name ~ ':' ~ m.content + '<|im_end|>' }}{% endfor %}"
NULL = (
    SHOWS_TOOLS
    + """\
{%- for m in messages %}
    {%- if m.content is none %}{% for c in m.tool_calls %}{{- c.function.name ~ c.function.arguments }}{% endfor %}
    {%- else %}{{- m.role + ':' + m.content }}{% endif %}{{- '<|im_end|>' }}
{%- endfor %}"""
)
"""In the manner of DeepSeek's first one: calls are written only where content is none, and Python's mapping is shown."""


def real(name: str) -> str:
    if name not in REAL:
        pytest.skip("AGL_DATA has no chat templates")
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def call(arguments: Any, call_id: str = "aaaaaaaa1", name: str = "f") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Message, **fields: Any) -> Message:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def result(call_id: str, content: str = "done") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def asked(*messages: Message) -> list[Message]:
    return [{"role": "user", "content": "q"}, *messages]


def written(renderer: Renderer, messages: list[Message], tools: list[Message] | None = TOOLS) -> str:
    return renderer.render(RequestView.of(messages, tools).normal, tools, generate=True)


@pytest.fixture(scope="module")
def hermes(make_renderer: Callable[..., Renderer]) -> Renderer:
    return make_renderer(HERMES)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if name not in ONE_BY_ONE])
def test_results_of_parallel_calls_reach_the_template_in_the_order_of_the_calls(
    name: str, make_renderer: Callable[..., Renderer]
) -> None:
    renderer = make_renderer(real(name))
    turn = asked(calling(call('{"n": 1}', "first0001"), call('{"n": 2}', "second002")))
    one, other = result("first0001", "the result of one"), result("second002", "the result of two")
    assert written(renderer, [*turn, other, one]) == written(renderer, [*turn, one, other])


@pytest.mark.parametrize(
    ("calls", "came", "read"),
    [
        ("ab", "ba", "ba|ab"),
        ("abc", "cab", "cab|abc"),
        ("ab", "b", "b|b"),
        ("ab", "xba", "xba|xab"),
        ("ab", "bxa", "bxa|axb"),
        ("ab", "b-a", "b-a|a-b"),
        ("aa", "aa", "aa|aa"),
        ("ab", "bb", "bb|bb"),
        ("a", "xa", "xa|xa"),
        ("ab", "ba.ba", "ba.ba|ab.ba"),
    ],
)
def test_results_without_a_known_call_stay_where_they_are(calls: str, came: str, read: str) -> None:
    """`-` is a question among them, `.` an answer that ends their turn."""
    others = {"-": {"role": "user", "content": "-"}, ".": {"role": "assistant", "content": "."}}
    turn = asked(calling(*(call("{}", one) for one in calls)))
    messages = [*turn, *(others.get(one) or result(one) for one in came)]
    before, after = read.split("|")
    found = "".join(message.get("tool_call_id") or message["content"] for message in in_call_order(messages)[2:])
    assert (came, found) == (before, after)


def test_results_that_come_in_another_order_continue_and_are_recorded_as_the_model_read_them(hermes: Renderer) -> None:
    talk = Talk(hermes, TOOLS, asked())
    one = '<tool_call>\n{"name": "f", "arguments": {"n": %d}}\n</tool_call>'
    talk.turn(one % 1 + one % 2)
    first, second = (made["id"] for made in talk.messages[-1]["tool_calls"])
    talk.messages += [result(second, "two"), result(first, "one")]
    plan = talk.turn("so")
    assert (plan.fork_cause, plan.parent and plan.parent.call_id) == (None, "0")
    assert [message["content"] for message in plan.messages] == ["one", "two"]
    text = hermes.decode(plan.suffix_ids, special=True)
    assert text.index("one") < text.index("two")
    talk.messages = [*talk.messages, {"role": "user", "content": "and?"}]
    reloaded = Conversation(hermes, talk.calls).plan(RequestView.of(talk.messages, TOOLS))
    assert (reloaded.fork_cause, reloaded.parent and reloaded.parent.call_id) == (None, "1")


# --- equal as JSON ----------------------------------------------------------------------------------------------------


def reordered(value: Any, rng: random.Random) -> Any:
    """The same JSON as another client spells it: keys in another order, whole numbers as floats."""
    if isinstance(value, dict):
        return {key: reordered(value[key], rng) for key in rng.sample(list(value), len(value))}
    if isinstance(value, list):
        return [reordered(one, rng) for one in value]
    return float(value) if type(value) is int else value


MANY_KEYS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "version 1.0",
            "parameters": {
                "type": "object",
                "required": ["n"],
                "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9, "title": name} for name in "nmkl"},
            },
        },
    }
]


@pytest.mark.parametrize("seed", range(2))
def test_tools_that_are_equal_as_json_never_fork(hermes: Renderer, seed: int) -> None:
    rng, talk = random.Random(seed), Talk(hermes, MANY_KEYS, asked())
    for number in range(3):
        talk.tools = reordered(MANY_KEYS, rng)
        plan = talk.turn(f"answer {number}")
        assert plan.fork_cause is None
        assert (plan.parent is None) == (number == 0)
        talk.messages = [*talk.messages, {"role": "user", "content": "and?"}]
        view = RequestView.of(talk.messages, reordered(MANY_KEYS, rng))
        plan = Conversation(hermes, talk.calls).plan(view)
        assert (plan.fork_cause, plan.parent and plan.parent.call_id) == (None, str(number))
        assert plan.prompt_ids[: len(talk.whole[str(number)])] == talk.whole[str(number)]


def test_a_second_conversation_with_the_same_tools_has_them_as_the_first_had(hermes: Renderer) -> None:
    talk = Talk(hermes, MANY_KEYS, asked())
    talk.turn("yes")
    plan = talk.conversation.plan(
        RequestView.of([{"role": "user", "content": "other"}], reordered(MANY_KEYS, random.Random(1)))
    )
    assert (plan.parent, plan.tools) == (None, MANY_KEYS)


def test_other_tools_fork_and_are_named(hermes: Renderer) -> None:
    talk = Talk(hermes, MANY_KEYS, asked())
    talk.turn("a long answer so that it is known again")
    talk.messages = [*talk.messages, {"role": "user", "content": "and?"}]
    other = json.loads(json.dumps(MANY_KEYS).replace('"maximum": 9', '"maximum": 8', 1))
    assert talk.conversation.plan(RequestView.of(talk.messages, other)).fork_cause == "system_or_tools_changed"


@pytest.mark.parametrize("again", ['{"b": 2, "a": 1.0}', '{"a":1,"b":2}', '{"a": 1e0, "b": 2}'])
def test_examples_with_arguments_that_are_equal_as_json_continue(hermes: Renderer, again: str) -> None:
    talk = Talk(hermes, TOOLS, asked(calling(call('{"a": 1, "b": 2}')), result("aaaaaaaa1")))
    talk.turn("yes")
    talk.messages[1] = calling(call(again))
    talk.messages = [*talk.messages, {"role": "user", "content": "and?"}]
    plan = talk.turn("no")
    assert (plan.fork_cause, plan.parent and plan.parent.call_id) == (None, "0")


def test_a_name_that_the_template_writes_is_an_edit_and_not_the_templates_rewriting(
    make_renderer: Callable[..., Renderer],
) -> None:
    talk = Talk(make_renderer(NAMED), None, [{"role": "user", "content": "q", "name": "ada"}])
    talk.turn("yes")
    talk.messages = [{**talk.messages[0], "name": "bob"}, *talk.messages[1:], {"role": "user", "content": "and?"}]
    assert talk.conversation.plan(RequestView.of(talk.messages, None)).fork_cause == "history_edited"


numbers = st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(numbers, st.text(max_size=5), st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(one=values, other=values, seed=st.integers(0, 99))
def test_the_canonical_text_is_equal_exactly_where_the_json_is(one: Any, other: Any, seed: int) -> None:
    again = json.loads(json.dumps(reordered_keys(one, random.Random(seed))))
    assert canonical(again) == canonical(one)
    assert (canonical(one) == canonical(other)) == (typed(one) == typed(other))


def reordered_keys(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        return {key: reordered_keys(value[key], rng) for key in rng.sample(list(value), len(value))}
    return [reordered_keys(one, rng) for one in value] if isinstance(value, list) else value


def typed(value: Any) -> Any:
    """For Python True is 1; for JSON it is not."""
    if isinstance(value, dict):
        return {key: typed(one) for key, one in value.items()}
    return [typed(one) for one in value] if isinstance(value, list) else (isinstance(value, bool), value)


# --- arguments --------------------------------------------------------------------------------------------------------

ARGUMENTS = '{"z": "é\\n",  "a": 1.50, "n": 12345678901234567890123}'


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("deepseekv3", f"```json\n{ARGUMENTS}\n```"),
        ("qwen2_5", '"arguments": {"z": "é\\n", "a": 1.5, "n": 12345678901234567890123}}'),
        ("qwen3", '"arguments": {"z": "é\\n", "a": 1.5, "n": 12345678901234567890123}}'),
        ("llama3_1", '"parameters": {"z": "é\\n", "a": 1.5, "n": 12345678901234567890123}}'),
        ("glm4moe", "<arg_key>n</arg_key>\n<arg_value>12345678901234567890123</arg_value>"),
        ("qwen3_5_think", "<parameter=n>\n12345678901234567890123\n</parameter>"),
        (NULL, f"f{ARGUMENTS}<|im_end|>"),
    ],
)
def test_arguments_reach_the_template_as_they_were_sent_in_the_form_that_it_wants(
    template: str, shown: str, make_renderer: Callable[..., Renderer]
) -> None:
    source = template if template is NULL else real(template)
    renderer = make_renderer(source if template != "deepseekv3" else SHOWS_TOOLS + source)
    assert shown in written(renderer, asked(calling(call(ARGUMENTS)), result("aaaaaaaa1")))


@pytest.mark.parametrize("blank", ["", " \n"])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_blank_arguments_are_an_empty_object(name: str, blank: str, make_renderer: Callable[..., Renderer]) -> None:
    renderer = make_renderer(real(name))
    expected = written(renderer, asked(calling(call("{}")), result("aaaaaaaa1")))
    assert written(renderer, asked(calling(call(blank)), result("aaaaaaaa1"))) == expected


@pytest.mark.parametrize("broken", ['{"n": 1', "[1]", "null", "7", '"{}"', '{"n": 1e999}', '{"n": NaN}'])
@pytest.mark.parametrize("name", MAPPING)
def test_arguments_that_are_no_object_are_refused_by_their_field(
    name: str, broken: str, make_renderer: Callable[..., Renderer]
) -> None:
    messages = asked(calling(call("{}"), call(broken, "aaaaaaaa2")), result("aaaaaaaa1"), result("aaaaaaaa2"))
    with pytest.raises(RenderError) as refused:
        written(make_renderer(real(name)), messages)
    assert refused.value.param == "messages[1].tool_calls[1].function.arguments"
    assert str(refused.value).startswith(f"{refused.value.param}: expected a JSON object, got ")


def test_another_failure_is_not_blamed_on_arguments(make_renderer: Callable[..., Renderer]) -> None:
    refusing = "{{ raise_exception('no tools here') if messages[1] is defined and messages[1].tool_calls }}"
    renderer = make_renderer(SHOWS_TOOLS + refusing)
    with pytest.raises(RenderError, match="no tools here") as refused:
        written(renderer, asked(calling(call("broken"))))
    assert refused.value.param == "messages"


def test_arguments_that_are_no_object_pass_where_the_template_writes_text(hermes: Renderer) -> None:
    assert '"arguments": "{\\"n\\": 1"' in written(hermes, asked(calling(call('{"n": 1'))))


def nested(levels: int) -> str:
    return '{"a": ' * (levels - 1) + '{"b": "}{"}' + "}" * (levels - 1)


@pytest.mark.parametrize(("levels", "kind"), [(MAX_NESTING, dict), (MAX_NESTING + 1, str), (254, str), (5000, str)])
def test_arguments_beyond_the_bound_of_nesting_stay_text(levels: int, kind: type) -> None:
    arguments = normal(calling(call(nested(levels))))["tool_calls"][0]["function"]["arguments"]
    assert isinstance(arguments, kind)
    assert digest(normal(calling(call(nested(levels))))) != digest(normal(calling(call(nested(levels + 1)))))


EDITS = [
    ('{"n": 12345678901234567890}', '{"n": 12345678901234567891}'),
    ('{"n": 1}', '{"n": true}'),
    ('{"n": 0}', '{"n": false}'),
    ('{"n": 1}', '{"n": "1"}'),
    ('{"n": 1e999}', '{"n": 1e998}'),
    ('{"n": null}', "{}"),
    ('{"n": [1, 2]}', '{"n": [2, 1]}'),
    ("[1]", "[2]"),
    ('{"n": 1', '{"n": 2'),
    (nested(300), nested(299)),
]
SPELLINGS = [
    ('{"n": 12345678901234567890}', '{ "n":12345678901234567890 }'),
    ('{"n": 1e20}', '{"n": 100000000000000000000}'),
    ('{"n": -0.0}', '{"n": 0}'),
    ('{"a": "\\u00e9", "b": "/"}', '{"b": "\\/", "a": "é"}'),
    ('{"a": "\\ud83d"}', '{"a": "\ufffd"}'),
    ("", "{}"),
]


@pytest.mark.parametrize(("one", "other", "same"), [(*pair, False) for pair in EDITS] + [(*p, True) for p in SPELLINGS])
def test_an_edit_of_arguments_is_noticed_and_another_spelling_is_none(one: str, other: str, same: bool) -> None:
    first, second = (digest(normal(calling(call(text)))) for text in (one, other))
    assert (first == second) is same
