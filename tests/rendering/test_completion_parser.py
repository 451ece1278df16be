"""Sampled text into content, reasoning and tool calls; whole, and as it comes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from conversations import ParsedCompletion, joined, parsed
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_templates import CHATML, HERMES

from agentlightning.errors import ModelError
from agentlightning.rendering.completion_parser import CompletionParser
from agentlightning.rendering.renderer import Renderer

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
THINKS = "reasoning_content <think> </think> <tool_call>"

RESPONSE_TEMPLATE: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "defaults": {"role": "assistant"},
    "fields": {
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", ()),
        (CALL, "", (("f", '{"a": 1}'),)),
        (f"let me see\n{CALL}", "let me see", (("f", '{"a": 1}'),)),
        (CALL + "\n" + CALL, "", (("f", '{"a": 1}'), ("f", '{"a": 1}'))),
        (f"one {CALL}\n two", "onetwo", (("f", '{"a": 1}'),)),
        ('<tool_call>{"name": "f", "arguments": {}}', "", (("f", "{}"),)),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", ()),
        (
            '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
            '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
            (),
        ),
        (
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            (),
        ),
    ],
)
def test_hermes_tool_calls_are_parsed_and_malformed_ones_stay_text(
    text: str, content: str, calls: tuple[tuple[str, str], ...]
) -> None:
    assert parsed(CompletionParser(HERMES), text) == ParsedCompletion(content, None, calls)
    assert parsed(CompletionParser(HERMES), text, parse_tools=False) == ParsedCompletion(text)


def test_reasoning_is_split_from_the_answer() -> None:
    parser = CompletionParser(THINKS)
    assert parsed(parser, "<think>\nhm\n</think>\n\nyes") == ParsedCompletion("yes", "hm")
    assert parsed(parser, "hm\n</think>\n\nyes", prompt="…assistant\n<think>\n") == ParsedCompletion("yes", "hm")
    assert parsed(parser, "<think>\ncut short") == ParsedCompletion("", "cut short")
    assert parsed(parser, "no thought") == ParsedCompletion("no thought")


def test_the_tokenizers_own_response_template_decides(make_renderer: Callable[..., Renderer]) -> None:
    renderer = make_renderer(CHATML, response_template=RESPONSE_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    well = parsed(renderer.parser, f"well{CALL}", prompt="<|im_start|>assistant\n", tools=tools)
    assert well == ParsedCompletion("well", None, (("f", '{"a":1}'),))
    assert parsed(renderer.parser, "<tool_call>{broken</tool_call>") == ParsedCompletion(
        "<tool_call>{broken</tool_call>"
    )
    assert renderer.parser.tool_end == "</tool_call>"


def test_a_broken_response_template_is_an_error_of_the_model(make_renderer: Callable[..., Renderer]) -> None:
    with pytest.raises(ModelError, match="response_template"):
        make_renderer(CHATML, response_template={"fields": {}})


NAMED = [{"type": "function", "function": {"name": "g", "parameters": {"properties": {"n": {"type": "string"}}}}}]
TAGS = "reasoning_content <think> </think> <tool_call><function="
PAIRS = "<tool_call><arg_key>"
BARE = '{"name": "\' + n + \'", "parameters": '

fragments = st.sampled_from(
    [
        CALL, "<tool_call>", "</tool_call>", "<tool", "<think>", "</think>", "\n", " ", "text", "{", '{"name": "g"}', "é",
        '{"name": "g", "parameters": {"n": "1"}}', '{"arguments": {"b": 2}, "name": "h"}',
        '{"name": "g", "arguments": {"n": "}', 'a</tool_call>b"', "}}", ", ",
        "<function=g>", "<parameter=n>\n1\n</parameter>", "<parameter=m>",
        "</parameter>", "</function>", "g\n", "<arg_key>n</arg_key>",
        "<arg_value>7</arg_value>", "<arg_value>", "<|python_tag|>",
    ]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(fragments, max_size=9),
    cuts=st.lists(st.integers(0, 90), max_size=12),
    template=st.sampled_from([HERMES, CHATML, THINKS, TAGS, PAIRS, BARE]),
    tools=st.booleans(),
    inside=st.booleans(),
)
def test_however_an_answer_is_cut_it_is_the_same(
    parts: list[str], cuts: list[int], template: str, tools: bool, inside: bool
) -> None:
    text = "".join(parts)
    prompt = "<think>\n" if inside else ""
    parser = CompletionParser(template)
    splitter = parser.splitter(prompt, NAMED, tools)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [splitter.feed(text[start:end]) for start, end in pairwise(bounds)]
    assert joined([*pieces, splitter.finish()]) == parsed(parser, text, prompt, NAMED, tools)


@given(text=st.text(alphabet="ab <>{}\n"))
def test_text_without_reasoning_or_calls_is_kept_to_the_letter(text: str) -> None:
    for template in (HERMES, CHATML, TAGS, PAIRS, BARE):
        assert parsed(CompletionParser(template), text, "", NAMED).content == text or template == TAGS


def test_plain_text_is_streamed_at_once_and_what_could_begin_a_call_waits() -> None:
    splitter = CompletionParser(HERMES).splitter("", None, True)
    assert [splitter.feed(part).content for part in ("It ", "is", " <b>", " <tool", "box>", "!")] == [
        "It",
        " is",
        " <b>",
        "",
        " <toolbox>",
        "!",
    ]


def test_arguments_come_as_they_are_sampled() -> None:
    splitter = CompletionParser(HERMES).splitter("", None, True)
    parts = ['<tool_call>\n{"name": "f", "argu', 'ments": {"a', '": "x y', ' z"', "}}\n</tool", "_call>"]
    found = [[(tool.name, tool.arguments) for tool in splitter.feed(part).tools] for part in parts]
    assert found == [[], [("f", ""), (None, '{"a')], [(None, '": "x y')], [(None, ' z"')], [(None, "}")], []]


def test_a_closing_mark_within_a_string_waits_for_the_end_of_the_string_alone() -> None:
    splitter = CompletionParser(HERMES).splitter("", None, True)
    parts = ['<tool_call>{"name": "f", "arguments": {"a": "x</tool_', "call>y", ' z"', ', "b', '": 1', "}}</tool_call>"]
    found = ["".join(tool.arguments for tool in splitter.feed(part).tools) for part in parts]
    assert found == ['{"a": "x', "", "", '</tool_call>y z", "b', '": 1', "}"]


@pytest.mark.parametrize(
    ("template", "text", "calls"),
    [
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a":1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1, {"b": "}"}]}', [("f", '{"a": [1, {"b": "}"}]}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> ok', [("f", '{"a": 1')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "cut', [("f", '{"a": "cut')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>y", "b": 1}}</tool_call>',
         [("f", '{"a": "x</tool_call>y", "b": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>\n<tool_call>{"name": "f", "arguments": {}}',
         [("f", '{"a": "x'), ("f", "{}")]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>" y', [("f", '{"a": "x')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call> y', [("f", '{"a": "x')]),
        (TAGS, "<tool_call>\n<function=g>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
         [("g", '{"n": "1"}')]),
        (TAGS, "<tool_call><function=h><parameter=n>1</parameter><parameter=m>x</parameter></function></tool_call>",
         [("h", '{"n": 1, "m": "x"}')]),
        (TAGS, "<tool_call><function=h></function></tool_call>", [("h", "{}")]),
        (TAGS, "<tool_call><function=h><parameter=m>half", [("h", '{"m": "half"')]),
        (PAIRS, "<tool_call>g\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [("g", '{"n": "1"}')]),
        (PAIRS, "<tool_call>g</tool_call>", [("g", "{}")]),
        (BARE, '{"name": "g", "parameters": {"n": "1"}}', [("g", '{"n": "1"}')]),
        (BARE, '<|python_tag|>{"name": "g", "parameters": {}}', [("g", "{}")]),
        (BARE, '{"name": "Ada", "parameters": {}} is an object', []),
    ],
)  # fmt: skip
def test_every_syntax_is_read(template: str, text: str, calls: list[tuple[str, str]]) -> None:
    found = parsed(CompletionParser(template), text, "", NAMED)
    assert found.tool_calls == tuple(calls)
    assert calls or found.content == text
