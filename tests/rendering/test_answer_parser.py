"""Sampled text into content, reasoning and tool calls; whole, and as it comes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_templates import CHATML, HERMES

from agentlightning.errors import ModelError
from agentlightning.rendering.renderer import Renderer
from agentlightning.rendering.tools import AnswerParser, Parsed

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
THINKS = "reasoning_content <think> </think> <tool_call>"

RESPONSE_TEMPLATE = {
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

pieces = st.sampled_from(
    [CALL, "<tool_call>", "</tool_call>", "<tool", "<think>", "</think>", "\n", " ", "text", "{", '{"name": "g"}', "é"]
)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", ()),
        (CALL, "", (("f", '{"a":1}'),)),
        (f"let me see\n{CALL}", "let me see", (("f", '{"a":1}'),)),
        (CALL + "\n" + CALL, "", (("f", '{"a":1}'), ("f", '{"a":1}'))),
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
    assert AnswerParser(HERMES).parse(text) == Parsed(content, None, calls)


def test_a_template_without_tool_calls_leaves_them_as_text() -> None:
    assert AnswerParser(CHATML).parse(CALL) == Parsed(CALL)


def test_tool_calls_stay_text_where_the_agent_did_not_ask_for_them() -> None:
    assert AnswerParser(HERMES).parse(CALL, parse_tools=False) == Parsed(CALL)


def test_reasoning_is_split_from_the_answer() -> None:
    parser = AnswerParser(THINKS)
    assert parser.parse("<think>\nhm\n</think>\n\nyes") == Parsed("yes", "hm")
    assert parser.parse("hm\n</think>\n\nyes", prompt="…assistant\n<think>\n") == Parsed("yes", "hm")
    assert parser.parse("<think>\ncut short") == Parsed("", "cut short")
    assert parser.parse("no thought") == Parsed("no thought")


def test_the_tokenizers_own_response_template_decides(make_renderer: Callable[..., Renderer]) -> None:
    renderer = make_renderer(CHATML, response_template=RESPONSE_TEMPLATE)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    parsed = renderer.parser.parse(f"well{CALL}", prompt="<|im_start|>assistant\n", tools=tools)
    assert parsed == Parsed("well", None, (("f", '{"a":1}'),))
    assert renderer.parser.parse("<tool_call>{broken</tool_call>") == Parsed("<tool_call>{broken</tool_call>")


def test_a_broken_response_template_is_an_error_of_the_model(make_renderer: Callable[..., Renderer]) -> None:
    with pytest.raises(ModelError, match="response_template"):
        make_renderer(CHATML, response_template={"fields": {}})


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(pieces, max_size=8), cuts=st.lists(st.integers(0, 60)), tools=st.booleans(), inside=st.booleans())
def test_what_is_streamed_is_never_taken_back(parts: list[str], cuts: list[int], tools: bool, inside: bool) -> None:
    text = "".join(parts)
    prompt = "<think>\n" if inside else ""
    for template in (HERMES, CHATML, THINKS):
        parser = AnswerParser(template)
        whole = parser.parse(text, prompt, None, tools)
        splitter = parser.splitter(prompt, tools)
        bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
        content = reasoning = ""
        for start, end in pairwise(bounds):
            more_content, more_reasoning = splitter.feed(text[start:end])
            content += more_content
            reasoning += more_reasoning
        assert whole.content.startswith(content)
        assert (whole.reasoning or "").startswith(reasoning)


def test_plain_text_is_streamed_at_once_and_tool_calls_are_held_back() -> None:
    splitter = AnswerParser(HERMES).splitter("", True)
    assert [splitter.feed(part)[0] for part in ("It ", "is", " <b>", " <tool", "_call>", "{")] == [
        "It",
        " is",
        " <b>",
        "",
        "",
        "",
    ]
