"""Hostile grammars: each is refused by a sentence, or bounded, and the server that asked goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agentlightning.gateway.policy.grammar_checker import GrammarChecker
from agentlightning.rendering.grammar import GrammarError


def schema(value: Any) -> str:
    return f"start: %json {json.dumps(value)}"


def doubled(name: str, depth: int) -> str:
    """Rules of which each is two of the next."""
    lines = [f"{name}{at}: {name}{at + 1} {name}{at + 1}" for at in range(depth)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{depth}: "x"'])


CHAIN = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(4000)} | {"d4000": {"type": "null"}}

HOSTILE = {
    "a chain of references that overflows the library's stack": (
        schema({"$defs": CHAIN, "$ref": "#/$defs/d0"}),
        "too deep",
    ),
    "a million letters": ("start: /(a{1000}){1000}/", "no completion can follow"),
    "terminals that double forty times": (doubled("A", 40), "too big"),
    "rules that double sixty times": (doubled("a", 60), "no completion can follow"),
    "a schema that is itself": (schema({"$ref": "#"}), "no completion can follow"),
    "arrays of arrays": ("start: %json " + '{"items":' * 5000 + "{}" + "}" * 5000, "recursion limit"),
    "parentheses": ("start: " + "(" * 20_000 + '"a"' + ")" * 20_000, "too deeply nested"),
}
HARMLESS = [
    schema({"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}),
    schema({"type": "string", "minLength": 100_000_000}),
    schema({"enum": [f"value {at}" for at in range(3000)]}),
    "start: <[151657]> /(a|b)*a(a|b){60}/ <[151658]>",
]


async def test_hostile_grammars_are_refused_by_a_sentence_and_the_next_ones_are_checked() -> None:
    checker = GrammarChecker()
    try:
        for lark, said in HOSTILE.values():
            with pytest.raises(GrammarError, match=said) as refused:
                await checker.check({"lark": lark}, "response_format")
            assert str(refused.value).startswith("response_format: ")
            assert len(str(refused.value)) < 400
        for lark in HARMLESS:
            await checker.check({"lark": lark}, "response_format")
    finally:
        checker.close()
