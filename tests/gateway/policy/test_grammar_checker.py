"""Hostile grammars: each is refused by a sentence, or bounded, and the server that asked goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentlightning.gateway.policy.decoding import GrammarChecker
from agentlightning.protocols.base import ApiError
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
                await checker.check({"lark": lark}, "response_format", asyncio.Lock())
            assert str(refused.value).startswith("response_format: ")
            assert len(str(refused.value)) < 400
        for lark in HARMLESS:
            await checker.check({"lark": lark}, "response_format", asyncio.Lock())
    finally:
        checker.close()


async def test_attempts_take_turns_however_many_grammars_one_of_them_sends() -> None:
    checker, order = GrammarChecker(), []
    greedy, other = asyncio.Lock(), asyncio.Lock()

    async def check(name: str, turn: asyncio.Lock) -> None:
        await checker.check({"lark": f'start: "{name}"'}, "response_format", turn)
        order.append(name)

    try:
        await asyncio.gather(*(check(f"greedy {at}", greedy) for at in range(3)), check("other", other))
    finally:
        checker.close()
    assert order == ["greedy 0", "other", "greedy 1", "greedy 2"]


async def test_a_check_that_waits_for_too_long_is_to_be_tried_again_and_a_known_grammar_waits_for_nothing() -> None:
    checker, turn = GrammarChecker(max_wait_s=0.0, max_checked=2), asyncio.Lock()
    known, new = {"lark": 'start: "known"'}, {"lark": 'start: "new"'}
    try:
        for at in range(3):  # those asked for last are remembered
            await checker.check(known, "response_format", turn)
            await checker.check({"lark": f'start: "{at}"'}, "response_format", turn)
        async with turn:
            await checker.check(known, "response_format", turn)
            with pytest.raises(ApiError, match="response_format: its grammar is new") as refused:
                await checker.check(new, "response_format", turn)
        await checker.check(new, "response_format", turn)
    finally:
        checker.close()
    assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
