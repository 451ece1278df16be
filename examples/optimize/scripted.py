"""A scripted writer of prompts, so that this example, tests and benchmarks run without a model: it edits by a small
grammar and is no language model. It reads nothing but the request that it is sent, and draws one edit, the same for the
same request and number. Where the request has rollouts, a critique or texts that were tried, an edit is the likelier the
more they speak for it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
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


class ScriptedOptimiser:
    """Answers as an optimiser model would, from a grammar: the sentences of it that share words with what went wrong."""

    def __init__(self, grammar: Mapping[str, Any], seed: int = 0) -> None:
        """grammar: sentences that it may `add` at the end, passages that it may `drop`, and passages that it may `replace`
        by others. ConfigError where it has another key, or no edit."""
        self._seed = seed
        for key, given in grammar.items():
            if key not in ("add", "drop", "replace"):
                raise ConfigError(f"grammar.{key}: no such list of edits; known here: add, drop, replace")
            texts = [*given, *given.values()] if isinstance(given, dict) else given
            fits = isinstance(given, dict if key == "replace" else list)
            if not (fits and all(isinstance(one, str) for one in texts)):
                raise ConfigError(f"grammar.{key}: expected texts, got {given!r:.80}")
        self._edits = [("", one) for one in grammar.get("add", ())] + [(one, "") for one in grammar.get("drop", ())]
        self._edits += grammar.get("replace", {}).items()
        if not self._edits or ("", "") in self._edits:
            raise ConfigError("grammar: expected at least one edit in add, drop or replace, and none that is empty")
        passages = dict.fromkeys(passage for edit in self._edits for passage in edit)
        self._spread = Counter(word for passage in passages for word in _words(passage))

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
        for old, new in self._edits:
            if (old not in text) if old else (new in text):
                continue
            edited = text.replace(old, new, 1) if old else f"{text.rstrip()} {new}".strip()
            edited = edited if new else re.sub(r" {2,}", " ", edited).strip()
            evidence = self._shared(new, complaints) + self._shared(old, complaints)
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


async def write(prompt: str, purpose: str, number: int) -> str:
    """The answer of a writer by the sentences of grammar.json."""
    return await ScriptedOptimiser(json.loads((Path(__file__).parent / "grammar.json").read_text()))(
        prompt, purpose, number
    )
