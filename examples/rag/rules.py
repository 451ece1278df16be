"""Baselines on the retrieval slice: simple rules without any model, and one that sees the gold paragraphs.

    python examples/rag/rules.py        # a table: rows are rules, columns are held-out sets; and one of answers on MuSiQue

A rule is a function of what an agent has seen to its next query; None ends. A rule of answers points at a span that four
searches for the whole question have shown.
"""

from __future__ import annotations

import random
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from agent import MAX_CALLS, SearchContext, named, spanned
from agent import QUESTION as QUERY_OF_QUESTION
from data import SETS, dev
from names import FUNCTION_WORDS
from retriever import Session
from scoring import answer_reward, retrieval_reward

QUESTION = "the whole question"
"""A query that rules have and the tiny model has not: it can only search for names."""

NEAR = 5
"""Words on either side of a span that count for it."""
Seen = list[str]
"""The question, then each reply of the tool, as the model is shown them."""
Rule = Callable[[Seen], str | None]


def question_again(seen: Seen) -> str | None:
    """The whole question in every search: each shows the next best paragraph."""
    return QUESTION


def each_name(seen: Seen) -> str | None:
    """Each name of the question once."""
    names = _names(seen[0])
    return names[len(seen) - 1] if len(seen) <= len(names) else None


def fixed_plan(seen: Seen) -> str | None:
    """The first name, then the second in every search, whatever was found."""
    names = _names(seen[0])
    return names[min(len(seen) - 1, 1, len(names) - 1)] if names else None


def names_then_by(seen: Seen) -> str | None:
    """Two names of the question, then whoever the paragraphs say that they are "by", then the whole question."""
    plan = _names(seen[0])[:2]
    for reply in seen[1 : 1 + len(plan)]:
        words = reply.split()
        by = [after for word, after in pairwise(words) if word == "by" and _is_name(after)]
        plan += by[:1]
    plan = list(dict.fromkeys(plan))
    return plan[len(seen) - 1] if len(seen) <= len(plan) else None


def names_by_question(seen: Seen) -> str | None:
    """The same, and the whole question in the searches that are left."""
    return names_then_by(seen) or QUESTION


def at_random(rng: random.Random) -> Rule:
    """Any name that was shown; ends before each search with a probability of a fifth."""

    def rule(seen: Seen) -> str | None:
        names = _names(" ".join(seen))
        return rng.choice(names) if names and rng.random() >= 0.2 else None

    return rule


RULES: dict[str, Rule] = {
    "random": at_random(random.Random(0)),
    "question four times": question_again,
    "each name of the question": each_name,
    "the first name, then the second again and again": fixed_plan,
    "two names, then who they are by": names_then_by,
    "the same, then the question": names_by_question,
}


def follow(rule: Rule, task: dict[str, Any]) -> float:
    """The reward of a rule on one question. A rule always ends by itself."""
    names, context = named(task)
    seen = [names.question()]
    while len(seen) < MAX_CALLS and (query := rule(seen)) is not None:
        if query == QUESTION:
            paragraph = context.session.search(task["question"])
            seen.append(names.paragraph(paragraph.title, paragraph.text) if paragraph else "none")
        else:
            seen.append(context.search(query))
    return retrieval_reward(context.session.found, task["supporting"], ended=True)


def kind_asked_for(seen: Seen, spans: list[str], rng: random.Random) -> list[str]:
    """The first date where the question asks when, the first number where it asks how many, else any name."""
    question = seen[0].lower()
    letter = "D" if re.search(r"\bwhen\b|\byear\b", question) else "N" if "how many" in question else "E"
    fitting = [span for span in spans if span[0] == letter]
    return [rng.choice(fitting)] if fitting and letter == "E" else fitting[:1]


def amid_the_question(seen: Seen, spans: list[str], rng: random.Random) -> list[str]:
    """The span with most of the question's words around it, each counted by its nearness."""
    asked = {word.lower() for word in seen[0].split()} - FUNCTION_WORDS
    best, most = "", -1.0
    for words in (reply.split() for reply in seen[1:]):
        places = [place for place, word in enumerate(words) if word.lower() in asked]
        for at in (place for place, word in enumerate(words) if word in spans):
            near = sum(1 / (1 + abs(place - at)) for place in places if abs(place - at) <= NEAR)
            best, most = (words[at], near) if near > most else (best, most)
    return [best] if best else []


AnswerRule = Callable[[Seen, list[str], random.Random], list[str]]
"""What was seen, spans that are not in the question -> candidates, of which the best counts."""
ANSWERS: dict[str, AnswerRule] = {
    "any span": lambda _, spans, rng: [rng.choice(spans)],
    "a date, number or name, as is asked": kind_asked_for,
    "most of the question's words around it": amid_the_question,
    "the best span": lambda _, spans, __: spans,
}


def answer(rule: AnswerRule, task: dict[str, Any]) -> float:
    names, context = spanned(task)
    seen = [names.question()]
    seen += [context.search(QUERY_OF_QUESTION) for _ in range(MAX_CALLS - 1)]
    spans = [name for name in names.shown if name not in seen[0].split()]
    found = [names.query(name) for name in rule(seen, spans, random.Random(task["draw"]))]
    golds = [task["answer"], *task["aliases"]]
    return max((answer_reward(one, golds) for one in found), default=0.0)


def demonstrate(task: dict[str, Any]) -> Iterator[str]:
    """Queries of a greedy searcher that sees the gold paragraphs: any name that brings one, until none does."""
    names, context = named(task)
    gold = set(task["supporting"])
    names.question()
    for _ in range(MAX_CALLS - 1):
        query = next((name for name in names.shown if _first(context, name) in gold), None)
        if query is None:
            return
        yield query
        context.search(query)


def _first(context: SearchContext, query: str) -> str | None:
    """The id of the paragraph that a search would show."""
    assert context.names is not None
    words = context.names.query(query) or ""
    paragraph = Session(context.session.retriever, list(context.session.shown)).search(words)
    return paragraph.id if paragraph else None


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(word for word in text.split() if _is_name(word)))


def _is_name(word: str) -> bool:
    return word[0] == "E" and word[1:].isdigit()


def main() -> None:
    try:
        sets = {name: dev(name) for name in SETS}
    except FileNotFoundError as cause:
        raise SystemExit(str(cause)) from cause
    lines = [["", *(f"{name} ({len(rows)})" for name, rows in sets.items())]]
    for name, rule in RULES.items():
        means = [statistics.fmean(follow(rule, row) for row in rows) for rows in sets.values()]
        lines.append([name, *(f"{mean:.3f}" for mean in means)])
    seeing = [statistics.fmean(_demonstrated(row) for row in rows) for rows in sets.values()]
    lines.append(["one that sees the gold paragraphs", *(f"{mean:.3f}" for mean in seeing)])
    lines += [["MuSiQue: the answer", "R"]]
    lines += [
        [name, f"{statistics.fmean(answer(rule, row) for row in sets['musique']):.3f}"]
        for name, rule in ANSWERS.items()
    ]
    sys.stdout.writelines("| " + " | ".join(line) + " |\n" for line in lines)


def _demonstrated(task: dict[str, Any]) -> float:
    steps = demonstrate(task)
    return follow(lambda _: next(steps, None), task)


if __name__ == "__main__":
    main()
