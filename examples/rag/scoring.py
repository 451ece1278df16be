"""Rewards: R = 0.9 × word F1 + 0.1 × format for a model that can read, R = 0.9 × recall + 0.1 × format for one that cannot.

Word F1 and its normalisation are SQuAD's (Rajpurkar et al. 2016), as in MuSiQue, HotpotQA and 2Wiki.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

ANSWER = "Answer:"


def answered(reply: str) -> str | None:
    """What follows the last "Answer:" of a reply; None where there is none (a wrong format)."""
    _, found, answer = reply.rpartition(ANSWER)
    return answer.strip() if found and answer.strip() else None


def answer_reward(answer: str | None, golds: Iterable[str]) -> float:
    """0.9 × the best word F1 over the gold answer and its aliases + 0.1 for an answer at all."""
    return 0.0 if answer is None else 0.9 * max(word_f1(answer, gold) for gold in golds) + 0.1


def retrieval_reward(found: set[str], supporting: Iterable[str], ended: bool) -> float:
    """0.9 × share of the gold paragraphs that were shown + 0.1 where the agent ended by itself, within its calls."""
    gold = set(supporting)
    return 0.9 * len(gold & found) / len(gold) + 0.1 * ended


def word_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall over words, without articles, punctuation and case."""
    ours, theirs = _words(answer), _words(gold)
    common = sum((Counter(ours) & Counter(theirs)).values())
    if not ours or not theirs:
        return float(ours == theirs)
    return 2 * common / (len(ours) + len(theirs))


def _words(text: str) -> list[str]:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()
