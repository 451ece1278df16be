"""A scripted optimiser model, for tests, benchmarks and the demo: it edits by a small grammar and is no language model.

It reads nothing but the request that it is sent, and draws one edit, the same for the same request and number. Where the
request has rollouts, a critique or texts that were tried, an edit is the likelier the more they speak for it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random
from typing import Any

from agentlightning.algorithms.prompts.reflection import (
    ANSWER_WITH_CRITIQUE,
    ANSWER_WITH_TEXT,
    CRITIQUE,
    CURRENT,
    OUTCOME,
    ROLLOUTS,
    TRIED,
    fenced,
)
from agentlightning.algorithms.settings import check_settings
from agentlightning.errors import ConfigError

_FENCED = re.compile(r"^(`{3,})\n(.*?)\n\1$", re.MULTILINE | re.DOTALL)
_ROLLOUT = re.compile(r"^## Rollout \d+, reward (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)$", re.MULTILINE)
_TRIED = re.compile(
    r"^Better on (\d+) tasks, worse on (\d+), equal on \d+:\n(`{3,})\n(.*?)\n\3$", re.MULTILINE | re.DOTALL
)
_COMMON = frozenset({"and", "are", "but", "for", "has", "not", "that", "the", "this", "was", "with", "you"})
MAX_CRITIQUE_WORDS = 12
MIN_WEIGHT = 0.01
"""Of an edit for which nothing speaks."""


@dataclass(frozen=True, kw_only=True)
class EditGrammar:
    """The edits that a scripted optimiser model knows."""

    add: tuple[str, ...] = ()
    """Sentences that it may put at the end."""
    drop: tuple[str, ...] = ()
    """Passages that it may take out."""
    replace: Mapping[str, str] = field(default_factory=dict)
    """Passages that it may write another way."""

    def __post_init__(self) -> None:
        check_settings(self, "grammar")
        object.__setattr__(self, "replace", dict(self.replace))
        if not (self.add or self.drop or self.replace) or "" in (*self.add, *self.drop, *self.replace):
            raise ConfigError("grammar: expected at least one edit in add, drop or replace, and none that is empty")

    def edits(self, text: str) -> Iterator[tuple[str, str, str]]:
        """Each edit that changes this text: the new text, what it puts in, and what it takes out."""
        for sentence in self.add:
            if sentence not in text:
                yield f"{text.rstrip()} {sentence}".strip(), sentence, ""
        for passage in self.drop:
            if passage in text:
                yield re.sub(r" {2,}", " ", text.replace(passage, "", 1)).strip(), "", passage
        for old, new in self.replace.items():
            if old in text:
                yield text.replace(old, new, 1), new, old


class ScriptedOptimiser:
    """Answers as an optimiser model would, from a grammar: the sentences of it that share words with what went wrong."""

    def __init__(self, grammar: EditGrammar | Mapping[str, Any], seed: int = 0) -> None:
        """ConfigError where the grammar has another key than add, drop and replace, or no edit."""
        self._seed = seed
        if not isinstance(grammar, EditGrammar):
            unknown = sorted(set(grammar) - {"add", "drop", "replace"})
            if unknown:
                raise ConfigError(f"grammar.{unknown[0]}: no such list of edits; known here: add, drop, replace")
            edits: dict[str, Any] = {
                name: tuple(one) if isinstance(one, list) else one for name, one in grammar.items()
            }
            grammar = EditGrammar(**edits)
        self.grammar = grammar
        passages = [*grammar.add, *grammar.drop, *grammar.replace, *grammar.replace.values()]
        self._spread = Counter(word for passage in dict.fromkeys(passages) for word in _words(passage))

    async def __call__(self, prompt: str, purpose: str, number: int = 0) -> str:
        """The new text between fences, or a critique where the request asks for one."""
        if not prompt.rstrip().endswith(ANSWER_WITH_TEXT):
            return self._critique(prompt)
        found = _FENCED.search(prompt, prompt.find(CURRENT) + 1)
        if found is None:
            return "The request has no text."
        text, rest = found.group(2), prompt[found.end() :].replace(ANSWER_WITH_TEXT, "")
        complaints, tried = _complaints(rest), _tried(rest)
        edits, weights = [], []
        for edited, put_in, taken_out in self.grammar.edits(text):
            evidence = self._shared(put_in, complaints) + self._shared(taken_out, complaints)
            wins, losses = tried.get(edited, (0, 0))
            edits.append(edited)
            weights.append((MIN_WEIGHT + evidence) * (1 + wins) / (1 + wins + losses))
        if not edits:
            return "There is no edit."
        chance = Random(blake2b(f"{self._seed} {number} {prompt}".encode()).digest())
        return fenced(chance.choices(edits, weights)[0])

    def _critique(self, prompt: str) -> str:
        complaints = _complaints(prompt.replace(ANSWER_WITH_CRITIQUE, ""))
        known = {word: weight for word, weight in complaints.items() if word in self._spread}
        words = sorted(known, key=lambda word: (-known[word] / self._spread[word], word))[:MAX_CRITIQUE_WORDS]
        return f"Rollouts with low rewards speak of: {', '.join(words)}." if words else "No fault is to be seen."

    def _shared(self, passage: str, complaints: Mapping[str, float]) -> float:
        """The words that a passage shares with the complaints; one that many passages have tells little."""
        return sum(complaints.get(word, 0.0) / self._spread[word] ** 2 for word in sorted(_words(passage)))


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w{3,}", text.casefold())) - _COMMON


def _complaints(text: str) -> dict[str, float]:
    """Words of a critique, and of what rollouts with lower rewards than the best of them ended with, by their weight."""
    found: Counter[str] = Counter()
    _, marked, critique = text.partition(f"{CRITIQUE}\n")
    if marked:
        found.update(_words(critique.partition(f"\n{TRIED}")[0]))
    rollouts = text.partition(f"{ROLLOUTS}\n")[2].partition(f"\n{TRIED}")[0]
    parts = _ROLLOUT.split(rollouts)[1:]  # reward, text, reward, text, …
    rewards = [float(reward) for reward in parts[::2]]
    for reward, rollout in zip(rewards, parts[1::2], strict=True):
        if reward < max(rewards) or max(rewards) == min(rewards):
            found.update(_words(rollout.rpartition(f"{OUTCOME}\n")[2]))
    return {word: float(count) for word, count in found.items()}


def _tried(text: str) -> dict[str, tuple[int, int]]:
    """The texts that the request says were tried, each with the tasks on which it was better, and worse."""
    found = _TRIED.findall(text.partition(TRIED)[2])
    return {tried: (int(wins), int(losses)) for wins, losses, _, tried in found}
