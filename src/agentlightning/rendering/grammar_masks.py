"""Masks of grammars: which tokens may follow those that were sampled, by the recorded text of the grammar alone.

Engines sample and learn under them, and the gateway finds the tokens that a grammar forced. Compiled and followed within
fixed bounds, so that each of them takes and refuses the same grammars. Knows no logits and no request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.errors import EngineError, InputError, MissingExtraError
from agentlightning.rendering.grammar import parser_limits

MAX_COMPILED = 64
"""Grammars that stay compiled, the newest ones."""

Mask = bytes
"""A bit for each token of the vocabulary, the lowest bit of a byte first; in whole words of 32 bits."""


class Grammars:
    """Compiled grammars for one tokenizer. Of `end_ids`, which end completions, the first ends one that is whole by its
    grammar: of several one would be drawn by chance. `vocab` is the model's number of tokens, where that may be above the
    tokenizer's."""

    def __init__(self, folder: Path, end_ids: Sequence[int], vocab: int = 0) -> None:
        self._folder = folder
        self.vocab = vocab
        self.end_ids = list(end_ids)
        self._loaded: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def matcher(self, lark: str) -> Any:
        """A matcher (llguidance.LLMatcher) at the grammar's start. InputError where it cannot be compiled."""
        found = self._compiled.get(lark)
        if found is None:
            tokenizer = self._tokenizer()
            from llguidance import LLMatcher

            found = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=parser_limits())
            if found.is_error():
                raise InputError(f"structured_outputs: the grammar does not compile: {found.get_error()[:300]}")
            self._compiled[lark] = found
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return found.deep_copy()

    def allowed(self, matcher: Any) -> Mask:
        """The tokens that may come next. EngineError where the grammar is past its bounds."""
        mask: Mask = matcher.compute_bitmask()
        if matcher.is_error():
            raise EngineError(f"the grammar cannot be followed any further: {matcher.get_error()[:300]}")
        return mask

    def masks(self, spec: Mapping[str, Any], sampled: Sequence[int]) -> list[Mask]:
        """The mask before each of these tokens. EngineError where one of them was not allowed."""
        matcher = self.matcher(spec["lark"])
        found = []
        known: dict[Mask, Mask] = {}  # most places of a text have the same one, of a size that counts for long texts
        for place, token in enumerate(sampled):
            mask = self.allowed(matcher)
            mask = known.setdefault(mask, mask)
            if not mask[token >> 3] >> (token & 7) & 1:
                from llguidance import __version__ as installed

                raise EngineError(
                    f"token {place} of a call (id {token}) is none that its grammar allows: the grammar was made by "
                    f"{spec.get('library')} {spec.get('version')}, and its mask rebuilt by {installed}"
                )
            found.append(mask)
            if token not in self.end_ids:
                matcher.consume_token(token)
        return found

    def forced(self, spec: Mapping[str, Any], sampled: Sequence[int], logprobs: Sequence[float]) -> list[list[int]]:
        """[start, end) of the sampled tokens beside which the grammar allowed no other. Those have probability 1, so that
        masks are computed for tokens with logprob 0 alone."""
        matcher = self.matcher(spec["lark"])
        spans: list[list[int]] = []
        for place, (token, logprob) in enumerate(zip(sampled, logprobs, strict=True)):
            if logprob == 0.0 and int.from_bytes(self.allowed(matcher), "little").bit_count() == 1:
                if spans and spans[-1][1] == place:
                    spans[-1][1] += 1
                else:
                    spans.append([place, place + 1])
            if token in self.end_ids or not matcher.consume_token(token):
                break
        return spans

    def _tokenizer(self) -> Any:
        if self._loaded is None:
            try:
                from llguidance import LLTokenizer
            except ModuleNotFoundError as error:
                raise MissingExtraError("llguidance", "server") from error
            file = self._folder / "tokenizer.json"
            if not file.is_file():
                raise InputError(
                    f"structured_outputs: the model {self._folder} has no tokenizer.json, which grammars need"
                )
            try:
                known = LLTokenizer(str(file), eos_token=self.end_ids[:1])
                if known.vocab_size < self.vocab:
                    known = LLTokenizer(str(file), n_vocab=self.vocab, eos_token=self.end_ids[:1])
            except ValueError as cause:  # one without a decoder, say
                raise InputError(
                    f"structured_outputs: not available with this model, whose tokenizer grammars cannot read: {cause}"
                ) from cause
            self._loaded = known
        return self._loaded
