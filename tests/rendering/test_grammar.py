"""Grammars of completions: whatever is drawn under one is what was asked for, in every syntax of tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from conversations import ParsedCompletion, parsed
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_rs import is_valid
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from toy_templates import CHATML
from transformers import AutoTokenizer

from agentlightning.errors import EngineError
from agentlightning.records import JSON
from agentlightning.rendering.completion_parser import Syntax
from agentlightning.rendering.grammar import (
    FORMATS,
    GrammarError,
    Grammars,
    Mask,
    TemplateModel,
    check_grammar,
    make_grammar,
    structured_outputs,
)
from agentlightning.rendering.renderer import Renderer

SYNTAXES = ["hermes", "tags", "pairs", "bare"]
TEACHES = {
    "hermes": "<tool_call>",
    "tags": "<tool_call><function=",
    "pairs": "<tool_call><arg_key>",
    "bare": '{"name": "x", "parameters": ',
}
"""Text in a chat template by which the syntax is known."""
WRITTEN = {
    "tags": "<tool_call>\n<function=f>\n<parameter=p>\n…\n</parameter>\n</function>\n</tool_call>",
    "pairs": "<tool_call>f\n<arg_key>p</arg_key>\n<arg_value>…</arg_value>\n</tool_call>",
}
"""A call of f with a text in the place of …, in the syntaxes that write texts as they are."""
LONGEST = 400
"""Tokens of a completion here: repetition, which chance alone ends, is ended by taking what closes it."""

SCALARS = st.sampled_from(
    [
        {"type": "integer", "minimum": -9, "maximum": 99},
        {"type": "boolean"},
        {"type": "string", "enum": ["Paris", "Oslo / North", 'a "b"']},
        {"type": "string", "pattern": "^[ab]{1,3}$"},
        {"type": "null"},
        {"const": {"k": [1, "two"]}},
    ]
)
NAMES = st.lists(st.sampled_from(["city", "n", "übrig", "a_b", "x-y"]), min_size=1, max_size=3, unique=True)


def an_object(values: st.SearchStrategy[JSON]) -> st.SearchStrategy[JSON]:
    """Schemas of closed objects, some of whose members may be left out."""

    def build(names: list[str], schemas: list[JSON], given: int) -> JSON:
        properties = dict(zip(names, schemas, strict=False))
        required = list(properties)[:given]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(build, NAMES, st.lists(values, min_size=3, max_size=3), st.integers(0, 3))


def a_list(values: st.SearchStrategy[JSON]) -> st.SearchStrategy[JSON]:
    return values.map(lambda item: {"type": "array", "items": item, "minItems": 1, "maxItems": 2})


SCHEMAS = st.recursive(SCALARS, lambda values: an_object(values) | a_list(values), max_leaves=4)
PARAMETERS = an_object(SCHEMAS)


@pytest.fixture(scope="module")
def renderer(make_renderer: Callable[..., Renderer]) -> Renderer:
    return make_renderer(CHATML)


@pytest.fixture(scope="module")
def taught(make_renderer: Callable[..., Renderer]) -> dict[str, Renderer]:
    """A renderer for each syntax."""
    return {name: make_renderer(CHATML + "{# " + text + " #}") for name, text in TEACHES.items()}


def drawn(grammars: Grammars, spec: JSON, seed: int) -> tuple[list[int], list[Mask]]:
    """(token ids drawn under the grammar, the mask before each); as long as it can, then the way to its end."""
    rng, matcher = Random(seed), grammars.matcher(spec["lark"])
    ids: list[int] = []
    masks: list[Mask] = []
    while len(ids) < LONGEST:
        masks.append(grammars.allowed(matcher))
        allowed = tokens_of(masks[-1])
        ends = [token for token in allowed if token in grammars.end_ids]
        ids.append(ends[0] if ends and (len(ids) > 60 or rng.random() < 0.3) else rng.choice(allowed))
        if ids[-1] in grammars.end_ids:
            return ids, masks
        assert matcher.consume_token(ids[-1])
    raise AssertionError(f"no end after {LONGEST} tokens")


def tokens_of(mask: Mask) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [at for at in range(bits.bit_length()) if bits >> at & 1]


@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
@settings(max_examples=25)
def test_what_is_drawn_under_a_schema_is_valid_by_it(renderer: Renderer, schema: JSON, seed: int) -> None:
    ids, _ = drawn(renderer.grammars, structured_outputs({"json": schema}), seed)
    answer = json.loads(renderer.decode(ids[:-1]))
    assert is_valid(schema, answer)


@given(schema=SCHEMAS, seed=st.integers(0, 2**32), cut=st.integers(1, LONGEST))
@settings(max_examples=25)
def test_masks_are_rebuilt_bit_for_bit_from_the_text_and_the_ids(
    renderer: Renderer, schema: JSON, seed: int, cut: int
) -> None:
    spec = json.loads(json.dumps(structured_outputs({"json": schema})))
    ids, masks = drawn(renderer.grammars, spec, seed)
    rebuilt = Grammars(renderer.grammars._folder, renderer.grammars.end_ids)
    assert rebuilt.masks(spec, ids[:cut]) == masks[:cut]
    forced = [at for start, end in rebuilt.forced(spec, ids, [0.0] * len(ids)) for at in range(start, end)]
    assert forced == [at for at, mask in enumerate(masks) if len(tokens_of(mask)) == 1]


@given(schema=SCHEMAS, seed=st.integers(0, 2**32), place=st.integers(0, LONGEST))
@settings(max_examples=15)
def test_a_token_that_was_not_allowed_is_found(renderer: Renderer, schema: JSON, seed: int, place: int) -> None:
    spec = structured_outputs({"json": schema})
    ids, masks = drawn(renderer.grammars, spec, seed)
    place %= len(ids)
    wrong = next(token for token in range(300) if token not in tokens_of(masks[place]))
    with pytest.raises(EngineError, match=f"token {place} of a call"):
        renderer.grammars.masks(spec, [*ids[:place], wrong])


def test_of_several_end_tokens_the_tokenizers_own_is_the_one_allowed_as_in_vllm(
    make_renderer: Callable[..., Renderer], tmp_path: Path
) -> None:
    folder = make_renderer(CHATML).grammars._folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    renderer, spec = Renderer(tmp_path), structured_outputs({"choice": ["yes", "yesterday"]})
    assert renderer.end_ids == {4: "<|im_end|>", 2: "<|endoftext|>", 3: "<|im_start|>"}
    of_vllm = from_tokenizer(AutoTokenizer.from_pretrained(folder), renderer.vocab_size)
    matcher = LLMatcher(of_vllm, LLMatcher.grammar_from_lark(spec["lark"]))
    ids = [*renderer.encode("yes"), 4]
    for token, mask in zip(ids, renderer.grammars.masks(spec, ids), strict=True):
        assert mask == matcher.compute_bitmask()
        matcher.consume_token(token)


@pytest.mark.parametrize("syntax", SYNTAXES)
@given(first=PARAMETERS, second=PARAMETERS, seed=st.integers(0, 2**32), one=st.booleans())
@settings(max_examples=10)
def test_a_forced_call_is_read_as_a_call_with_valid_arguments(
    taught: dict[str, Renderer], syntax: Syntax, first: JSON, second: JSON, seed: int, one: bool
) -> None:
    tools = [tool("first", first), tool("second_tool", second)]
    renderer = taught[syntax]
    wanted = {"tool_call": {"required": True, "names": None, "field": "tool_choice"}}
    spec = make_grammar(wanted, tools, renderer.grammar_model, prompt="", one_call=one)
    answer = answered(renderer, spec, tools, seed)
    assert answer.content.strip() == ""
    assert answer.tool_calls
    assert len(answer.tool_calls) == 1 or not one
    for name, arguments in answer.tool_calls:
        schema = {"first": first, "second_tool": second}[name]
        assert is_valid(schema, json.loads(arguments)), arguments


def test_only_the_named_tool_can_be_called(taught: dict[str, Renderer]) -> None:
    empty = {"type": "object", "properties": {"n": {"type": "boolean"}}, "additionalProperties": False}
    tools = [tool("one", empty), tool("two", empty)]
    wanted = {"tool_call": {"required": True, "names": ["two"], "field": "tool_choice"}}
    spec = make_grammar(wanted, tools, taught["hermes"].grammar_model, prompt="")
    called = [name for seed in range(5) for name, _ in answered(taught["hermes"], spec, tools, seed).tool_calls]
    assert set(called) == {"two"}


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_beside_a_schema_a_completion_is_a_call_or_follows_the_schema(
    taught: dict[str, Renderer], syntax: Syntax
) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    closed = {**schema, "additionalProperties": False}
    tools = [tool("f", closed)]
    wanted = {
        "content": {"kind": "json_schema", "schema": closed, "field": "response_format"},
        "tool_call": {"required": False, "names": None, "field": "response_format"},
    }
    spec = make_grammar(wanted, tools, taught[syntax].grammar_model, prompt="")
    answers = [answered(taught[syntax], spec, tools, seed) for seed in range(30)]
    for answer in answers:
        assert answer.tool_calls or is_valid(closed, json.loads(answer.content))
    assert {bool(answer.tool_calls) for answer in answers} == {True, False}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("<think>\n", ["it may be\n</think>\n\nno"]),
        ("", ["no", "<think>it may be\n</think>\n\nno"]),
        ("<think>\n\n</think>\n\n", ["no"]),
    ],
)
def test_thinking_comes_before_what_is_constrained_and_once(renderer: Renderer, prompt: str, texts: list[str]) -> None:
    model = replace(renderer.grammar_model, thinks=True)
    wanted = {"content": {"kind": "choice", "choices": ["yes", "no"], "field": "response_format"}}
    spec = make_grammar(wanted, None, model, prompt=prompt)
    for text in ["no", "it may be\n</think>\n\nno", "<think>it may be\n</think>\n\nno", "a</think>b</think>no"]:
        assert allowed(renderer, spec, text) == (text in texts), text


@pytest.mark.parametrize("syntax", WRITTEN)
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({}, ["", "a\nb", "</p>", "</argument>"], ["a</par§ameter></arg_§value>b", "a</tool§_call>b"]),
        ({"const": "x"}, ["x"], ["", "y"]),
        ({"enum": ["", 'say "x"']}, ["", 'say "x"'], ["x"]),
        ({"pattern": "^[0-9]{4}$"}, ["1234"], ["123", "12345"]),
        ({"pattern": "a/b"}, ["a/b", "xa/by"], ["ab"]),
        ({"pattern": r"^a\$"}, ["a$", "a$b"], ["a", "xa$"]),
        ({"pattern": "a$"}, ["a", "xa"], ["ax"]),
        ({"minLength": 2, "maxLength": 3}, ["éé", "abc"], ["a", "abcd"]),
        ({"maxLength": 2}, ["", "éa"], ["abc"]),
        ({"minLength": 100}, ["a" * 100], ["a" * 99]),
        ({"pattern": "^[ab]*$", "allOf": [{"minLength": 1}, {"maxLength": 2}]}, ["a", "bb"], ["", "aaa", "c"]),
        ({"format": "date"}, ["soon"], []),
    ],
)
def test_a_text_among_the_arguments_follows_its_schema_and_is_read_as_it_was_written(
    taught: dict[str, Renderer], syntax: str, schema: JSON, right: list[str], wrong: list[str]
) -> None:
    """Drawing finds none of this: chance rarely ends a text, and the next seed's call, which leaves it out, is taken."""
    parameters = {"properties": {"p": {"type": "string", **schema}}, "required": ["p"]}
    renderer, tools = taught[syntax], [tool("f", parameters)]
    wanted = {"tool_call": {"required": True, "names": None, "field": "tool_choice"}}
    spec = make_grammar(wanted, tools, renderer.grammar_model, prompt="")
    for value in right:
        text = WRITTEN[syntax].replace("…", value)
        assert allowed(renderer, spec, text), value
        [(_, arguments)] = parsed(renderer.parser, text, "", tools).tool_calls
        assert json.loads(arguments) == {"p": value}
    for value in wrong:
        assert not allowed(renderer, spec, WRITTEN[syntax].replace("…", value)), value


