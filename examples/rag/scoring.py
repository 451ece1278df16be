"""Reward functions over the record of a finished rollout.

R = 0.9 × word F1 + 0.1 × format for a model that can read, and for a tiny one that points at a span; where it only searches
R = 0.9 × recall + 0.1 × format, with what each search added to it as the reward of that step. Word F1 and its normalisation
are SQuAD's (Rajpurkar et al. 2016), as in MuSiQue, HotpotQA and 2Wiki.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from agent import named, span_of, spanned

ANSWER = "Answer:"


def retrieval(task: dict[str, Any], result: Any) -> dict[str, Any]:
    """R, and as steps what each call added to it: the searches are done again, which costs a millisecond."""
    names, context = named(task)
    names.question()
    earned = [0.0]
    for step in result.steps:
        for use in step.tool_calls:
            context.search(json.loads(use.arguments)["query"])
        ended = not step.tool_calls and step.call.completion.get("content") == "done"
        earned.append(retrieval_reward(context.session.found, task["supporting"], ended))
    return {"reward": earned[-1], "steps": [after - before for before, after in pairwise(earned)]}


def answer(task: dict[str, Any], result: Any) -> float:
    """R of the last words; 0 where they have no answer."""
    return answer_reward(answered(result.answer), [task["answer"], *task["aliases"]])


def span(task: dict[str, Any], result: Any) -> dict[str, float]:
    """R of the span that the agent points at, and the recall of its searches, which are done again."""
    names, context = spanned(task)
    names.question()
    for use in result.tool_calls:
        context.search(json.loads(use.arguments)["query"])
    reward = answer_reward(span_of(result.answer, names), [task["answer"], *task["aliases"]])
    return {"reward": reward, "recall": recall(context.session.found, task["supporting"])}


def retrieval_reward(found: set[str], supporting: Iterable[str], ended: bool) -> float:
    """0.9 × share of the gold paragraphs that were shown + 0.1 where the agent ended by itself, within its calls."""
    return 0.9 * recall(found, supporting) + 0.1 * ended


def recall(found: set[str], supporting: Iterable[str]) -> float:
    gold = set(supporting)
    return len(gold & found) / len(gold)


def answer_reward(answer: str | None, golds: Iterable[str]) -> float:
    """0.9 × the best word F1 over the gold answer and its aliases + 0.1 for an answer at all."""
    return 0.0 if answer is None else 0.9 * max(word_f1(answer, gold) for gold in golds) + 0.1


def answered(reply: str) -> str | None:
    """Returns the text after the last "Answer:" of a reply; None where there is none (a wrong format)."""
    _, found, answer = reply.rpartition(ANSWER)
    return answer.strip() if found and answer.strip() else None


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
