"""What the scripted engine says under a grammar: what the test scripted if that follows it, else a short completion."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # only tests with a grammar need it
    from llguidance import LLMatcher, LLTokenizer

MAX_TOKENS = 400
PREFERRED = ("</", "<", "}", "]", '"', "0", "1", "t", "n", "{", "[")
"""Beginnings of tokens that soon lead to an end, the best ones first."""


def constrained(folder: Path, end: int, request: dict[str, Any], scripted: list[int]) -> list[int]:
    """The ids of a completion, with its end token."""
    wanted = request["sampling_params"].get("structured_outputs")
    if wanted is None:
        return scripted
    from llguidance import LLMatcher

    tokenizer = _tokenizer(str(folder), end)
    grammar = LLMatcher.grammar_from_lark(wanted["grammar"])
    body = scripted[:-1] if scripted[-1:] == [end] else scripted
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    if matcher.try_consume_tokens(body) == len(body) and matcher.is_accepting():
        return [*body, end]
    return [*_shortest(LLMatcher(tokenizer, grammar), tokenizer, end), end]


def _shortest(matcher: LLMatcher, tokenizer: LLTokenizer, end: int) -> list[int]:
    import llguidance.numpy as bitmasks

    ids: list[int] = []
    mask = bitmasks.allocate_token_bitmask(1, tokenizer.vocab_size)
    while len(ids) < MAX_TOKENS:
        bitmasks.fill_next_token_bitmask(matcher, mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
        allowed = np.flatnonzero(bits).tolist()
        if end in allowed:
            return ids
        ids.append(min(allowed, key=lambda index: (_rank(tokenizer.decode_str([index])), index)))
        assert matcher.consume_token(ids[-1]), matcher.get_error()
    return ids  # as an engine that is cut off


def _rank(text: str) -> tuple[int, int]:
    if text == "<tool_call>":  # an answer in place of a call, where there is the choice
        return len(PREFERRED) + 1, 0
    place = next((place for place, start in enumerate(PREFERRED) if text.startswith(start)), len(PREFERRED))
    return place, len(text)


@cache
def _tokenizer(folder: str, end: int) -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(str(Path(folder) / "tokenizer.json"), eos_token=[end])