def allowed(renderer: Renderer, spec: JSON, text: str) -> bool:
    """True where the whole text follows the grammar; what § parts is encoded alone, so that no mark is a token."""
    ids = [index for part in text.split("§") for index in renderer.encode(part)]
    ids.append(renderer.grammars.end_ids[0])
    return bool(renderer.grammars.matcher(spec["lark"]).validate_tokens(ids) == len(ids))


def test_a_mark_within_an_argument_of_json_is_a_part_of_it(taught: dict[str, Renderer]) -> None:
    renderer, tools = taught["hermes"], [tool("f", {"properties": {"p": {"type": "string"}}, "required": ["p"]})]
    wanted = {"tool_call": {"required": True, "names": None, "field": "tool_choice"}}
    spec = make_grammar(wanted, tools, renderer.grammar_model, prompt="")
    text = '<tool_call>\n{"name": "f", "arguments": {"p": "a</tool§_call>b"}}\n</tool_call>'
    assert allowed(renderer, spec, text)
    assert parsed(renderer.parser, text.replace("§", ""), "", tools).tool_calls == (("f", '{"p": "a</tool_call>b"}'),)


@pytest.mark.parametrize(
    ("syntax", "names", "sentence"),
    [
        (None, None, "tool_choice: the model's way of writing tool calls is not known"),
        ("hermes", ["g"], "tool_choice: none of the tools"),
    ],
)
def test_a_call_that_cannot_be_forced_is_refused(syntax: Syntax | None, names: list[str] | None, sentence: str) -> None:
    wanted = {"tool_call": {"required": True, "names": names, "field": "tool_choice"}}
    with pytest.raises(GrammarError, match=sentence):
        make_grammar(wanted, [tool("f", {})], TemplateModel(syntax=syntax), prompt="")


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "string", "format": "path"}, {"type": "string"}),
        ({"items": [{"format": "color"}, {"format": "date"}]}, {"items": [{}, {"format": "date"}]}),
        (
            {"properties": {"format": {"format": "x"}, "const": {"format": "x"}}},
            {"properties": {"format": {}, "const": {}}},
        ),
        ({"const": {"format": "x"}}, {"const": {"format": "x"}}),
    ],
)
def test_a_format_that_the_library_does_not_know_is_an_annotation(schema: JSON, written: JSON) -> None:
    spec = structured_outputs({"json": schema})
    assert spec["lark"] == structured_outputs({"json": written})["lark"]
    check_grammar(spec, "response_format")


def test_every_format_that_is_kept_is_known_to_the_library() -> None:
    for name in FORMATS:
        check_grammar(structured_outputs({"json": {"type": "string", "format": name}}), "response_format")


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"uniqueItems": True}, 'the keywords "uniqueItems" are not known; leave them out of the schema'),
        ({"if": {}, "not": {}}, 'the keywords "if", "not" are not known; leave them out of the schema'),
        ({"$ref": "#/$defs/A"}, "Pointer '/$defs/A' does not exist"),
        ({"enum": []}, "Unsatisfiable schema: anyOf is empty"),
    ],
)
def test_a_refusal_says_what_is_wrong_with_the_schema_and_shows_no_grammar(schema: JSON, why: str) -> None:
    with pytest.raises(GrammarError) as refused:
        check_grammar(structured_outputs({"json": schema}), "response_format")
    assert str(refused.value).startswith(f"response_format: no grammar can be made of it: {why}")
    assert "json_0" not in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": r"[a-c]{2}/\d"}, r"[a-c]{2}/\d"),
        ({"choice": ['say "so"', "né\n", "\x7f"]}, r'say "so"|né\n|\x7f'),
        ({"grammar": 'start: "a" | "b" start'}, "b*a"),
        ({"json_object": True}, r"(?s:\{.*\})"),
    ],
)
def test_what_is_drawn_is_of_the_kind_that_was_asked_for(renderer: Renderer, asked: JSON, pattern: str) -> None:
    for seed in range(10):
        ids, _ = drawn_briefly(renderer.grammars, structured_outputs(asked), seed)
        assert re.fullmatch(pattern, renderer.decode(ids[:-1]))


def tool(name: str, parameters: JSON) -> JSON:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def drawn_briefly(grammars: Grammars, spec: JSON, seed: int) -> tuple[list[int], list[Mask]]:
    """`drawn`, or another seed's where chance finds no end."""
    for more in range(50):
        try:
            return drawn(grammars, spec, seed + 1000 * more)
        except AssertionError:
            continue
    raise AssertionError("chance found no end")


def answered(renderer: Renderer, spec: JSON, tools: list[Any], seed: int) -> ParsedCompletion:
    """A completion under the grammar, as the agent gets it."""
    ids, _ = drawn_briefly(renderer.grammars, spec, seed)
    return parsed(renderer.parser, renderer.decode(ids[:-1], special=True), "", tools)
